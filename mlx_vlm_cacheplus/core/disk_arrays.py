"""Segments of arrays as segments in host memory, and back; on the thread that computes.

On the way out, evaluated arrays are looked at through the buffer protocol; what other
threads get is host memory that nobody writes again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.apc_adapters import (
    CheckpointAdapter,
    StateFragment,
    _has_explicit_snapshot_contract,
)

from .disk_segment import HostArray, HostArrays, HostPart, HostSegment, HostState
from .segments import Segment

# By their names in a file.
DTYPES: dict[str, mx.Dtype] = {
    "F64": mx.float64,
    "F32": mx.float32,
    "BF16": mx.bfloat16,
    "F16": mx.float16,
    "I64": mx.int64,
    "I32": mx.int32,
    "I16": mx.int16,
    "I8": mx.int8,
    "U64": mx.uint64,
    "U32": mx.uint32,
    "U16": mx.uint16,
    "U8": mx.uint8,
    "BOOL": mx.bool_,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


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
    spans = _spans(host.spans)
    states = to_states(host) if with_states else None
    companion = None
    if host.part is not None:
        pending = None if host.part.pending is None else to_mlx(host.part.pending)
        companion = unpack(host.part.name, _spans(host.part.spans), pending)
        mx.eval([a for sides in host_arrays(companion) for a in sides])
    mx.eval([a for sides in spans for a in sides])
    return Segment(host.stop - host.start, spans, states, companion)


def host_arrays(companion: Any) -> list:
    """A companion's spans; none for none."""
    return [] if companion is None else list(getattr(companion, "spans", ()))


def to_mlx(host: HostArray) -> mx.array:
    """A new array with this content."""
    return mx.array(np.ascontiguousarray(host.data)).view(DTYPES[host.dtype])


def to_states(host: HostSegment) -> list[Any] | None:
    """The end states of a segment, or None."""
    if host.states is None:
        return None
    return [_to_state(state) for state in host.states]


def _spans(spans: Sequence[HostArrays]) -> list[tuple[mx.array, ...]]:
    return [tuple(to_mlx(a) for a in sides) for sides in spans]


def _to_state(state: HostState) -> Any:
    arrays = [to_mlx(a) for a in state.arrays]
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
