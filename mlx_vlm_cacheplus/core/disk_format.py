"""Segments as bytes in host memory, and back.

On the way out, evaluated arrays are looked at through the buffer protocol, on the
thread that computes; what other threads get is host memory that nobody writes again.
On the way in, host memory becomes arrays on the thread that computes.

A file is a safetensors file.  Its metadata say which path it belongs to, so that an
index that lies is found out, and how end states are built.  A file holds any of

- ``kv.LEAF.SIDE``: tokens ``start`` to ``stop`` of the sliceable layers,
  [1, heads, tokens, dim];
- ``state.LEAF.N``: arrays of the end states at ``stop``;
- ``part.LAYER.SIDE`` and ``part.pending``: another model's part of the same tokens.
"""

from __future__ import annotations

import importlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import xxhash
from mlx_vlm.apc_adapters import (
    CheckpointAdapter,
    StateFragment,
    _has_explicit_snapshot_contract,
)

from .segments import Segment

VERSION = "1"
HostArrays = tuple["HostArray", ...]

# Name in the file, type in host memory, type in mlx; 16 bits that host memory has no
# type for travel as integers.
TYPES: tuple[tuple[str, Any, mx.Dtype], ...] = (
    ("F64", np.float64, mx.float64),
    ("F32", np.float32, mx.float32),
    ("BF16", np.uint16, mx.bfloat16),
    ("F16", np.float16, mx.float16),
    ("I64", np.int64, mx.int64),
    ("I32", np.int32, mx.int32),
    ("I16", np.int16, mx.int16),
    ("I8", np.int8, mx.int8),
    ("U64", np.uint64, mx.uint64),
    ("U32", np.uint32, mx.uint32),
    ("U16", np.uint16, mx.uint16),
    ("U8", np.uint8, mx.uint8),
    ("BOOL", np.bool_, mx.bool_),
)
NAMES = {dtype: name for name, _, dtype in TYPES}
HOST = {name: np.dtype(host) for name, host, _ in TYPES}
DTYPES = {name: dtype for name, _, dtype in TYPES}


@dataclass(frozen=True)
class HostArray:
    """An array in host memory; ``dtype`` is its name in a file."""

    data: np.ndarray
    dtype: str

    def tokens(self, start: int, stop: int) -> HostArray:
        """Tokens ``start`` to ``stop`` of [.., .., tokens, ..]; shares memory."""
        return HostArray(self.data[..., start:stop, :], self.dtype)

    def to_mlx(self) -> mx.array:
        """A new array with this content."""
        return mx.array(np.ascontiguousarray(self.data)).view(DTYPES[self.dtype])


@dataclass(frozen=True)
class HostState:
    """One layer's end state: how it is built, and its arrays in that order."""

    plan: dict[str, Any]
    arrays: list[HostArray]


@dataclass(frozen=True)
class HostPart:
    """Another model's part of a segment; ``name`` says which model's."""

    name: str
    spans: list[HostArrays]
    pending: HostArray | None = None


@dataclass(frozen=True)
class HostSegment:
    """Tokens ``start`` to ``stop`` of a path in host memory.

    Attributes:
        whole: whether all that is stored of these tokens is here.
    """

    start: int
    stop: int
    spans: list[HostArrays]
    states: list[HostState] | None = None
    part: HostPart | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    whole: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.data.nbytes for _, a in self.named())

    def named(self) -> Iterator[tuple[str, HostArray]]:
        """Each array with its name in a file."""
        yield from _named("kv", self.spans)
        for leaf, state in enumerate(self.states or ()):
            for place, a in enumerate(state.arrays):
                yield f"state.{leaf}.{place}", a
        if self.part is not None:
            yield from _named("part", self.part.spans)
            if self.part.pending is not None:
                yield "part.pending", self.part.pending

    def cut(self, start: int, stop: int) -> HostSegment:
        """Tokens ``start`` to ``stop`` of the path; what is an end's stays with it."""
        if (start, stop) == (self.start, self.stop):
            return self
        at_end = stop == self.stop
        first, last = start - self.start, stop - self.start
        part = self.part
        if part is not None:
            part = HostPart(
                part.name,
                _cut(part.spans, first, last),
                part.pending if at_end else None,
            )
        states = self.states if at_end else None
        return HostSegment(start, stop, _cut(self.spans, first, last), states, part)


def _named(prefix: str, spans: Sequence[HostArrays]) -> Iterator[tuple[str, HostArray]]:
    for leaf, sides in enumerate(spans):
        for side, a in enumerate(sides):
            yield f"{prefix}.{leaf}.{side}", a


def _cut(spans: Sequence[HostArrays], start: int, stop: int) -> list[HostArrays]:
    return [tuple(a.tokens(start, stop) for a in sides) for sides in spans]


