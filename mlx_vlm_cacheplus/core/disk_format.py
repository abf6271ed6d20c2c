"""Segments in host memory as the content of files, and back.

A file is a safetensors file.  Its metadata say which path it belongs to, so that an
index that lies is found out, and how end states are built.  A file holds any of

- ``kv.LEAF.SIDE``: tokens ``start`` to ``stop`` of the sliceable layers,
  [1, heads, tokens, dim];
- ``state.LEAF.N``: arrays of the end states at ``stop``;
- ``part.LAYER.SIDE`` and ``part.pending``: another model's part of the same tokens.

Each of the three is a section, which is read and checked without the others; see
``disk_sections``.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import xxhash

from .disk_safetensors import Array, Place, head_of
from .disk_sections import (
    KV,
    NO_DIGEST,
    ORDER,
    PART,
    STATE,
    Head,
    digest,
    pack_head,
    parse_head,
    section_of,
)
from .disk_segment import HOST, HostArray, HostArrays, HostPart, HostSegment, HostState

VERSION = "2"


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
    content = FileContent(_pieces(parts), _metadata(parts, path, row))
    return content, content.nbytes


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
    order = sorted(
        arrays,
        key=lambda name: (
            ORDER.index(section_of(name)),
            -HOST[arrays[name][0].dtype].itemsize,
        ),
    )
    return {name: arrays[name] for name in order}


def _joined(pieces: Sequence[HostArray]) -> Array:
    shape = list(pieces[0].data.shape)
    if len(pieces) > 1:
        shape[2] = sum(piece.data.shape[2] for piece in pieces)
    nbytes = sum(piece.data.nbytes for piece in pieces)
    return Array(pieces[0].dtype, tuple(shape), nbytes)


class FileContent:
    """Iterates over a file's content, its head first; one array at a time is put together.

    Args:
        arrays: what each array is put together from, in the file's order.
        metadata: of the head.
    """

    def __init__(
        self, arrays: Mapping[str, list[HostArray]], metadata: Mapping[str, str]
    ):
        self._arrays, self._metadata = arrays, metadata
        self._specs = {name: _joined(pieces) for name, pieces in arrays.items()}
        self._sections: dict[str, list[list[HostArray]]] = {}
        for name, pieces in arrays.items():
            self._sections.setdefault(section_of(name), []).append(pieces)
        self._head: bytes | None = None
        empty = pack_head(self._specs, dict.fromkeys(ORDER, NO_DIGEST), metadata)
        self.nbytes = len(empty) + sum(spec.nbytes for spec in self._specs.values())

    @property
    def head(self) -> bytes:
        """Made when it is first asked for: all of the content is read for it."""
        if self._head is None:
            digests = {
                name: digest(map(_whole, arrays))
                for name, arrays in self._sections.items()
            }
            self._head = pack_head(self._specs, digests, self._metadata)
        return self._head

    def __iter__(self) -> Iterator[memoryview | bytes]:
        yield self.head
        yield from map(_whole, self._arrays.values())


def _whole(pieces: Sequence[HostArray]) -> memoryview:
    """The bytes of an array."""
    data = [piece.data for piece in pieces]
    whole = data[0] if len(data) == 1 else np.concatenate(data, axis=2)
    return np.ascontiguousarray(whole).reshape(-1).view(np.uint8).data


# -- reading -----------------------------------------------------------------------------
def from_file(content: memoryview) -> HostSegment:
    """What ``to_file`` wrote; shares the memory of ``content``.

    Raises:
        ValueError: it is something else.
    """
    head = parse_head(head_of(content), len(content))
    sections = {
        name: content[section.start : section.stop]
        for name, section in head.sections.items()
    }
    return from_sections(head, sections)


def from_sections(head: Head, sections: Mapping[str, memoryview]) -> HostSegment:
    """What ``to_file`` wrote, as far as it was read; shares the memory of ``sections``.

    Without its keys and values it holds no tokens, but the end states behind them.

    Raises:
        ValueError: it is something else.
    """
    metadata = head.header.metadata
    try:
        if metadata["version"] != VERSION:
            raise ValueError(f"version {metadata['version']}")
        arrays = {
            name: _array(sections[section], place, head.sections[section].start)
            for name, place in head.header.arrays.items()
            if (section := section_of(name)) in sections
        }
        states = part = None
        if "states" in metadata and _is_here(STATE, head, sections):
            states = [
                HostState(plan, _numbered(arrays, f"{STATE}.{leaf}."))
                for leaf, plan in enumerate(json.loads(metadata["states"]))
            ]
        if "part" in metadata and _is_here(PART, head, sections):
            pending = arrays.get(f"{PART}.pending")
            part = HostPart(metadata["part"], _spans(arrays, PART), pending)
        stop = int(metadata["stop"])
        start = int(metadata["start"]) if _is_here(KV, head, sections) else stop
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a segment: {error!r}") from None
    return HostSegment(start, stop, _spans(arrays, KV), states, part, metadata)


def _is_here(name: str, head: Head, sections: Mapping[str, memoryview]) -> bool:
    """Whether all of a section was read; one without arrays is not in the file."""
    return name in sections or name not in head.sections


def _array(section: memoryview, place: Place, start: int) -> HostArray:
    """An array of a section that begins at byte ``start`` of its file."""
    content = section[place.start - start : place.stop - start]
    data = np.frombuffer(content, HOST[place.dtype])
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
