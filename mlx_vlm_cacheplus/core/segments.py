"""What one segment stores of a model's cache, layer by layer.

Of the two kinds of layer (see ``segment_layers``):

- of a *sliceable* layer, exactly the segment's span: [1, heads, tokens, dim], one array
  a side.
- of every other layer its *end state*: the whole layer as it was after the segment's
  last token.  It is optional; without it the segment keeps its sliceable part.

A segment may carry a *companion* besides: what another model keeps of the same span, such
as the keys and values of a drafter.  It is cut and joined with the segment; what it is
made of is its own business (see ``companions``).

Ownership: a segment's arrays are copies, detached from the cache they came from, and
never written again.  They are scheduled when they are captured and not waited for:
the decode step that runs ahead of a row's end would be waited for as well.  A
restored cache owns the arrays it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_vlm.apc_adapters import clone_cache_entry
from mlx_vlm.models import cache as caches

from .companions import Companion
from .segment_layers import (
    EMPTY,
    SLICEABLE,
    STATE,
    Arrays,
    DenseLayer,
    QuantizedLayer,
    in_shape_of,
    kind_of,
    leaves,
)

# Bytes of layers that are copied before a second copy of them is let go: each such wait
# for the device is a stall of the rows that decode.
AT_ONCE = 32 << 20


@dataclass
class Segment:
    """One span of every sliceable layer, and maybe the other layers' end states.

    Attributes:
        tokens: length of the span.
        spans: one tuple of arrays a sliceable leaf, [1, heads, tokens, dim] each.
        states: one detached cache entry for each other leaf, or None.
        companion: what another model keeps of the span, or None.
    """

    tokens: int
    spans: list[Arrays]
    states: list[Any] | None = None
    companion: Companion | None = None
    nbytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._count()

    def _count(self) -> None:
        arrays = [a for arrays in self.spans for a in arrays]
        self.nbytes = sum(a.nbytes for a in arrays)
        self.nbytes += sum(caches.cache_nbytes(s) for s in self.states or ())
        self.nbytes += 0 if self.companion is None else self.companion.nbytes

    def split(self, at: int) -> tuple[Segment, Segment]:
        """Cut after ``at`` tokens; the end state goes with the tail.

        This segment gives its arrays up, a few layers at a time, so that no second copy
        of the whole is ever held.  After a fault it is whole again.
        """
        head: list[Arrays] = []
        tail: list[Arrays] = []
        with_head, with_tail = (
            (None, None) if self.companion is None else self.companion.split(at)
        )
        try:
            for places in _few_layers([_nbytes(span) for span in self.spans]):
                for span in self.spans[places]:
                    head.append(cut(span, 0, at))
                    tail.append(cut(span, at, self.tokens))
                mx.eval(head[places], tail[places])
                _give_up(self.spans, places)
        except Exception:
            for place, parts in enumerate(zip(head, tail, strict=False)):
                self.spans[place] = self.spans[place] or side_by_side(*parts)
            raise
        return (
            Segment(at, head, None, with_head),
            Segment(self.tokens - at, tail, self.states, with_tail),
        )

    def join(self, tail: Segment) -> Segment:
        """This segment followed by ``tail``, whose end state remains.

        Both give their arrays up, a few layers at a time, as in ``split``.
        """
        spans: list[Arrays] = []
        companion = None
        if self.companion is not None and tail.companion is not None:
            companion = self.companion.join(tail.companion)
        try:
            both = zip(self.spans, tail.spans, strict=True)
            for places in _few_layers([_nbytes(a) + _nbytes(b) for a, b in both]):
                both = zip(self.spans[places], tail.spans[places], strict=True)
                spans += [side_by_side(*parts) for parts in both]
                mx.eval(spans[places])
                _give_up(self.spans, places)
                _give_up(tail.spans, places)
        except Exception:
            mine, end = self.tokens, self.tokens + tail.tokens
            for place, span in enumerate(spans):
                self.spans[place] = self.spans[place] or cut(span, 0, mine)
                tail.spans[place] = tail.spans[place] or cut(span, mine, end)
            raise
        return Segment(self.tokens + tail.tokens, spans, tail.states, companion)

    def may_join(self, tail: Segment) -> bool:
        """Whether joining loses nothing: both have a companion of one identity, or none."""
        return self.companion_identity == tail.companion_identity

    @property
    def companion_identity(self) -> Any:
        """Which model has a part in this segment; None for none."""
        return None if self.companion is None else self.companion.identity

    def set_states(self, states: list[Any] | None) -> None:
        """Give or drop the end state."""
        self.states = states
        self._count()

    def set_companion(self, companion: Companion | None) -> None:
        """Give or drop what another model keeps."""
        self.companion = companion
        self._count()


def _nbytes(span: Arrays) -> int:
    return sum(a.nbytes for a in span)


def _few_layers(sizes: Sequence[int]) -> Iterator[slice]:
    """Places of layers, by their bytes, that are evaluated together."""
    begin = size = 0
    for place, of_layer in enumerate(sizes):
        size += of_layer
        if size >= AT_ONCE or place + 1 == len(sizes):
            yield slice(begin, place + 1)
            begin, size = place + 1, 0


def _give_up(spans: list[Arrays], places: slice) -> None:
    spans[places] = [()] * (places.stop - places.start)


def capture_span(
    prompt_cache: Sequence[Any], row: int, start: int, stop: int
) -> list[Arrays]:
    """Copy tokens ``start`` to ``stop`` of one row of every sliceable layer.

    Args:
        prompt_cache: a live cache, one row or a batch; borrowed.  In a batch a row
            begins behind its left padding.
        row: the row's place in the batch.
    """
    spans = []
    held = [
        leaf for leaf in leaves(prompt_cache) if kind_of(leaf) not in (STATE, EMPTY)
    ]
    # In one go, where each layer would wait for its own.
    paddings = [getattr(leaf, "left_padding", None) for leaf in held]
    mx.eval([padding for padding in paddings if padding is not None])
    for leaf in held:
        first, last = _extent(leaf, row)
        if last - first < stop:
            raise ValueError(f"a layer holds {last - first} of {stop} tokens")
        arrays = SLICEABLE[type(leaf)].arrays(leaf)
        of_row = tuple(a[row : row + 1] for a in arrays)
        spans.append(cut(of_row, first + start, first + stop))
    mx.async_eval(spans)
    return spans


def _extent(leaf: Any, row: int) -> tuple[int, int]:
    """Where the tokens of a row begin and end in a live layer."""
    padding = getattr(leaf, "left_padding", None)
    if padding is None:
        return 0, int(leaf.offset)
    of_rows: Any = padding.tolist()
    return int(of_rows[row]), int(leaf._idx)


def capture_states(prompt_cache: Sequence[Any], row: int) -> list[Any] | None:
    """Copy the other layers of one row as they are now; None if one has no contract.

    The copies are scheduled and share nothing with the live cache.
    """
    states = []
    copied: list[mx.array] = []
    for leaf in leaves(prompt_cache):
        if kind_of(leaf) != STATE:
            continue
        state = clone_cache_entry(
            _row_of(leaf, row), min_capacity_tokens=None, eval_targets=copied
        )
        if state is None:
            return None
        states.append(state)
    mx.async_eval(copied)
    return states


def _row_of(leaf: Any, row: int) -> Any:
    """One row of a layer, as a single-row cache that may share its arrays."""
    extract = getattr(type(leaf), "extract", None)
    if isinstance(leaf, caches.ArraysCache):
        # A model may leave slots empty, which stock's own ``extract`` cannot take.
        single = type(leaf)(len(leaf.cache))
        single.cache = [None if a is None else a[row : row + 1] for a in leaf.cache]
        return single
    if extract is None or extract is caches.KVCache.extract:
        # What a subclass has inherited knows nothing of what the subclass adds.
        return leaf
    return leaf.extract(row)


def span_nbytes(prompt_cache: Sequence[Any], tokens: int) -> int:
    """Bytes of ``tokens`` tokens of one row's sliceable layers."""
    total = 0
    for leaf in leaves(prompt_cache):
        if kind_of(leaf) not in (STATE, EMPTY):
            for a in SLICEABLE[type(leaf)].arrays(leaf):
                total += a.nbytes // (a.shape[0] * a.shape[2]) * tokens
    return total


