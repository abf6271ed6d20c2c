"""What one segment stores of a model's cache, layer by layer.

Two kinds of layer, decided for each leaf of a cache by its exact type:

- *Sliceable* layers hold one entry a token (dense and quantized keys and values).  A
  segment stores exactly its span of them: [1, heads, tokens, dim], one array a side,
  so that a span can be cut at any token and a path restored by one concatenation.
- Every other layer (recurrent state, wrapped window, pool) is stored as an *end
  state*: the whole layer as it was after the segment's last token.  It is optional;
  without it the segment keeps its sliceable part.

Subclasses of ``KVCache`` may keep more than keys and values, so a type that is not
listed here becomes an end state through the cache's own snapshot contract.

Ownership: a segment's arrays are evaluated, detached from the cache they came from,
and never written again.  A restored cache owns the arrays it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_vlm.apc_adapters import clone_cache_entry
from mlx_vlm.models import cache as caches

Arrays = tuple[mx.array, ...]


class DenseLayer:
    """Keys and values in floating point."""

    types = (caches.KVCache, caches.BatchKVCache)

    @staticmethod
    def arrays(entry: Any) -> Arrays:
        """The live arrays, [rows, heads, capacity, dim]; borrowed."""
        return (entry.keys, entry.values)

    @staticmethod
    def rebuild(arrays: Arrays, length: int, like: Any) -> Any:
        """A single-row cache that owns ``arrays``."""
        entry = caches.KVCache()
        entry.keys, entry.values = arrays
        entry.offset = length
        return entry

    @staticmethod
    def settings(entry: Any) -> tuple:
        """What two entries must share to be parts of one path."""
        return ("dense", str(entry.keys.dtype), entry.keys.shape[1:2])


class QuantizedLayer:
    """Keys and values packed by ``mx.quantize``: (packed, scales, biases) a side."""

    types = (caches.QuantizedKVCache, caches.BatchQuantizedKVCache)

    @staticmethod
    def arrays(entry: Any) -> Arrays:
        """The live arrays, [rows, heads, capacity, packed dim]; borrowed."""
        return (*entry.keys, *entry.values)

    @staticmethod
    def rebuild(arrays: Arrays, length: int, like: Any) -> Any:
        """A single-row cache that owns ``arrays``."""
        _, group_size, bits = like
        entry = caches.QuantizedKVCache(group_size=group_size, bits=bits)
        half = len(arrays) // 2
        entry.keys, entry.values = tuple(arrays[:half]), tuple(arrays[half:])
        entry.offset = length
        return entry

    @staticmethod
    def settings(entry: Any) -> tuple:
        """What two entries must share to be parts of one path."""
        return ("quantized", int(entry.group_size), int(entry.bits))


SLICEABLE = {t: layer for layer in (DenseLayer, QuantizedLayer) for t in layer.types}
STATE = ("state",)
# An entry that the model never writes to; a fresh one stands for it.
EMPTY = ("empty",)


def leaves(prompt_cache: Sequence[Any]) -> Iterator[Any]:
    """The entries of a prompt cache, composites taken apart, in order."""
    for entry in prompt_cache:
        if isinstance(entry, tuple):
            yield from leaves(entry)
        elif isinstance(entry, caches.CacheList):
            yield from leaves(entry.caches)
        else:
            yield entry


def layout_of(prompt_cache: Sequence[Any]) -> tuple[tuple, ...]:
    """How each leaf is stored; paths of different layouts have nothing in common."""
    return tuple(_kind(leaf) for leaf in leaves(prompt_cache))


def _kind(leaf: Any) -> tuple:
    layer = SLICEABLE.get(type(leaf))
    if layer is None:
        return STATE
    return EMPTY if leaf.keys is None else layer.settings(leaf)


@dataclass
class Segment:
    """One span of every sliceable layer, and maybe the other layers' end states.

    Attributes:
        tokens: length of the span.
        spans: one tuple of arrays a sliceable leaf, [1, heads, tokens, dim] each.
        states: one detached cache entry for each other leaf, or None.
    """

    tokens: int
    spans: list[Arrays]
    states: list[Any] | None = None
    nbytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._count()

    def _count(self) -> None:
        arrays = [a for arrays in self.spans for a in arrays]
        self.nbytes = sum(a.nbytes for a in arrays)
        self.nbytes += sum(caches.cache_nbytes(s) for s in self.states or ())

    def split(self, at: int) -> tuple[Segment, Segment]:
        """Cut after ``at`` tokens; the end state goes with the tail."""
        head = [tuple(_part(a, 0, at) for a in s) for s in self.spans]
        tail = [tuple(_part(a, at, self.tokens) for a in s) for s in self.spans]
        mx.eval(head, tail)
        return Segment(at, head), Segment(self.tokens - at, tail, self.states)

    def join(self, tail: Segment) -> Segment:
        """This segment followed by ``tail``, whose end state remains."""
        spans = [
            tuple(mx.concatenate(pair, axis=2) for pair in zip(a, b, strict=False))
            for a, b in zip(self.spans, tail.spans, strict=False)
        ]
        mx.eval(spans)
        return Segment(self.tokens + tail.tokens, spans, tail.states)

    def set_states(self, states: list[Any] | None) -> None:
        """Give or drop the end state."""
        self.states = states
        self._count()


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
    for leaf in leaves(prompt_cache):
        if _kind(leaf) in (STATE, EMPTY):
            continue
        layer = SLICEABLE[type(leaf)]
        padding = getattr(leaf, "left_padding", None)
        first = 0 if padding is None else int(padding[row].item())
        span = tuple(
            _part(
                a[row : row + 1] if a.shape[0] > 1 else a, first + start, first + stop
            )
            for a in layer.arrays(leaf)
        )
        if any(a.shape[2] != stop - start for a in span):
            raise ValueError(f"a layer holds fewer than {stop} tokens")
        spans.append(span)
    return spans


def capture_states(prompt_cache: Sequence[Any], row: int) -> list[Any] | None:
    """Copy the other layers of one row as they are now; None if one has no contract.

    The copies are evaluated and share nothing with the live cache.
    """
    states = []
    for leaf in leaves(prompt_cache):
        if _kind(leaf) != STATE:
            continue
        source = leaf.extract(row) if callable(getattr(leaf, "extract", None)) else leaf
        copied: list[mx.array] = []
        state = clone_cache_entry(source, min_capacity_tokens=None, eval_targets=copied)
        if state is None:
            return None
        mx.eval(copied)
        states.append(state)
    return states


def span_nbytes(prompt_cache: Sequence[Any], tokens: int) -> int:
    """Bytes of ``tokens`` tokens of one row's sliceable layers."""
    total = 0
    for leaf in leaves(prompt_cache):
        if _kind(leaf) not in (STATE, EMPTY):
            for a in SLICEABLE[type(leaf)].arrays(leaf):
                total += a.nbytes // (a.shape[0] * a.shape[2]) * tokens
    return total


