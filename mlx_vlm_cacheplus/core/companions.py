"""What another model keeps beside the target's part of a segment.

A drafter reads what the target reads and has a cache of its own.  The tree knows three
roles and nothing else of such a model: a *companion* is what it keeps of one segment, a
*view* says how far it can be resumed, a *source* is what it holds of a live row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from .segment_tree import Node, SegmentTree

logger = logging.getLogger(__name__)


class Companion(Protocol):
    """What another model keeps of a segment's span.

    ``identity`` names that model: companions of different identities never meet.
    ``split`` and ``join`` return new companions and leave the old ones whole, so that
    a fault costs nothing.
    """

    identity: Any
    nbytes: int

    def split(self, at: int) -> tuple[Companion, Companion]:
        """Cut after ``at`` tokens of the span."""

    def join(self, tail: Companion) -> Companion:
        """This one followed by ``tail``, of the same identity."""


class CompanionView(Protocol):
    """How far one such model can be resumed."""

    def resumable(self, path: Sequence[Any], length: int, exact: bool) -> int:
        """Longest length up to ``length`` that it can be resumed at, in tokens.

        Args:
            path: nodes of a segment tree, root first.
            exact: whether only ``length`` itself is of use; 0 if it is not resumable.
        """


class CompanionSource(Protocol):
    """What such a model holds of one live row."""

    def wants(self, segment: Any, start: int) -> bool:
        """Whether the segment that starts there in the row lacks what the row holds."""

    def capture(self, start: int, stop: int) -> Companion | None:
        """Copy the part of tokens ``start`` to ``stop``; None if it cannot."""

    def span_nbytes(self, tokens: int) -> int:
        """Bytes of so many tokens."""


def accompany(tree: SegmentTree, node: Node, companion: CompanionSource) -> None:
    """Give a segment the companion's part, if it lacks it; a fault costs only that."""
    if not companion.wants(node.payload, node.start):
        return
    try:
        part = companion.capture(node.start, node.end)
    except Exception as error:
        logger.warning("No companion kept: %s", error, exc_info=True)
        return
    if part is not None:
        tree.update(node, lambda segment: segment.set_companion(part))
