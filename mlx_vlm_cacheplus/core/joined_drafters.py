"""The drafters of two speculative batches become one, row by row.

Each batch drafts with a copy of the loaded drafter.  Between two rounds its state is

- of *look-ahead* drafters (MTP, EAGLE3): keys and values, the next position, and the
  seed: the proposal that the last round's forward pass left, with its hidden state;
- of *context* drafters (DFlash, DSpark): a cache for each row, and the features of the
  tokens that the last round accepted, which the next round reads first;
- of *assistants* (MTP drafters that read the target's own caches): none.

A round loop that starts asks the drafter to ``reset`` (context drafters also to
``make_cache``); here these hand out the joined state.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import ArraysCache, BatchKVCache, KVCache
from mlx_vlm.speculative.mtp import _mtp_shared_kv_from_prompt_cache

from .draft_priming import DraftPrimer, PrimedRow, takes_ragged_rows
from .ragged_cache import HoledKVCache

# Entries that take each other's rows and keep every row's own length.
JOINABLE = (BatchKVCache, HoledKVCache, ArraysCache)
# What the sizes of the next blocks depend on.
HISTORY = 32
# Joined rows are padded to the longest.  Bytes of padding that nobody minds, and how many
# times what the rows hold apart they may take where it is more.
SMALL, MOST = 256 << 20, 1.5


@dataclass
class LiveRows:
    """The rows of a batch that go on, at a round boundary.

    Attributes:
        batch: a speculative batch; borrowed.
        rows: their numbers in it.
        places: their places in the caches.
    """

    batch: Any
    rows: list[int]
    places: list[int]

    @classmethod
    def of(cls, batch: Any) -> LiveRows:
        """All rows that have not ended."""
        going = [
            (row, place)
            for place, row in enumerate(batch.drafted.active)
            if not batch._finished[row]
        ]
        return cls(batch, [row for row, _ in going], [place for _, place in going])

    def kept(self, array: mx.array) -> mx.array:
        """These rows of an array whose first axis is the places in the caches."""
        if len(self.places) == array.shape[0]:
            return array
        return array[mx.array(self.places)]

    def primed(self) -> list[PrimedRow]:
        """What the drafter holds of each row; nothing of an assistant's."""
        primer = getattr(self.batch, "primer", None)
        return [] if primer is None else [primer.rows[row] for row in self.rows]

    def accepted(self) -> list[int]:
        """Accepted draft tokens of each row in the newest round."""
        return [self.batch.drafted.accepted[row] for row in self.rows]


class RowFeatures:
    """Features of rows of unequal length, [tokens, features] each; a round loop takes
    one row after the other, ``features[row : row + 1]``, [1, tokens, features].
    """

    def __init__(self, rows: Sequence[mx.array]):
        self._rows = rows
        # As of one array: the longest row's.
        self.shape = (len(rows), max(r.shape[1] for r in rows), rows[0].shape[2])

    def __getitem__(self, rows: slice) -> mx.array:
        (row,) = self._rows[rows]
        return row


def reason_apart(batch: Any) -> str | None:
    """Why the drafter of a running batch cannot take other rows; None if it can."""
    drafter = batch.draft_model
    assistant = is_assistant(batch)
    if not (assistant or isinstance(getattr(batch, "primer", None), DraftPrimer)):
        return "its drafter has no state of a known kind"
    if batch.draft_kind == "dflash" or assistant:
        known = getattr(batch, "verified_features", None) is not None
        return None if known else "its drafter's features are not known"
    name = type(drafter).__name__
    if not takes_ragged_rows(drafter, batch.draft_kind):
        return f"{name} keeps one position for all rows"
    if any(type(entry) not in (KVCache, BatchKVCache) for entry in drafter._cache):
        return f"{name} keeps more than keys and values"
    if drafter._seed_token is None or getattr(drafter, "verified_hidden", None) is None:
        return f"{name} has no proposal ready"
    return None


def reason_padded(entries: Sequence[Any], others: Sequence[Any]) -> str | None:
    """Why rows of unequal length are not put side by side; None where they may be.

    Args:
        entries, others: what two batches hold of the target; nothing is waited for.
    """
    held = joined = 0
    for pair in zip(entries, others, strict=True):
        if any(getattr(entry, "keys", None) is None for entry in pair):
            continue  # recurrent states are of one size, whatever was read
        longest = max(entry._idx for entry in pair)
        for entry in pair:
            columns = entry.keys.shape[2]
            of_column = (entry.keys.nbytes + entry.values.nbytes) // columns
            held += of_column * entry._idx
            joined += of_column * longest
    if joined - held <= SMALL or joined <= MOST * held:
        return None
    return (
        f"its rows are of unequal length: together they would take {joined >> 20} MiB"
        f" in place of {held >> 20}"
    )


def is_assistant(batch: Any) -> bool:
    """Whether the batch's drafter keeps nothing but what it is shown of the target."""
    has = functools.partial(hasattr, batch.draft_model)
    mtp = batch.draft_kind == "mtp" and has("set_shared_kv")
    return mtp and not has("prefill_from_target_hidden")