def state_nbytes(prompt_cache: Sequence[Any]) -> int:
    """Bytes of one row's other layers."""
    total = 0
    for leaf in leaves(prompt_cache):
        if kind_of(leaf) == STATE:
            rows = getattr(leaf, "batch_size", None) or 1
            total += caches.cache_nbytes(leaf) // int(rows)
    return total


def restore(
    segments: Sequence[Segment],
    length: int,
    states: Sequence[Any] | None,
    layout: Sequence[tuple],
    template: Sequence[Any],
    capacity: int,
) -> list[Any]:
    """Build the single-row cache of a path: one pass over its bytes.

    Args:
        segments: the path, root first; the last may reach beyond ``length``.
        length: tokens to restore.
        states: the end states at ``length``; None if no layer has one.
        layout: how each leaf is stored.
        template: a fresh cache of the model, which gives the composites; taken.
        capacity: tokens for which room is made, so that the rest of the prompt is
            appended without another copy.

    Returns:
        A prompt cache that owns all its arrays, evaluated.
    """
    out: list[mx.array] = []
    ends = iter(states or ())
    sliceable = 0
    restored: list[Any] = []
    for kind in layout:
        if kind == EMPTY:
            restored.append(None)
            continue
        if kind == STATE:
            restored.append(
                clone_cache_entry(
                    next(ends), min_capacity_tokens=capacity, eval_targets=out
                )
            )
            continue
        parts = [segment.spans[sliceable] for segment in segments]
        arrays = tuple(
            joined(side, length, capacity) for side in zip(*parts, strict=True)
        )
        out.extend(arrays)
        layer = DenseLayer if kind[0] == "dense" else QuantizedLayer
        restored.append(layer.rebuild(arrays, length, kind))
        sliceable += 1
    mx.eval(out)
    return in_shape_of(template, iter(restored))


def side_by_side(head: Arrays, tail: Arrays) -> Arrays:
    return tuple(
        mx.concatenate([a, b], axis=2) for a, b in zip(head, tail, strict=True)
    )


def cut(span: Arrays, start: int, stop: int) -> Arrays:
    return tuple(_part(a, start, stop) for a in span)


def _part(a: mx.array, start: int, stop: int) -> mx.array:
    """A detached copy of tokens ``start`` to ``stop``, [.., .., tokens, ..]."""
    return mx.contiguous(a[..., start:stop, :])


def joined(parts: Sequence[mx.array], length: int, capacity: int) -> mx.array:
    """The first ``length`` tokens of the parts in a buffer of ``capacity`` tokens."""
    step = caches.KVCache.step
    room = max(step, -(-max(capacity, length + 1) // step) * step) - length
    missing, pieces = length, []
    for part in parts:
        take = min(missing, part.shape[2])
        pieces.append(part if take == part.shape[2] else part[..., :take, :])
        missing -= take
    first = pieces[0]
    shape = (*first.shape[:2], room, first.shape[3])
    return mx.concatenate([*pieces, mx.zeros(shape, dtype=first.dtype)], axis=2)
