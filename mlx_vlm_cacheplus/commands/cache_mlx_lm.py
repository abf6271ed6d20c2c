"""A stored conversation as mlx-lm's own prompt-cache file (extra ``interop``).

mlx-lm writes the file itself, so that it is what the installed version reads with
``mlx_lm.generate --prompt-cache-file``.  Such a file does not say which tokens it
stands for, so nothing is taken back from one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..core.disk_arrays import to_mlx, to_states
from ..core.disk_format import from_file
from ..core.disk_index import STATE, Entry
from ..core.disk_reader import to_layout
from ..core.disk_segment import HostSegment, HostState
from ..core.disk_store import DiskStore

ADVICE = "pip install 'mlx-vlm-cacheplus[interop]'"


class Unsuitable(ValueError):
    """It cannot be such a file; the text says why."""


def write(
    store: DiskStore, spans: Sequence[Entry], states: Sequence[Entry], file: Path
) -> int:
    """Write the longest part of a path that can be gone on from.

    Args:
        spans: entries of the path, from its first token on.
        states: end states that were kept later, of any of these spans.
        file: a new file; its name has to end in ``.safetensors``.

    Returns:
        How many of the path's tokens are in the file; their ids are in its metadata.

    Raises:
        Unsuitable: for the reason that it says.
        Spoiled: an entry is not what was written.
    """
    library = check_target(file)
    roots = {root[0]: root for root in store.all_roots()}
    *_, layout, note = roots[spans[0].root]
    kinds = to_layout(layout)
    path, ends = _path(store, spans, states, ("state",) in kinds)
    layers = _layers(library, kinds, path, ends)
    mx.eval([layer.state for layer in layers])
    tokens = path[-1].stop
    described = {
        "model": note.split(" + ")[0],
        "tokenizer_config": "{}",
        "ids": json.dumps(_ids(store, spans)[:tokens]),
    }
    library.save_prompt_cache(str(file), layers, described)
    return tokens


def check_target(file: Path) -> Any:
    """mlx-lm's own module, where it can write such a file.

    Raises:
        Unsuitable: for the reason that it says.
    """
    library = _library()
    if file.suffix != ".safetensors":
        raise Unsuitable(
            f"{file}: mlx-lm reads files that end in .safetensors: name one so"
        )
    if file.exists():
        raise Unsuitable(f"{file} is there already: name another file")
    return library


def _library() -> Any:
    try:
        from mlx_lm.models import cache
    except ImportError as fault:
        raise Unsuitable(f"mlx-lm is not there ({fault}): {ADVICE}") from None
    return cache


def _ids(store: DiskStore, spans: Sequence[Entry]) -> list[int]:
    ids: list[int] = []
    for span in spans:
        ids[span.start :] = store.ids_of(span)
    return ids


def _path(
    store: DiskStore, spans: Sequence[Entry], later: Sequence[Entry], with_states: bool
) -> tuple[list[HostSegment], list[HostState]]:
    """The spans up to the last place that can be gone on from, and the states there."""
    kept = {entry.stop: entry for entry in later if entry.kind == STATE}
    # A span may begin within the one before it, of which the rest is another turn's.
    stops = [after.start for after in spans[1:]] + [spans[-1].stop]
    path = [
        from_file(store.read(span)).cut(span.start, stop)
        for span, stop in zip(spans, stops, strict=True)
    ]
    if not with_states:
        return path, []
    while path:
        last = path[-1]
        if last.states is None and last.stop in kept:
            last = from_file(store.read(kept[last.stop]))
        if last.states is not None:
            return path, last.states
        path.pop()
    raise Unsuitable("no end state of its layers is on disk at a span's end")


def _layers(
    library: Any,
    kinds: Sequence[tuple],
    path: Sequence[HostSegment],
    ends: Sequence[HostState],
) -> list[Any]:
    tokens = path[-1].stop
    last = HostSegment(tokens, tokens, [], list(ends))
    states = iter(to_states(last) or ())
    leaves = iter(range(len(path[-1].spans)))
    layers = []
    for kind in kinds:
        if kind[0] == "state":
            layers.append(_state(library, next(states)))
            continue
        make = MAKERS.get(kind[0])
        if make is None:
            raise Unsuitable(f"mlx-lm has no counterpart of a layer that is {kind[0]}")
        leaf = next(leaves)
        sides = zip(*(segment.spans[leaf] for segment in path), strict=True)
        arrays = [
            mx.concatenate([to_mlx(part) for part in side], axis=2) for side in sides
        ]
        layer = make(library, kind, arrays)
        layer.offset = tokens
        layers.append(layer)
    return layers


def _dense(library: Any, kind: tuple, arrays: list[mx.array]) -> Any:
    layer = library.KVCache()
    layer.keys, layer.values = arrays
    return layer


def _quantized(library: Any, kind: tuple, arrays: list[mx.array]) -> Any:
    _, group_size, bits = kind
    layer = library.QuantizedKVCache(group_size=group_size, bits=bits)
    half = len(arrays) // 2
    layer.keys, layer.values = tuple(arrays[:half]), tuple(arrays[half:])
    return layer


MAKERS: dict[str, Callable[[Any, tuple, list[mx.array]], Any]] = {
    "dense": _dense,
    "quantized": _quantized,
}
# What a window keeps besides its keys and values; the names are the same on both sides.
WINDOW = ("keys", "values", "offset", "_idx")


def _state(library: Any, state: Any) -> Any:
    name = type(state).__name__
    if name == "ArraysCache":
        layer = library.ArraysCache(len(state.cache))
        layer.cache = list(state.cache)
        return layer
    if name == "RotatingKVCache":
        layer = library.RotatingKVCache(max_size=state.max_size, keep=state.keep)
        for field in WINDOW:
            setattr(layer, field, getattr(state, field))
        return layer
    raise Unsuitable(f"mlx-lm has no counterpart of a {name}")
