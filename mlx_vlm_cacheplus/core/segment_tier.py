"""What a segment cache knows of a slower tier below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tier(Protocol):
    """A slower tier, which keeps what was in this one; it is told, and adopts later."""

    def grown(self, salt: int, ids: Sequence[int], has_states: bool) -> None:
        """The cache holds this path now."""

    def shrunk(self) -> None:
        """The cache holds less than it did."""

    def forget(
        self, session: str, paths: Sequence[tuple[int, tuple[int, ...], int]]
    ) -> None:
        """These paths (salt, ids, tokens that others share) were a session's alone."""
