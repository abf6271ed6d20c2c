"""Segments in host memory as the content of files, and back.

A file is a safetensors file.  Its metadata say which path it belongs to, so that an
index that lies is found out, and how end states are built.  A file holds any of

- ``kv.LEAF.SIDE``: tokens ``start`` to ``stop`` of the sliceable layers,
  [1, heads, tokens, dim];
- ``state.LEAF.N``: arrays of the end states at ``stop``;
- ``part.LAYER.SIDE`` and ``part.pending``: another model's part of the same tokens.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import xxhash

from .disk_safetensors import Array, Place, header_of, pack_header
from .disk_segment import HOST, HostArray, HostArrays, HostPart, HostSegment, HostState

VERSION = "1"


def path_name(ids: Sequence[int], root: str) -> str:
    """Names the tokens of a path under a root."""
    return xxhash.xxh3_128_hexdigest(array("q", ids).tobytes() + root.encode())


# -- writing -----------------------------------------------------------------------------
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
    arrays = _pieces(parts)
    specs = {name: _joined(pieces) for name, pieces in arrays.items()}
    head = pack_header(specs, _metadata(parts, path, row))
    nbytes = len(head) + sum(spec.nbytes for spec in specs.values())
    return FileContent(head, list(arrays.values())), nbytes


def _metadata(parts: Sequence[HostSegment], path: str, row: str) -> dict[str, str]:
    first, last = parts[0], parts[-1]
    metadata = {"version": VERSION, "path": path, "row": row}
    metadata |= {"start": str(first.start), "stop": str(last.stop)}
    if last.states is not None:
        metadata["states"] = json.dumps([state.plan for state in last.states])
    if last.part is not None:
        metadata["part"] = last.part.name
    return metadata


def _pieces(parts: Sequence[HostSegment]) -> dict[str, list[HostArray]]:
    """What each array of a file is put together from, in the file's order."""
    named = [dict(part.named()) for part in parts]
    arrays: dict[str, list[HostArray]] = {}
    for name in named[-1]:
        along = name.startswith(("kv.", "part.")) and name != "part.pending"
        arrays[name] = [n[name] for n in named] if along else [named[-1][name]]
    # Wide types first, so that each array begins at a multiple of its item's size.
    order = sorted(arrays, key=lambda name: -HOST[arrays[name][0].dtype].itemsize)
    return {name: arrays[name] for name in order}


def _joined(pieces: Sequence[HostArray]) -> Array:
    shape = list(pieces[0].data.shape)
    if len(pieces) > 1:
        shape[2] = sum(piece.data.shape[2] for piece in pieces)
    nbytes = sum(piece.data.nbytes for piece in pieces)
    return Array(pieces[0].dtype, tuple(shape), nbytes)


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


# -- reading -----------------------------------------------------------------------------
def from_file(content: memoryview) -> HostSegment:
    """What ``to_file`` wrote; shares the memory of ``content``.

    Raises:
        ValueError: it is something else.
    """
    header = header_of(content)
    metadata = header.metadata
    try:
        if metadata["version"] != VERSION:
            raise ValueError(f"version {metadata['version']}")
        arrays = {name: _array(content, place) for name, place in header.arrays.items()}
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
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a segment: {error!r}") from None
    return HostSegment(start, stop, _spans(arrays, "kv"), states, part, metadata)


def _array(content: memoryview, place: Place) -> HostArray:
    data = np.frombuffer(content[place.start : place.stop], HOST[place.dtype])
    return HostArray(data.reshape(place.shape), place.dtype)


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