# -- from arrays to host memory ----------------------------------------------------------
class Exporter:
    """Collects arrays, evaluates them together and shows them as host memory.

    Use it on the thread that computes.  Host memory stays valid as long as it is held.
    """

    def __init__(self) -> None:
        self._arrays: list[mx.array] = []

    def take(self, a: mx.array) -> Callable[[], HostArray]:
        """Note an array; what is returned gives its content after ``evaluate``."""
        name = NAMES[a.dtype]
        a = a.view(mx.uint16) if a.dtype == mx.bfloat16 else a
        self._arrays.append(a)
        return lambda: HostArray(np.array(a, copy=False), name)

    def evaluate(self) -> None:
        """Wait for the arrays; those that were scheduled a while ago are there."""
        mx.eval(self._arrays)


def export_segments(
    segments: Sequence[tuple[int, Segment]],
    stored: int,
    with_states: Iterable[int],
    pack: Callable[[Any], tuple[str, list, Any] | None],
) -> list[HostSegment]:
    """Segments of one path in host memory.

    Args:
        segments: where each starts, in tokens of the path, and the segment; borrowed.
        stored: tokens of the path whose spans are not wanted.
        with_states: ends of those whose end states are wanted too.
        pack: gives name, spans and pending state of a companion, or None.
    """
    exporter = Exporter()
    wanted = set(with_states)
    made = []
    for start, segment in segments:
        stop = start + segment.tokens
        states = segment.states if stop in wanted else None
        packed = None if segment.companion is None else pack(segment.companion)
        made.append(
            (
                *(start, stop),
                _take(exporter, segment.spans) if stop > stored else [],
                None if states is None else [_take_state(exporter, s) for s in states],
                packed and _take_part(exporter, *packed),
            )
        )
    exporter.evaluate()
    return [
        HostSegment(
            start,
            stop,
            _given(spans),
            None if states is None else [give() for give in states],
            part and part(),
            whole=stop > stored,
        )
        for start, stop, spans, states, part in made
    ]


def _take(exporter: Exporter, spans: Sequence[tuple]) -> list[tuple]:
    return [tuple(exporter.take(a) for a in sides) for sides in spans]


def _given(spans: Sequence[tuple]) -> list[HostArrays]:
    return [tuple(give() for give in sides) for sides in spans]


def _take_part(
    exporter: Exporter, name: str, spans: Sequence[tuple], pending: Any
) -> Callable[[], HostPart]:
    taken = _take(exporter, spans)
    last = None if pending is None else exporter.take(pending)
    return lambda: HostPart(name, _given(taken), last and last())


def _take_state(exporter: Exporter, state: Any) -> Callable[[], HostState]:
    arrays: list[mx.array] = []
    explicit = _has_explicit_snapshot_contract(state)
    content = (
        state.prefix_cache_snapshot()
        if explicit
        else {"state": state.state, "meta_state": state.meta_state}
    )
    plan = {
        "module": type(state).__module__,
        "class": type(state).__qualname__,
        "explicit": explicit,
        "content": _plan(content, arrays),
    }
    taken = [exporter.take(a) for a in arrays]
    return lambda: HostState(plan, [give() for give in taken])


def _plan(value: Any, arrays: list[mx.array]) -> Any:
    """A tree of containers and plain values as JSON; arrays are put aside."""
    if isinstance(value, mx.array):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_plan(item, arrays) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[str(k), _plan(v, arrays)] for k, v in value.items()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise TypeError(f"a state holds a {type(value).__name__}")


# -- from host memory to arrays ----------------------------------------------------------
def to_segment(
    host: HostSegment, unpack: Callable[[str, list, Any], Any], with_states: bool
) -> Segment:
    """The segment that was exported; owns its arrays.  Raises for what it cannot build."""
    spans = _to_mlx(host.spans)
    states = to_states(host) if with_states else None
    companion = None
    if host.part is not None:
        pending = None if host.part.pending is None else host.part.pending.to_mlx()
        companion = unpack(host.part.name, _to_mlx(host.part.spans), pending)
        mx.eval([a for sides in host_arrays(companion) for a in sides])
    mx.eval([a for sides in spans for a in sides])
    return Segment(host.stop - host.start, spans, states, companion)


def host_arrays(companion: Any) -> list:
    """A companion's spans; none for none."""
    return [] if companion is None else list(getattr(companion, "spans", ()))


def to_states(host: HostSegment) -> list[Any] | None:
    """The end states of a segment, or None."""
    if host.states is None:
        return None
    return [_to_state(state) for state in host.states]


def _to_mlx(spans: Sequence[HostArrays]) -> list[tuple[mx.array, ...]]:
    return [tuple(a.to_mlx() for a in sides) for sides in spans]


def _to_state(state: HostState) -> Any:
    arrays = [a.to_mlx() for a in state.arrays]
    mx.eval(arrays)
    content = _built(state.plan["content"], arrays)
    kind = _class_of(state.plan["module"], state.plan["class"])
    if not state.plan["explicit"]:
        return kind.from_state(content["state"], content["meta_state"])
    try:
        fresh = kind()
    except TypeError:
        fresh = kind.__new__(kind)
    CheckpointAdapter().restore(fresh, StateFragment(content))
    return fresh


