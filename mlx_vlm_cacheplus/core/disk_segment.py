"""Segments of a path in host memory, which any thread may hold; no array is touched here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

HostArrays = tuple["HostArray", ...]

# Name of a type in a file, and the type in host memory; 16 bits that host memory has no
# type for travel as integers.
HOST: dict[str, np.dtype] = {
    name: np.dtype(host)
    for name, host in (
        ("F64", np.float64),
        ("F32", np.float32),
        ("BF16", np.uint16),
        ("F16", np.float16),
        ("I64", np.int64),
        ("I32", np.int32),
        ("I16", np.int16),
        ("I8", np.int8),
        ("U64", np.uint64),
        ("U32", np.uint32),
        ("U16", np.uint16),
        ("U8", np.uint8),
        ("BOOL", np.bool_),
    )
}


@dataclass(frozen=True)
class HostArray:
    """An array in host memory; ``dtype`` is its name in a file."""

    data: np.ndarray
    dtype: str

    def tokens(self, start: int, stop: int) -> HostArray:
        """Tokens ``start`` to ``stop`` of [.., .., tokens, ..]; shares memory."""
        return HostArray(self.data[..., start:stop, :], self.dtype)


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
