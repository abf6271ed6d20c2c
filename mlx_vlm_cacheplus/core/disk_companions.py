"""Other models' parts of segments, by the names that these models have on disk."""

from __future__ import annotations

from typing import Any

from .draft_state import DraftPart
from .segment_tree import Node


class CompanionNames:
    """See the module's text.

    Args:
        names: of the models whose parts are kept, by identity.
    """

    def __init__(self, names: dict[Any, str]):
        self.names = names

    def knows(self, name: str) -> bool:
        """Whether parts of that name are of use."""
        return name in self.names.values()

    def pack(self, companion: Any) -> tuple[str, list, Any] | None:
        """Name, spans and pending state of a part; None for what is not kept."""
        name = self.names.get(companion.identity)
        if name is None or not isinstance(companion, DraftPart):
            return None
        return name, companion.spans, companion.pending

    def unpack(self, name: str, spans: list, pending: Any) -> Any:
        """What was packed; None for a model that is not here."""
        for identity, known in self.names.items():
            if known == name:
                return DraftPart(identity, spans, pending)
        return None

    def of(self, node: Node) -> str:
        """Whose part a node holds; empty for nobody's that is kept."""
        identity = node.payload.companion_identity
        return "" if identity is None else self.names.get(identity, "")
