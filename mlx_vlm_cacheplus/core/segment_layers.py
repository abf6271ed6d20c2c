"""The kinds of layer in a model's cache, and how each is stored.

Two kinds, decided for each leaf of a cache by its exact type:

- *Sliceable* layers hold one entry a token (dense and quantized keys and values), so that
  a span of them can be cut at any token and a path restored by one concatenation.
- Every other layer (recurrent state, wrapped window, pool) is stored whole, as an *end
  state* at one token.

Subclasses of ``KVCache`` may keep more than keys and values, so a type that is not
listed here becomes an end state through the cache's own snapshot contract.

Nothing is copied here: ``segments`` does that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm.models import cache as caches

Arrays = tuple[mx.array, ...]


class DenseLayer:
    """Keys and values in floating point."""

    types: tuple[type, ...] = (caches.KVCache, caches.BatchKVCache)

    @staticmethod
    def arrays(entry: Any) -> Arrays:
        """The live arrays, [rows, heads, capacity, dim]; borrowed."""
        return (entry.keys, entry.values)

    @staticmethod
    def rebuild(arrays: Arrays, length: int, like: Any) -> Any:
        """A single-row cache that owns ``arrays``."""
        entry: Any = caches.KVCache()
        entry.keys, entry.values = arrays
        entry.offset = length
        return entry

    @staticmethod
    def settings(entry: Any) -> tuple:
        """What two entries must share to be parts of one path."""
        return ("dense", str(entry.keys.dtype), entry.keys.shape[1:2])


class QuantizedLayer:
    """Keys and values packed by ``mx.quantize``: (packed, scales, biases) a side."""

    types: tuple[type, ...] = (caches.QuantizedKVCache, caches.BatchQuantizedKVCache)

    @staticmethod
    def arrays(entry: Any) -> Arrays:
        """The live arrays, [rows, heads, capacity, packed dim]; borrowed."""
        return (*entry.keys, *entry.values)

    @staticmethod
    def rebuild(arrays: Arrays, length: int, like: Any) -> Any:
        """A single-row cache that owns ``arrays``."""
        _, group_size, bits = like
        entry: Any = caches.QuantizedKVCache(group_size=group_size, bits=bits)
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
# An entry that holds nothing, as one that the model never writes to does; a fresh one
# stands for it.
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
    return tuple(kind_of(leaf) for leaf in leaves(prompt_cache))


def kind_of(leaf: Any) -> tuple:
    """How one leaf is stored: a sliceable layer's settings, STATE or EMPTY."""
    if _is_empty(leaf):
        return EMPTY
    layer = SLICEABLE.get(type(leaf))
    return STATE if layer is None else layer.settings(leaf)


def _is_empty(leaf: Any) -> bool:
    try:
        return bool(leaf.empty())
    except (AttributeError, NotImplementedError):
        return False


def in_shape_of(template: Sequence[Any], restored: Iterator[Any]) -> list[Any]:
    """Put restored leaves into the composites of a fresh cache."""
    built: list[Any] = []
    for entry in template:
        if isinstance(entry, tuple):
            built.append(tuple(in_shape_of(entry, restored)))
        elif isinstance(entry, caches.CacheList):
            built.append(caches.CacheList(*in_shape_of(entry.caches, restored)))
        else:
            leaf = next(restored)
            built.append(entry if leaf is None else leaf)
    return built