def _class_of(module: str, name: str) -> Any:
    if module.split(".")[0] != "mlx_vlm":
        raise ValueError(f"{module}.{name} is not a cache of this package")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _built(plan: Any, arrays: Sequence[mx.array]) -> Any:
    ((kind, content),) = plan.items()
    if kind == "array":
        return arrays[content]
    if kind == "dict":
        return {key: _built(value, arrays) for key, value in content}
    if kind == "value":
        return content
    items = [_built(item, arrays) for item in content]
    return tuple(items) if kind == "tuple" else items


# -- files -------------------------------------------------------------------------------
def path_name(ids: Sequence[int], root: str) -> str:
    """Names the tokens of a path under a root."""
    return xxhash.xxh3_128_hexdigest(array("q", ids).tobytes() + root.encode())


def to_file(
    parts: Sequence[HostSegment], path: str, row: str = "{}"
) -> tuple[FileContent, int]:
    """A file's content for segments that follow each other.

    Args:
        parts: their end states but the last one's are left out.
        path: see ``path_name``; of the tokens up to the last one's end.
        row: what the index will say, as JSON.

    Returns:
        The content, made piece by piece while it is written, and its bytes.
    """
    first, last = parts[0], parts[-1]
    metadata = {"version": VERSION, "path": path, "row": row}
    metadata |= {"start": str(first.start), "stop": str(last.stop)}
    if last.states is not None:
        metadata["states"] = json.dumps([state.plan for state in last.states])
    if last.part is not None:
        metadata["part"] = last.part.name
    named = [dict(part.named()) for part in parts]
    arrays: dict[str, list[HostArray]] = {}
    for name in named[-1]:
        along = name.startswith(("kv.", "part.")) and name != "part.pending"
        arrays[name] = [n[name] for n in named] if along else [named[-1][name]]
    # Wide types first, so that each array begins at a multiple of its item's size.
    order = sorted(arrays, key=lambda name: -HOST[arrays[name][0].dtype].itemsize)
    header: dict[str, Any] = {"__metadata__": metadata}
    place = 0
    for name in order:
        pieces = arrays[name]
        shape = list(pieces[0].data.shape)
        if len(pieces) > 1:
            shape[2] = sum(piece.data.shape[2] for piece in pieces)
        end = place + sum(piece.data.nbytes for piece in pieces)
        header[name] = {
            "dtype": pieces[0].dtype,
            "shape": shape,
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return FileContent(head, [arrays[name] for name in order]), len(head) + place


class FileContent:
    """Iterates over a file's content; one array at a time is put together."""

    def __init__(self, head: bytes, arrays: list[list[HostArray]]):
        self._head, self._arrays = head, arrays

    def __iter__(self) -> Iterator[memoryview | bytes]:
        yield self._head
        for pieces in self._arrays:
            data = [piece.data for piece in pieces]
            whole = data[0] if len(data) == 1 else np.concatenate(data, axis=2)
            yield np.ascontiguousarray(whole).reshape(-1).view(np.uint8).data


def from_file(content: memoryview) -> HostSegment:
    """What ``to_file`` wrote; shares the memory of ``content``.

    Raises:
        ValueError: it is something else.
    """
    try:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(bytes(content[8 : 8 + length]))
        metadata = header.pop("__metadata__")
        if metadata["version"] != VERSION:
            raise ValueError(f"version {metadata['version']}")
        arrays = {
            name: _array(content, 8 + length, spec) for name, spec in header.items()
        }
        plans = json.loads(metadata.get("states", "null"))
        states = plans and [
            HostState(plan, _numbered(arrays, f"state.{leaf}."))
            for leaf, plan in enumerate(plans)
        ]
        part = None
        if "part" in metadata:
            part = HostPart(
                metadata["part"], _spans(arrays, "part"), arrays.get("part.pending")
            )
        start, stop = int(metadata["start"]), int(metadata["stop"])
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not a segment: {error!r}") from None
    return HostSegment(start, stop, _spans(arrays, "kv"), states, part, metadata)


def _array(content: memoryview, begin: int, spec: Mapping[str, Any]) -> HostArray:
    first, last = spec["data_offsets"]
    data = np.frombuffer(content[begin + first : begin + last], HOST[spec["dtype"]])
    return HostArray(data.reshape(spec["shape"]), spec["dtype"])


def _numbered(arrays: Mapping[str, HostArray], prefix: str) -> list[HostArray]:
    found: list[HostArray] = []
    while (name := f"{prefix}{len(found)}") in arrays:
        found.append(arrays[name])
    return found


def _spans(arrays: Mapping[str, HostArray], prefix: str) -> list[HostArrays]:
    spans: list[HostArrays] = []
    while sides := _numbered(arrays, f"{prefix}.{len(spans)}."):
        spans.append(tuple(sides))
    return spans
