"""The kinds of stock cache entry, filled so that their arrays record token ids.

A layer's keys hold the id of each position (plus the head's number), its values the
negative, and a recurrent state holds how many tokens it has seen with a hash over
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models import cache as stock

# What padding columns hold; no token has this id.
PADDING = -1
WINDOW = 8


def encode(
    rows: Sequence[Sequence[int]], heads: int, dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of rows of token ids, [rows, heads, tokens, dim]."""
    ids = np.array([list(row) for row in rows], dtype=np.float32)
    head = np.arange(heads, dtype=np.float32)
    keys = np.repeat((ids[:, None, :] + head[None, :, None])[..., None], dim, axis=3)
    return keys, -keys


@lru_cache
def packed(
    token: int, heads: int, dim: int, group_size: int, bits: int
) -> tuple[np.ndarray, ...]:
    """What quantized keys and values hold for one token, [1, heads, 1, packed dim] each."""
    return tuple(
        np.array(part)
        for side in encode([[token]], heads, dim)
        for part in mx.quantize(mx.array(side), group_size=group_size, bits=bits)
    )


def fold(ids: Sequence[int], state: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """A recurrent state: tokens seen and a hash over them; padding changes nothing."""
    seen, value = state
    for token in ids:
        if token != PADDING:
            seen, value = seen + 1, (value * 31 + token + 7) % 65521
    return seen, value


class Layer:
    """One kind of cache entry."""

    def make(self, left_padding: list[int] | None = None) -> Any:
        """A fresh entry: for one row, or for a batch."""
        raise NotImplementedError

    def feed(self, entry: Any, rows: Sequence[Sequence[int]]) -> None:
        """Let an entry process one chunk; rows are equally long."""
        raise NotImplementedError

    def check(self, entry: Any, ids: Sequence[int]) -> None:
        """Assert that a single-row entry holds exactly ``ids``."""
        raise NotImplementedError

    def check_span(self, arrays: Sequence[mx.array], ids: Sequence[int]) -> None:
        """Assert that a stored span holds exactly ``ids``."""
        raise NotImplementedError


@dataclass(frozen=True)
class Dense(Layer):
    heads: int = 1
    dim: int = 4
    sliceable = True

    def make(self, left_padding=None):
        return (
            stock.KVCache()
            if left_padding is None
            else stock.BatchKVCache(left_padding)
        )

    def feed(self, entry, rows):
        entry.update_and_fetch(*map(mx.array, encode(rows, self.heads, self.dim)))

    def check(self, entry, ids):
        assert type(entry) is stock.KVCache
        assert entry.offset == len(ids)
        assert entry.keys.shape[2] % entry.step == 0
        self.check_span(
            [np.array(a)[..., : len(ids), :] for a in (entry.keys, entry.values)], ids
        )

    def check_span(self, arrays, ids):
        for got, want in zip(arrays, encode([ids], self.heads, self.dim), strict=True):
            assert got.shape == want.shape
            assert np.array_equal(np.array(got), want), f"not the tokens {list(ids)}"


@dataclass(frozen=True)
class Quantized(Layer):
    heads: int = 1
    dim: int = 64
    group_size: int = 32
    bits: int = 8
    sliceable = True

    def make(self, left_padding=None):
        how = {"group_size": self.group_size, "bits": self.bits}
        if left_padding is None:
            return stock.QuantizedKVCache(**how)
        return stock.BatchQuantizedKVCache(left_padding, **how)

    def feed(self, entry, rows):
        entry.update_and_fetch(*map(mx.array, encode(rows, self.heads, self.dim)))

    def check(self, entry, ids):
        assert type(entry) is stock.QuantizedKVCache
        assert (entry.offset, entry.group_size, entry.bits) == (
            len(ids),
            self.group_size,
            self.bits,
        )
        self.check_span(
            [np.array(a)[..., : len(ids), :] for a in (*entry.keys, *entry.values)], ids
        )

    def check_span(self, arrays, ids):
        kinds = self.heads, self.dim, self.group_size, self.bits
        wanted = zip(*(packed(token, *kinds) for token in ids), strict=True)
        for got, parts in zip(arrays, wanted, strict=True):
            assert np.array_equal(
                np.array(got), np.concatenate(parts, axis=2)
            ), f"not the tokens {list(ids)}"


@dataclass(frozen=True)
class Recurrent(Layer):
    """Two slots; a model may leave the second one empty."""

    both: bool = True
    sliceable = False

    def make(self, left_padding=None):
        return stock.ArraysCache(2, left_padding=left_padding)

    def feed(self, entry, rows):
        before = [[0, 0]] * len(rows) if entry[0] is None else entry[0].tolist()
        after = [
            fold(row, tuple(state)) for row, state in zip(rows, before, strict=True)
        ]
        entry[0] = mx.array(after, dtype=mx.int32)
        if self.both:
            entry[1] = mx.array([[[seen] * 4] for seen, _ in after], dtype=mx.float32)

    def check(self, entry, ids):
        assert type(entry) is stock.ArraysCache
        assert entry.left_padding is None and entry.lengths is None
        assert entry[0].tolist() == [list(fold(ids))]
        if self.both:
            assert entry[1].tolist() == [[[len(ids)] * 4]]
        else:
            assert entry[1] is None


@dataclass(frozen=True)
class Window(Layer):
    heads: int = 1
    dim: int = 4
    size: int = WINDOW
    sliceable = False

    def make(self, left_padding=None):
        if left_padding is None:
            return stock.RotatingKVCache(max_size=self.size)
        return stock.BatchRotatingKVCache(self.size, left_padding)

    def feed(self, entry, rows):
        entry.update_and_fetch(*map(mx.array, encode(rows, self.heads, self.dim)))

    def check(self, entry, ids):
        assert type(entry) is stock.RotatingKVCache
        assert (entry.offset, entry.max_size) == (len(ids), self.size)
        seen = min(len(ids), self.size - 1)
        for side, want in zip(
            (entry.keys, entry.values),
            encode([ids[-seen:]], self.heads, self.dim),
            strict=True,
        ):
            held = np.array(entry._temporal_order(side))
            assert held.shape[2] >= seen
            assert np.array_equal(
                held[..., -seen:, :], want
            ), f"not the tokens {list(ids[-seen:])}"


@dataclass(frozen=True)
class Unused(Layer):
    """An entry that the model never writes to."""

    of: Layer = Dense()

    @property
    def sliceable(self):
        return self.of.sliceable

    def make(self, left_padding=None):
        return self.of.make(left_padding)

    def feed(self, entry, rows):
        pass

    def check(self, entry, ids):
        assert entry.empty()


@dataclass(frozen=True)
class Composite(Layer):
    """Several layers in one entry: a CacheList, or a tuple while it is one row."""

    layers: tuple[Layer, ...]
    as_tuple: bool = False

    def make(self, left_padding=None):
        made = [layer.make(left_padding) for layer in self.layers]
        return tuple(made) if self.as_tuple else stock.CacheList(*made)

    def parts(self, entry):
        return zip(self.layers, entry if self.as_tuple else entry.caches, strict=True)

    def feed(self, entry, rows):
        for layer, part in self.parts(entry):
            layer.feed(part, rows)

    def check(self, entry, ids):
        assert isinstance(entry, tuple if self.as_tuple else stock.CacheList)
        for layer, part in self.parts(entry):
            layer.check(part, ids)
