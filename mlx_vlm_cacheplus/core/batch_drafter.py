"""A drafter of its own for each batch.

The drafter that is loaded is one object for all requests.  A batch drafts with a shallow
copy, which shares the weights and owns all state: caches, seeds, positions, counters.
"""

from __future__ import annotations

import copy
from typing import Any

# Lazily built from the weights, so worth keeping on the drafter that is shared.
SHARED = (
    "_fused_context_kv_weight",
    "_hot_token_ids_cache",
    "_hot_token_ids_cache_key",
    "_hot_lm_head_cache",
    "_hot_lm_head_cache_key",
)
# What a primer sets on the drafter of its batch.
INSTALLED = (
    "reset",
    "make_cache",
    "prefill_from_target_hidden",
    "accept_verified_tokens",
    "accept_verified_tokens_batch",
    "choose_block_ceiling",
    "choose_initial_block_size",
)
COUNTERS = (
    "speculative_total_rounds",
    "speculative_total_accepted",
    "speculative_total_drafted",
)


def own_copy(shared: Any) -> Any:
    """A drafter with the same weights and state of its own."""
    own = copy.copy(shared)
    own.accept_lens, own.draft_lens = [], []
    for name in COUNTERS:
        setattr(own, name, 0)
    return own


def attach(prompt_batch: Any, batch: Any) -> None:
    """Tell a decoding batch whose drafter its own is a copy of."""
    shared = getattr(prompt_batch, "shared_drafter", None)
    if shared is not None and getattr(batch, "is_speculative", False):
        batch.shared_drafter = shared
        _share_back(batch.draft_model, shared)


def report_back(batch: Any) -> None:
    """Add what the batch's own drafter has counted to the drafter that is loaded."""
    shared = getattr(batch, "shared_drafter", None)
    if shared is None:
        return
    own = batch.draft_model
    before = batch.__dict__.setdefault("reported", {})
    for name in COUNTERS:
        now = getattr(own, name, 0)
        known = before.get(name, 0)
        setattr(shared, name, getattr(shared, name, 0) + now - known)
        before[name] = now
    _share_back(own, shared)


def let_go(batch: Any) -> None:
    """Take a decoding batch and its drafter apart once no row is left.

    What was set on the drafter refers to the drafter, so that its caches would stay
    until the next collection of cycles.
    """
    if batch.uids or getattr(batch, "shared_drafter", None) is None:
        return
    own = batch.draft_model
    for name in INSTALLED:
        own.__dict__.pop(name, None)
    own.verified_hidden = None
    if hasattr(own, "_cache"):
        own._cache = []


def _share_back(own: Any, shared: Any) -> None:
    for name in SHARED:
        if getattr(shared, name, None) is None and getattr(own, name, None) is not None:
            setattr(shared, name, getattr(own, name))