def shown_of_target(batch: Any, entries: list[Any]) -> dict[str, Any]:
    """What a round loop shows an assistant of the target's caches; nothing to others."""
    if not is_assistant(batch):
        return {}
    target = getattr(batch.model, "language_model", batch.model)
    shown: dict[str, Any] = _mtp_shared_kv_from_prompt_cache(target, entries)
    if not shown:
        raise ValueError("the target's caches are not those that its drafter reads")
    return shown


def join_drafters(own: LiveRows, other: LiveRows) -> tuple[Any, Callable[[], None]]:
    """Join what two drafters hold.

    Args:
        own: rows whose drafter takes the others.
        other: rows of a batch whose drafter is not used again.

    Returns:
        The features that the next round begins with, and a call that installs the
        joined state on ``own``'s drafter; nothing is changed before it.
    """
    drafter = own.batch.draft_model
    if own.batch.draft_kind == "dflash":
        rows = [*own.primed(), *other.primed()]
        features = RowFeatures([*_segments(own), *_segments(other)])
        return features, lambda: _hand_out_caches(drafter, [row.cache for row in rows])
    hidden = mx.concatenate([_newest_hidden(own), _newest_hidden(other)])
    state = {} if is_assistant(own.batch) else _joined_lookahead(own, other)
    return hidden, lambda: _hand_out_state(drafter, state)


def joined_entries(
    entries: Sequence[Any], others: Sequence[Any], own: LiveRows, other: LiveRows
) -> list[Any]:
    """Cache entries of both batches' rows; the entries given are left as they are."""
    joined = []
    for mine, theirs in zip(entries, others, strict=True):
        into = _of_rows(mine, own.places)
        into.extend(_of_rows(theirs, other.places))
        joined.append(into)
    return joined


def _of_rows(entry: Any, places: Sequence[int]) -> Any:
    """A copy of a cache entry with some of its rows; shares arrays, none is written."""
    if type(entry) is KVCache:
        return BatchKVCache.merge([entry])
    rows = copy.copy(entry)
    if rows.batch_size != len(places):
        rows.filter(mx.array(list(places)))
    return rows.plain() if type(rows) is HoledKVCache else rows


def _segments(rows: LiveRows) -> list[mx.array]:
    """Features of each row's newest tokens, [1, tokens, features]."""
    features = mx.concatenate(rows.batch.verified_features, axis=-1)
    return [
        features[place : place + 1, : accepted + 1]
        for place, accepted in zip(rows.places, rows.accepted(), strict=True)
    ]


def _newest_hidden(rows: LiveRows) -> mx.array:
    """The target's hidden state before each row's newest token, [rows, 1, features]."""
    if is_assistant(rows.batch):
        (hidden,) = rows.batch.verified_features
    else:
        hidden = rows.batch.draft_model.verified_hidden
    return hidden[mx.array(rows.places), mx.array(rows.accepted())][:, None]


def _joined_lookahead(own: LiveRows, other: LiveRows) -> dict[str, Any]:
    mine, theirs = own.batch.draft_model, other.batch.draft_model
    state: dict[str, Any] = {
        name: mx.concatenate(
            [own.kept(getattr(mine, name)), other.kept(getattr(theirs, name))]
        )
        for name in ("_seed_token", "_seed_hidden")
    }
    state["_next_position"] = mx.concatenate([_positions(own), _positions(other)])
    state["_cache"] = joined_entries(mine._cache, theirs._cache, own, other)
    return state


def _positions(rows: LiveRows) -> mx.array:
    """The next position of each row, [rows]."""
    position = rows.batch.draft_model._next_position
    if isinstance(position, mx.array) and position.size > 1:
        return rows.kept(position).astype(mx.int32)
    return mx.full((len(rows.rows),), position, dtype=mx.int32)


def _hand_out_state(drafter: Any, state: dict[str, Any]) -> None:
    history = drafter.accept_lens[-HISTORY:], drafter.draft_lens[-HISTORY:]

    def reset(target_model: Any, left_padding: Any = None) -> Any:
        fresh = type(drafter).reset(drafter, target_model)
        drafter.accept_lens, drafter.draft_lens = map(list, history)
        for name in list(state):
            setattr(drafter, name, state.pop(name))
        return getattr(drafter, "_cache", fresh)

    drafter.verified_hidden = None
    drafter.reset = reset


def _hand_out_caches(drafter: Any, caches: list[Any]) -> None:
    history = drafter.accept_lens[-HISTORY:], drafter.draft_lens[-HISTORY:]

    def reset(target_model: Any) -> Any:
        fresh = type(drafter).reset(drafter, target_model)
        drafter.accept_lens, drafter.draft_lens = map(list, history)
        # The round loop asks for one cache a row, in their order.
        drafter.make_cache = lambda: caches.pop(0)
        return fresh

    drafter.__dict__.pop("make_cache", None)
    drafter.reset = reset
