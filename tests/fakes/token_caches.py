"""Real stock caches whose arrays record token ids, in every layout.

A test can ask any cache which tokens it stands for, and see that the right data came
back for each position; the layers are those of ``token_layers``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from tests.fakes.token_layers import (
    PADDING,
    Composite,
    Dense,
    Layer,
    Quantized,
    Recurrent,
    Unused,
    Window,
)


@dataclass(frozen=True)
class Layout:
    """The caches of one model."""

    layers: tuple[Layer, ...]

    def fresh(self, left_padding: list[int] | None = None) -> list[Any]:
        return [layer.make(left_padding) for layer in self.layers]

    def feed(self, cache: Sequence[Any], rows: Sequence[Sequence[int]]) -> None:
        if rows and len(rows[0]):
            for layer, entry in zip(self.layers, cache, strict=True):
                layer.feed(entry, rows)

    def check(self, cache: Sequence[Any], ids: Sequence[int]) -> None:
        assert len(cache) == len(self.layers)
        for layer, entry in zip(self.layers, cache, strict=True):
            layer.check(entry, ids)

    def leaves(self) -> list[Layer]:
        return [
            leaf for layer in self.layers for leaf in getattr(layer, "layers", (layer,))
        ]

    @property
    def spans(self) -> list[Layer]:
        """The layers whose tokens are stored one by one."""
        return [
            leaf
            for leaf in self.leaves()
            if leaf.sliceable and not isinstance(leaf, Unused)
        ]

    @property
    def has_states(self) -> bool:
        return any(not leaf.sliceable for leaf in self.leaves())

    def check_stored(self, segment: Any, ids: Sequence[int]) -> None:
        assert len(segment.spans) == len(self.spans)
        for layer, arrays in zip(self.spans, segment.spans, strict=True):
            layer.check_span(arrays, ids)

    def check_states(self, segment: Any, ids: Sequence[int]) -> None:
        if segment.states is None:
            return
        kept = [
            leaf
            for leaf in self.leaves()
            if not leaf.sliceable and not isinstance(leaf, Unused)
        ]
        for layer, state in zip(kept, segment.states, strict=True):
            layer.check(state, ids)

    # -- live caches, in every shape that a server has them in --------------------
    def row(self, ids: Sequence[int], chunk: int = 0) -> list[Any]:
        """The cache of one row that has processed ``ids``, in chunks."""
        cache = self.fresh()
        for start in range(0, len(ids), chunk or max(1, len(ids))):
            self.feed(cache, [ids[start : start + (chunk or len(ids))]])
        return cache

    def left_padded(self, rows: Sequence[Sequence[int]], chunk: int = 0) -> list[Any]:
        """The caches of a batch whose short rows begin behind padding."""
        longest = max(map(len, rows))
        padding = [longest - len(row) for row in rows]
        cache = self.fresh(padding)
        padded = [
            [PADDING] * n + list(row) for n, row in zip(padding, rows, strict=True)
        ]
        return self._in_chunks(cache, padded, longest, chunk)

    def right_padded(
        self, rows: Sequence[Sequence[int]], columns: int, chunk: int = 0
    ) -> list[Any]:
        """The caches of a batch in the middle of a prefill, after some columns."""
        longest = max(map(len, rows))
        padding = [longest - len(row) for row in rows]
        cache = self.fresh([0] * len(rows))
        for entry in cache:
            for part in entry if isinstance(entry, tuple) else (entry,):
                part.prepare(right_padding=padding, lengths=list(map(len, rows)))
        padded = [
            list(row) + [PADDING] * n for n, row in zip(padding, rows, strict=True)
        ]
        return self._in_chunks(cache, padded, columns, chunk)

    def finalize(self, cache: Sequence[Any]) -> list[Any]:
        """End a prefill: right padding becomes left padding."""
        for entry in cache:
            for part in entry if isinstance(entry, tuple) else (entry,):
                # Stock's windows cannot end a prefill that they took no part in.
                if not part.empty():
                    part.finalize()
        return list(cache)

    def _in_chunks(
        self, cache: list[Any], rows: list[list[int]], columns: int, chunk: int
    ) -> list[Any]:
        for start in range(0, columns, chunk or max(1, columns)):
            stop = min(columns, start + (chunk or columns))
            self.feed(cache, [row[start:stop] for row in rows])
        return cache


LAYOUTS: dict[str, Layout] = {
    "dense": Layout((Dense(), Dense(heads=2))),
    "quantized 32": Layout((Quantized(), Quantized(heads=2), Dense())),
    "quantized 64": Layout((Quantized(group_size=64, heads=2),)),
    "recurrent": Layout((Recurrent(), Recurrent(both=False))),
    "window": Layout((Window(), Window(heads=2))),
    "lists of dense": Layout((Composite((Dense(), Dense(heads=2))), Dense())),
    "lists of dense and recurrent": Layout((Composite((Dense(heads=2), Recurrent())),)),
    "tuples": Layout((Composite((Dense(), Recurrent()), as_tuple=True), Dense())),
    "unused dense": Layout((Unused(), Dense())),
    "unused states": Layout(
        (Unused(Window()), Unused(Recurrent()), Recurrent(), Dense())
    ),
    "hybrid": Layout((Recurrent(), Dense(heads=2), Window(), Unused(), Quantized())),
}


def arrays_of(cache: Any) -> list[mx.array]:
    """Every array of a segment cache's trees."""
    found: list[mx.array] = []
    for node in nodes_of(cache):
        for span in node.payload.spans:
            found.extend(span)
        for state in node.payload.states or ():
            _collect(list(vars(state).values()), found)
    return found


def nodes_of(cache: Any) -> list[Any]:
    """Every node of a segment cache's trees."""
    return [node for tree in list(cache._trees.values()) for node in tree]


def bytes_of(arrays: Sequence[mx.array]) -> list[bytes]:
    """The arrays' contents."""
    return [np.array(a).tobytes() for a in arrays]


def count_calls(monkeypatch: Any, names: Sequence[str], on: Any = mx) -> dict[str, int]:
    """Count calls of functions of ``mlx.core`` from now on."""
    counts = dict.fromkeys(names, 0)
    for name in names:
        monkeypatch.setattr(on, name, _counted(getattr(on, name), counts, name))
    return counts


def _counted(original: Callable, counts: dict[str, int], name: str) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return original(*args, **kwargs)

    return call


def _collect(value: Any, found: list[mx.array]) -> None:
    if isinstance(value, mx.array):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
