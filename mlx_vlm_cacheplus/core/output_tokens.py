"""The cache keeps what the model wrote.

A prompt enters the prefix cache when its prefill ends; the reply that follows was
dropped with its row, so the next turn of the conversation read it again.  Here each
decoding row keeps a ledger of the token ids that the target has processed, and the
row is committed when it ends, however it ends: stop token, length, cancel, client
gone, or an error elsewhere.

Invariants:

1. The ledger grows only after a forward pass has returned, by the ids that were its
   input.  So the ledger is what the row's cache holds, the stop token included.
2. A forward pass that raises leaves layers of unequal age; the batch then forgets
   its ledgers and nothing of it is stored.
3. A row is committed only if every layer that knows its length has the ledger's
   length; otherwise nothing is stored.
4. A decode step costs one list append a row: no array operation, no host sync.

Speculative batches have no ledger: their caches run ahead of, or behind, what was
emitted, and storing them exactly is a change of its own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

logger = logging.getLogger(__name__)


@dataclass
class OutputRow:
    """Ledger of one decoding row.

    Attributes:
        coordinator: the prefix cache's coordinator, asked to ``commit`` at the end.
        ids: prompt ids followed by every id fed since; owned by the row.
        prompt_len: how many of ``ids`` are the prompt, in tokens.
        extra_hash: the salt under which the prompt was looked up.
        committed: tokens of this row in the cache after it ended; 0 until then.
        reason: why nothing was committed, or None.
    """

    coordinator: Any
    ids: list[int]
    prompt_len: int
    extra_hash: int
    committed: int = 0
    reason: str | None = None


def open_rows(prompt_batch: Any) -> dict[int, OutputRow]:
    """Ledgers for the rows of a prompt batch that is about to start decoding.

    Call before ``PromptProcessingBatch.generate`` hands its rows over.  Rows without
    prefix-cache metadata (cache off, layers that cannot be restored) get none.
    """
    coordinator = getattr(prompt_batch, "_apc_coordinator", None)
    if coordinator is None or not getattr(prompt_batch, "_apc_harvest_enabled", True):
        return {}
    return {
        uid: OutputRow(
            coordinator=coordinator,
            ids=list(meta["full_input_ids"]),
            prompt_len=len(meta["full_input_ids"]),
            extra_hash=meta.get("extra_hash", 0),
        )
        for uid, meta in zip(
            prompt_batch.uids, prompt_batch._apc_meta or (), strict=False
        )
        if meta is not None
    }


def attach_rows(batch: Any, rows: dict[int, OutputRow]) -> None:
    """Hand the ledgers to the batch that decodes the rows; it owns them from here."""
    if not getattr(batch, "is_speculative", False):
        batch.output_rows = rows


def merge_rows(batch: Any, other: Any) -> None:
    """Take over the ledgers of a batch that joins ``batch``."""
    joined = {**rows_of(batch), **rows_of(other)}
    if joined:
        batch.output_rows = joined


def rows_of(batch: Any) -> dict[int, OutputRow]:
    """The ledgers of a batch by uid; empty for a batch that keeps none."""
    return getattr(batch, "output_rows", None) or {}


def step_recorded(batch: Any, step: Callable[[], tuple]) -> tuple:
    """Run one decode step and enter the ids that it fed into the ledgers.

    Raises:
        Whatever ``step`` raises; the batch has then forgotten its ledgers.
    """
    rows = rows_of(batch)
    try:
        result = step()
    except Exception:
        rows.clear()
        raise
    if rows:
        for uid, token in zip(batch.uids, result[0], strict=False):
            row = rows.get(uid)
            if row is not None:
                row.ids.append(token)
    return result


def commit_ended_rows(batch: Any, keep: Sequence[int]) -> None:
    """Commit the rows that ``GenerationBatch.filter`` is about to drop.

    Args:
        batch: a decoding batch; its caches are borrowed, still whole.
        keep: indices of the rows that stay.
    """
    rows = rows_of(batch)
    if not rows or len(keep) >= len(batch.uids):
        return
    staying = set(keep)
    ending = [
        (index, uid)
        for index, uid in enumerate(batch.uids)
        if index not in staying and uid in rows
    ]
    for index, uid in ending:
        commit_row(rows.pop(uid), batch.prompt_cache, index)


@contextlib.contextmanager
def rows_survive_errors(generator: Any) -> Iterator[None]:
    """Commit what every row has written if the generator's step raises.

    The rows are lost to the caller afterwards; their tokens are not.
    """
    try:
        yield
    except Exception:
        batch = generator._generation_batch
        for index, uid in enumerate(list(getattr(batch, "uids", ()))):
            row = rows_of(batch).pop(uid, None)
            if row is not None:
                commit_row(row, batch.prompt_cache, index)
        raise


def commit_row(row: OutputRow, prompt_cache: Sequence[Any], index: int) -> None:
    """Commit one ended row; a fault here is logged and never reaches the request.

    Args:
        row: the row's ledger; ``committed`` or ``reason`` is set.
        prompt_cache: one entry a layer, for all rows of the batch; borrowed.
        index: the row's place in the batch.
    """
    if len(row.ids) == row.prompt_len:
        row.reason = "no token was processed after the prompt"
        return
    try:
        row.reason = length_fault(prompt_cache, index, len(row.ids))
        if row.reason is not None:
            logger.warning("Reply not kept in the prefix cache: %s", row.reason)
        elif row.coordinator.commit(
            prompt_cache,
            row.ids,
            batch_idx=index,
            extra_hash=row.extra_hash,
        ):
            row.committed = len(row.ids)
        else:
            row.reason = "the prefix cache did not take it: no room, or too short"
    except Exception as error:
        row.reason = f"{type(error).__name__}: {error}"
        logger.warning("Reply not kept in the prefix cache: %s", row.reason)


def length_fault(prompt_cache: Sequence[Any], index: int, expected: int) -> str | None:
    """Say which layer of a row does not hold ``expected`` tokens, or None.

    Layers that do not know their length (recurrent states) cannot object, nor can
    entries that hold nothing because the model never uses them.
    """
    if not prompt_cache:
        return "the row has no cache"
    # In one go, where each layer would wait for its own.
    mx.eval([offset for entry in prompt_cache for offset in _offsets(entry)])
    known = [
        (layer, length)
        for layer, entry in enumerate(prompt_cache)
        for length in _lengths(entry, index)
    ]
    for layer, length in known:
        if length not in (0, expected):
            return f"layer {layer} holds {length} tokens, the row has {expected}"
    if known and not any(length for _, length in known):
        return f"no layer holds a token, the row has {expected}"
    return None


def _lengths(entry: Any, index: int) -> Iterator[int]:
    """Lengths that a layer's cache entry states for one row, in tokens."""
    for offset in _offsets(entry):
        if isinstance(offset, mx.array):
            of_rows: Any = offset.tolist()
            while isinstance(of_rows, list):
                of_rows = of_rows[index if len(of_rows) > 1 else 0]
            yield int(of_rows)
        else:
            yield int(offset)


def _offsets(entry: Any) -> Iterator[Any]:
    """What a layer's cache entry states as its length: of all rows, or of each."""
    children: tuple[Any, ...] = (
        entry if isinstance(entry, tuple) else tuple(getattr(entry, "caches", ()))
    )
    for child in children:
        yield from _offsets(child)
    offset = getattr(entry, "offset", None)
    if not children and offset is not None and not callable(offset):
        yield offset
