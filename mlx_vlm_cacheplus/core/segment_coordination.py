"""The coordinator's work on segment trees.

Each function is the body of one method of ``APCCoordinator`` or ``APCManager``; the
names and the hit dictionaries stay stock's, so that generation code does not change.
``matched_blocks`` hold the hit, whose lease ``release`` gives back.

A coordinator may have a ``companion``, another model that is resumed with the target,
and while a row is committed a ``companion_source``, which knows what that model holds of
the row: ``companion_source(row)``, or None.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from .boundaries import message_starts, rejoin_points, stops
from .resumable import Hit
from .segment_cache import SegmentCache
from .warm_single_row import stays_plain

logger = logging.getLogger(__name__)

# Prompts whose place of divergence is remembered between lookup and prefill.
LOOKUPS = 64


def attach(manager: Any) -> SegmentCache:
    """Give a storage manager its segment cache, within its own budget."""
    manager.segments = SegmentCache(
        manager.memory_max_bytes,
        lambda nbytes: manager._make_room(nbytes, retain_bytes=nbytes),
    )
    return manager.segments


def configure(coordinator: Any, tokenizer: Any, plain_rows: bool) -> None:
    """Tell a coordinator what only the batch generator knows.

    Args:
        tokenizer: borrowed; gives the special ids at which messages start.
        plain_rows: whether a cold batch of one gets plain caches (no drafter).
    """
    special: set[int] = set(getattr(tokenizer, "all_special_ids", None) or ())
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    special |= {i for i, token in added.items() if getattr(token, "special", False)}
    coordinator.special_ids = special
    coordinator.plain_rows = plain_rows


def lookup(
    coordinator: Any,
    token_ids: Sequence[int],
    *,
    extra_hash: int,
    safe_lookup_min: int,
    suffix_is_text_only: Callable[[int], bool],
    prefix_has_media: Callable[[int], bool],
) -> dict | None:
    """Find the longest restorable prefix; a hit holds a lease on its path."""
    if not coordinator.enabled or len(token_ids) < 2:
        return None
    manager = coordinator.manager

    # A prefix may hold media on every layout: the salt names the prompt's pictures,
    # and each row has its own positions.
    def usable(length: int) -> bool:
        return length > safe_lookup_min and suffix_is_text_only(length)

    try:
        _remember_divergence(coordinator, token_ids, extra_hash)
        # A row that is decoded without the drafter is served from the target's part.
        alone = getattr(coordinator, "plain_rows", True)
        companion = None if alone else getattr(coordinator, "companion", None)
        hit = manager.segments.find(token_ids, extra_hash, usable, companion)
    except Exception as error:
        logger.warning("No prefix looked up: %s", error, exc_info=True)
        hit = None
    with manager.lock:
        if hit is None:
            manager.stats.misses += 1
            return None
        manager.stats.hits += 1
        manager.stats.matched_tokens += hit.length
    return {
        "matched_blocks": [hit],
        "prefix_len": hit.length,
        "extra_hash": extra_hash,
        "full_input_ids": list(token_ids),
        "cache_plan": coordinator.plan,
        "segments": hit,
    }


def _remember_divergence(coordinator: Any, ids: Sequence[int], salt: int) -> None:
    known = coordinator.__dict__.setdefault("left_tree_at", {})
    if len(known) >= LOOKUPS:
        known.clear()
    known[_key(ids)] = coordinator.manager.segments.match(ids, salt).length


def _key(ids: Sequence[int]) -> tuple[int, int]:
    return len(ids), hash(tuple(ids))


def checkpoint_lengths(
    coordinator: Any, token_ids: Sequence[int], media_token_ids: set[int]
) -> list[int]:
    """Where a cold or warm prefill of these tokens stops to keep an end state."""
    final = coordinator.checkpoint_len(token_ids, media_token_ids)
    if final <= 0:
        return []
    special: set[int] = getattr(coordinator, "special_ids", set()) - media_token_ids
    starts = message_starts(token_ids, special)
    left = coordinator.__dict__.get("left_tree_at", {}).get(_key(token_ids), 0)
    media = {i for i, token in enumerate(token_ids) if token in media_token_ids}
    return stops(
        [*rejoin_points(starts, left), left],
        len(token_ids),
        coordinator.manager.checkpoint_interval_tokens,
        final,
        media,
    )


def merge_rows(
    coordinator: Any,
    picks: Sequence[dict | None],
    prefix_lens: Sequence[int],
    kv_quant_config: dict | None,
) -> tuple[list[Any] | None, int]:
    """Build the cache of a batch of warm and cold rows.

    A batch of one gets the plain caches that a cold one would have had.  After a
    fault there are none, and the rows are read cold.
    """
    from mlx_vlm.apc import make_warm_batch_exact_cache_multi

    try:
        rows = [
            coordinator.fresh_cache() if pick is None else _restore(coordinator, pick)
            for pick in picks
        ]
    except Exception as error:
        logger.warning("Nothing restored: %s", error, exc_info=True)
        return None, 0
    if stays_plain(coordinator, picks, kv_quant_config):
        caches, longest = rows[0], prefix_lens[0]
    else:
        caches, longest = make_warm_batch_exact_cache_multi(
            rows, prefix_lens, kv_quant_config=kv_quant_config
        )
    if caches is not None:
        with coordinator.manager.lock:
            coordinator.manager.stats.restored_tokens += sum(prefix_lens)
    return caches, longest


def materialize_single(coordinator: Any, hit: dict) -> list[Any]:
    """Build the cache of one hit, outside the batch generator.

    A fault is raised: the caller has cut the prompt already.
    """
    row = _restore(coordinator, hit)
    with coordinator.manager.lock:
        coordinator.manager.stats.restored_tokens += hit["prefix_len"]
    return row


def _restore(coordinator: Any, pick: dict) -> list[Any]:
    hit: Hit = pick["segments"]
    return coordinator.manager.segments.restore(
        hit, coordinator.fresh_cache(), len(pick["full_input_ids"])
    )


def commit(
    coordinator: Any,
    token_ids: Sequence[int],
    prompt_cache: Sequence[Any],
    *,
    batch_idx: int | None,
    extra_hash: int,
    with_state: bool = True,
) -> bool:
    """Take in what a row holds; a fault here never reaches the request."""
    if not coordinator.enabled or not token_ids:
        return False
    manager = coordinator.manager
    before = manager.segments.stored_tokens
    row = batch_idx or 0
    source = getattr(coordinator, "companion_source", None)
    try:
        stored = manager.segments.commit(
            token_ids,
            extra_hash,
            prompt_cache,
            row,
            with_state=with_state,
            companion=None if source is None else source(row),
        )
    except Exception as error:
        logger.warning("%d tokens not kept: %s", len(token_ids), error, exc_info=True)
        return False
    with manager.lock:
        manager.stats.stored_tokens += manager.segments.stored_tokens - before
        if stored:
            manager.stats.stores += 1
        else:
            manager.stats.memory_skips += 1
    return stored


def keep_prefilled(prompt_batch: Any, index: int, with_state: bool = True) -> None:
    """Keep the chunks that a row's prefill has finished, though it will not end.

    Args:
        prompt_batch: its caches are borrowed, before the row leaves them.
        index: the row's place in it.
        with_state: False where a chunk was broken off and layers may be ahead.
    """
    coordinator = getattr(prompt_batch, "_apc_coordinator", None)
    metas = getattr(prompt_batch, "_apc_meta", None) or []
    if coordinator is None or index >= len(metas) or metas[index] is None:
        return
    meta = metas[index]
    done = prompt_batch._row_real_tokens_processed(index)
    if done <= int(meta.get("prefix_len") or 0):
        return
    if prompt_batch._right_pad_per_row is not None:
        columns = prompt_batch._processed_prompt_columns
        with_state = with_state and columns <= prompt_batch._suffix_lens[index]
    commit(
        coordinator,
        meta["full_input_ids"][:done],
        prompt_batch.prompt_cache,
        batch_idx=index,
        extra_hash=meta.get("extra_hash", 0),
        with_state=with_state,
    )


def keep_removed(generator: Any, uid: int) -> None:
    """Keep what a row has read that is removed while it is prefilled."""
    import mlx.core as mx

    prompt_batch = generator._prompt_batch
    if prompt_batch is not None and uid in prompt_batch.uids:
        with mx.stream(generator._stream):
            keep_prefilled(prompt_batch, prompt_batch.uids.index(uid))


def release(blocks: Sequence[Any]) -> None:
    """Give leases back."""
    for held in blocks:
        if isinstance(held, Hit):
            held.release()


def make_room(manager: Any, allocation_bytes: int, retain_bytes: int) -> bool:
    """Stock's budget, with segments as what is evicted."""
    import mlx.core as mx

    required = manager.memory_reserve_bytes + (
        manager._prefill_reserve_bytes + allocation_bytes
        if retain_bytes
        else max(manager._prefill_reserve_bytes, allocation_bytes)
    )
    segments = manager.segments
    # Where psutil is missing, stock asks another process for this figure.
    free = manager._memory_headroom()
    headroom = segments.nbytes + free - required
    target = max(0, min(manager.memory_max_bytes - retain_bytes, headroom))
    before = segments.evictions
    segments.evict_to(target)
    evicted = segments.evictions - before
    if evicted:
        mx.clear_cache()
        with manager.lock:
            manager.stats.evictions += evicted
            manager.stats.memory_evictions += evicted
        free = manager._memory_headroom()
    return (
        segments.nbytes + retain_bytes <= manager.memory_max_bytes and free >= required
    )
