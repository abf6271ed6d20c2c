"""What a record needs to know of the prefix cache that stock gave to a batch generator. Reads plain counters only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CACHE_OFF = "the prefix cache is off"
MEDIA_FOLLOWS = "media in the rest of the prompt"
MEDIA_BEFORE = (
    "media in the common part: no prefix with media is restored for this model"
)
NOT_RESTORABLE = "this model's layers cannot be restored"


@dataclass(frozen=True)
class CacheView:
    """Borrows the manager for as long as the request lasts; None where the cache is off.

    Attributes:
        off: why this request cannot use the cache; None when it can.
        whole_states: rows are stored as whole states, restorable at single lengths, and not in blocks.
        has_companion: a drafter is resumed with the target, where both can be.
    """

    manager: Any = None
    off: str | None = None
    whole_states: bool = False
    has_companion: bool = False

    @classmethod
    def of(cls, batch_generator: Any, server_manager: Any) -> CacheView:
        coordinator = getattr(batch_generator, "apc", None)
        if coordinator is None:
            return cls(off=CACHE_OFF if server_manager is None else NOT_RESTORABLE)
        return cls(
            coordinator.manager,
            None,
            bool(coordinator.is_checkpoint),
            getattr(coordinator, "companion", None) is not None,
        )

    @property
    def block(self) -> int:
        """Tokens that a restored length is rounded to."""
        if self.whole_states or self.segments:
            return 1
        return int(getattr(self.manager, "block_size", 1) or 1)

    @property
    def segments(self) -> bool:
        """Whether rows are stored in a tree of segments, which are cut at any token."""
        return getattr(self.manager, "segments", None) is not None

    @property
    def in_blocks(self) -> bool:
        """Whether rows are stored in stock's blocks of tokens."""
        return not (self.whole_states or self.segments)

    @property
    def minimum(self) -> int:
        """The shortest prefix that is kept, in tokens."""
        if self.segments or not self.whole_states:
            return self.block
        return int(getattr(self.manager, "exact_cache_min_tokens", 0) or 0)

    def count(self, *names: str) -> int:
        """Sum of some of the manager's counters; those that do not exist count 0."""
        stats = getattr(self.manager, "stats", None)
        return sum(int(getattr(stats, name, 0) or 0) for name in names)

    @property
    def evictions(self) -> int:
        return self.count("evictions", "memory_evictions")

    @property
    def disk_hits(self) -> int:
        return self.count("disk_hits")

    @property
    def refusals(self) -> int:
        """How often the budget had no room for a store or a restore."""
        return self.count("memory_skips")


def media_in_the_way(
    batch_generator: Any, ids: Sequence[int], length: int, in_blocks: bool
) -> str:
    """Why `length` tokens of a prompt with media are not restored; empty where media are no reason.

    in_blocks: rows are stored in stock's blocks, which are not restored where they hold media.
    """
    text_follows = getattr(batch_generator, "_apc_suffix_is_text_only", None)
    if callable(text_follows) and not text_follows(list(ids), length):
        return MEDIA_FOLLOWS
    has_media = getattr(batch_generator, "_apc_prefix_has_media_tokens", None)
    if in_blocks and callable(has_media) and has_media(list(ids), length):
        return MEDIA_BEFORE
    return ""
