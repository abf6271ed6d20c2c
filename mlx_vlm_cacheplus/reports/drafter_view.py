"""What a record needs to know of the draft model: had it read the prompt, and if not, why. Reads no array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PRIMING_OFF = "draft-priming is off"
STATE_OFF = "draft-state is off"
CACHE_OFF = "the prefix cache is off"
NOT_READ_BY_DRAFTER = "the drafter had not read it"
FAULT = "its state could not be restored; the server's log says why"


@dataclass(frozen=True)
class DrafterView:
    """One row of a prompt batch, before it is read.

    Attributes:
        primed: it will have read the whole prompt before its first draft.
        restored: its part of the restored prefix came from the cache.
        reason: why it is one of them no; None where nothing is missing.
    """

    primed: bool = False
    restored: bool = False
    reason: str | None = None

    @classmethod
    def of(cls, prompt_batch: Any, index: int, restored: int) -> DrafterView:
        """restored: tokens of the target's prefix."""
        rows = getattr(
            getattr(prompt_batch, "_speculative_prefill", None), "rows", None
        )
        if rows is None:
            why = getattr(prompt_batch, "draft_reason", PRIMING_OFF)
            return cls(reason=why or PRIMING_OFF)
        if rows[index].whole:
            return cls(primed=True, restored=restored > 0)
        return cls(reason=_why_not_restored(prompt_batch))


def _why_not_restored(prompt_batch: Any) -> str:
    coordinator = getattr(prompt_batch, "_apc_coordinator", None)
    if coordinator is None:
        return CACHE_OFF
    if not hasattr(coordinator, "companion"):
        return STATE_OFF
    if coordinator.companion is None:
        return getattr(coordinator, "companion_reason", None) or STATE_OFF
    return FAULT


def is_shorter_for(cache: Any, ids: list[int], salt: Any, restored: int) -> bool:
    """Whether the target alone could have been resumed further than it was.

    One token less is the drafter's way: it is read again for its hidden state.

    Args:
        cache: the request's CacheView.
    """
    segments = getattr(cache.manager, "segments", None)
    if not cache.has_companion or segments is None or salt is None:
        return False
    return bool(segments.peek(ids, salt) > restored + 1)
