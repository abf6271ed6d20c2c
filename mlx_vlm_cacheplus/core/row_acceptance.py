"""Rows of a speculative batch keep each what it accepts, where their caches can hold that.

A target whose rollback moves all rows alike has its batch clamped to the row that
accepts least: four rows that accept four of five each by themselves then keep less than
half of what they could.  What the rollback cannot do, the caches can: keys and values
that a row rejected stay behind as holes that the mask hides (``ragged_cache``), and a
recurrent state that recorded the step is taken from each row's own place.

Invariants:

1. A round that is not clamped commits for each row exactly what it accepted.
2. A drafter that asks for the clamp itself has it; so do caches of any other kind.
3. Nothing is looked up of an array: no array operation, no host sync.
4. No round moves keys or values; rows are moved where they leave, come, or are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import ArraysCache, BatchKVCache
from mlx_vlm.speculative.cache_state import (
    SpeculativeCacheTransaction,
    commit_speculative_round,
    rollback_speculative_cache,
)

from .drafted_replies import rows_accept_alike
from .ragged_cache import HoledKVCache

CLAMP = "requires_uniform_batch_acceptance"


def rows_keep_their_own(batch: Any) -> bool:
    """Whether the running round of a batch may leave its rows at unequal lengths.

    Call after the round's verify step was built and before anything is committed: what
    a recurrent state records is known then.
    """
    if getattr(batch.draft_model, CLAMP, False):
        return False
    return all(map(_holds_unequal_rows, batch.prompt_cache))


def _holds_unequal_rows(entry: Any) -> bool:
    if type(entry) is ArraysCache:
        return bool(entry.is_speculating)
    return type(entry) in (BatchKVCache, HoledKVCache)


def hold_holes(entries: list[Any]) -> None:
    """Let the entries of a batch's cache hold rows of unequal age with nothing moved.

    Call before a round loop starts on them.

    Args:
        entries: left as they are where one is of a kind that cannot, or of one row.
    """
    kinds = (ArraysCache, BatchKVCache, HoledKVCache)
    if all(type(entry) in kinds and entry.batch_size > 1 for entry in entries):
        # In one go, where each entry would wait for its own.
        plain = [entry for entry in entries if type(entry) is BatchKVCache]
        mx.eval([entry.left_padding for entry in plain])
        for place, entry in enumerate(entries):
            if type(entry) is BatchKVCache:
                entries[place] = HoledKVCache.of(entry)


def without_holes(entries: Sequence[Any]) -> list[Any]:
    """The same rows as entries that all who read caches know; no array is copied twice.

    The entries given have no holes afterwards.
    """
    return [
        entry.plain() if type(entry) is HoledKVCache else entry for entry in entries
    ]


def commit_round(
    model: Any, caches: Sequence[Any], state: Any, accepted: Any, block_size: int
) -> None:
    """Commit a round; of a target that clamps, row by row where the round was not.

    Args:
        model: the target.
        caches: its entries.
        state: what its verify step returned for a rollback; may be None.
        accepted: accepted draft tokens, of one row or [rows].
        block_size: tokens that the step verified, of each row.
    """
    clamps = getattr(model, CLAMP, False)
    recorded = isinstance(state, SpeculativeCacheTransaction)
    if clamps and not recorded and not rows_accept_alike(None, model):
        rollback_speculative_cache(caches, state, accepted, block_size)
    else:
        commit_speculative_round(model, caches, state, accepted, block_size)
