"""Rows that would spoil each other are prefilled one at a time.

*A warm row of a recurrent model.*  Rows prefilled together with a warm one are padded
on the right, so that a short row has padding after its last token.  Attention layers
roll that padding away when the prefill ends.  A recurrent layer cannot: what it has
read stays in its state.  It needs a mask in every chunk, and models that run a ragged
batch row by row (``Qwen3_5Model``) lose the mask's lengths on the way.  The row's
first token is then right, and every later one is not.

Cold rows are padded on the left and are not concerned, nor are rows that have the
same number of tokens left to read.

*A row with features in a list,* as the pictures of ``qwen3_vl`` add them to its first
layers.  Arrays are put together row by row; of a list, all rows get the first row's.
The others then read another prompt's pictures, or none, and the cache would keep that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mlx_vlm.apc_adapters import Capability


@contextlib.contextmanager
def rows_that_fit_together(generator: Any) -> Iterator[None]:
    """Admit one row at a time while those that wait would spoil each other.

    Args:
        generator: a batch generator about to decide which rows it admits; its
            ``prefill_batch_size`` is changed for that decision alone.
    """
    size = generator.prefill_batch_size
    rows = generator._unprocessed_sequences[:size]
    if (
        len(rows) > 1
        and _may_admit(generator)
        and (_would_share_features(rows) or _would_read_padding(generator, rows))
    ):
        generator.prefill_batch_size = 1
    try:
        yield
    finally:
        generator.prefill_batch_size = size


def _would_share_features(rows: list[tuple]) -> bool:
    """Whether a row has features that the others would be given."""
    return any(
        isinstance(value, (list, tuple))
        for row in rows
        for value in (row[3] or {}).values()
    )


def _would_read_padding(generator: Any, rows: list[tuple]) -> bool:
    """Whether these rows may be padded on the right and a layer could not skip it."""
    if not _is_recurrent(generator.apc):
        return False
    if len(generator._generation_batch) > 0:
        # A row that ends in this step stores its reply before others are admitted: it
        # can make one of these warm.
        return True
    lengths = (_prefix_len(generator, row[1], row[3]) for row in rows)
    if getattr(generator, "draft_model", None) is not None:
        # A drafter may be resumed at fewer places than the target: of a row with a
        # prefix nobody knows yet how much is restored.
        return any(lengths)
    prefixes = list(lengths)
    suffixes = {len(row[1]) - n for row, n in zip(rows, prefixes, strict=False)}
    return any(prefixes) and len(suffixes) > 1


def _may_admit(generator: Any) -> bool:
    """False where nobody is admitted in this step, whatever ends in it."""
    if getattr(generator, "apc", None) is None or generator._prompt_batch is not None:
        return False
    return bool(generator.completion_batch_size >= generator.prefill_batch_size)


def _is_recurrent(coordinator: Any) -> bool:
    """Whether a layer's state cannot be told which of its inputs were padding."""

    def recurrent(spec: Any) -> bool:
        return spec.capability == Capability.CHECKPOINT or any(
            recurrent(child) for child in spec.children
        )

    return any(recurrent(spec) for spec in coordinator.plan.layer_specs)


def _prefix_len(generator: Any, token_ids: Any, prompt_kwargs: Any) -> int:
    """Tokens that a lookup would restore for this row; nothing is restored."""
    manager = generator.apc_manager
    ids = tuple(token_ids)
    extra_hash = generator._apc_extra_hash(prompt_kwargs or {})
    segments = getattr(manager, "segments", None)
    if segments is not None:
        return segments.peek(ids, extra_hash)
    longest = 0
    with manager.lock:
        for entry in manager._exact_cache.values():
            length = len(entry.token_ids)
            fits = entry.extra_hash == extra_hash and longest < length < len(ids)
            if fits and ids[:length] == entry.token_ids:
                longest = length
    if manager.disk is None:
        return longest
    found = manager.disk.find_exact_prefix(
        ids,
        extra_hash=extra_hash,
        max_prefix_tokens=len(ids) - 1,
        min_prefix_tokens=longest,
        block_size=manager.block_size,
    )
    return longest if found is None else found[1]