def state_nbytes(prompt_cache: Sequence[Any]) -> int:
    """Bytes of one row's other layers."""
    total = 0
    for leaf in leaves(prompt_cache):
        if _kind(leaf) == STATE:
            rows = getattr(leaf, "batch_size", None) or 1
            total += caches.cache_nbytes(leaf) // int(rows)
    return total


def evaluate(spans: list[Arrays]) -> None:
    """Compute captured spans, which detaches them from the live cache."""
    mx.eval(spans)


def restore(
    segments: Sequence[Segment],
    length: int,
    layout: Sequence[tuple],
    template: Sequence[Any],
    capacity: int,
) -> list[Any]:
    """Build the single-row cache of a path: one pass over its bytes.

    Args:
        segments: the path, root first; the last may reach beyond ``length``.
        length: tokens to restore; where layers have end states, the last segment ends
            there and holds them.
        layout: how each leaf is stored.
        template: a fresh cache of the model, which gives the composites; taken.
        capacity: tokens for which room is made, so that the rest of the prompt is
            appended without another copy.

    Returns:
        A prompt cache that owns all its arrays, evaluated.
    """
    out: list[mx.array] = []
    states = iter(segments[-1].states or ())
    sliceable = 0
    restored = []
    for kind in layout:
        if kind == EMPTY:
            restored.append(None)
            continue
        if kind == STATE:
            restored.append(
                clone_cache_entry(
                    next(states), min_capacity_tokens=capacity, eval_targets=out
                )
            )
            continue
        parts = [segment.spans[sliceable] for segment in segments]
        arrays = tuple(
            _joined(side, length, capacity) for side in zip(*parts, strict=False)
        )
        out.extend(arrays)
        layer = DenseLayer if kind[0] == "dense" else QuantizedLayer
        restored.append(layer.rebuild(arrays, length, kind))
        sliceable += 1
    mx.eval(out)
    return _in_shape_of(template, iter(restored))


def _part(a: mx.array, start: int, stop: int) -> mx.array:
    """A detached copy of tokens ``start`` to ``stop``, [.., .., tokens, ..]."""
    return mx.contiguous(a[..., start:stop, :])


def _joined(parts: Sequence[mx.array], length: int, capacity: int) -> mx.array:
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


def _in_shape_of(template: Sequence[Any], restored: Iterator[Any]) -> list[Any]:
    """Put restored leaves into the composites of a fresh cache."""
    built: list[Any] = []
    for entry in template:
        if isinstance(entry, tuple):
            built.append(tuple(_in_shape_of(entry, restored)))
        elif isinstance(entry, caches.CacheList):
            built.append(caches.CacheList(*_in_shape_of(entry.caches, restored)))
        else:
            leaf = next(restored)
            built.append(entry if leaf is None else leaf)
    return built
