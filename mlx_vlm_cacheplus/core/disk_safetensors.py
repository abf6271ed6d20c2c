"""The header of a safetensors file: where which array is, and what else the file says.

A file is eight bytes with the header's length, the header as JSON, and the arrays.  The
header is made here since the library copies: for 64 MiB of arrays ``serialize`` holds
64 to 128 MiB more, ``deserialize`` 128 MiB, and both hold other threads up meanwhile.

>>> head = pack_header({"a": Array("U8", (2, 3), 6)}, {"key": "value"})
>>> header = parse_header(head, len(head) + 6)
>>> header.metadata, header.arrays["a"].shape
({'key': 'value'}, (2, 3))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

PREFIX = 8


class Array(NamedTuple):
    """An array that is to be written; ``dtype`` is its name in a file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Place(NamedTuple):
    """An array in a file: bytes ``start`` to ``stop`` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    metadata: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, Place] = field(default_factory=dict)


def pack_header(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """A file's first bytes; the arrays follow in their order, without gaps."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    place = 0
    for name, (dtype, shape, nbytes) in arrays.items():
        offsets = [place, place + nbytes]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        place += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % PREFIX)
    return len(text).to_bytes(PREFIX, "little") + text


def read_head(read: Callable[[int], bytes], size: int) -> bytes:
    """The first bytes of a file of ``size`` bytes, as far as its header goes.

    Args:
        read: gives the next so many bytes.

    Returns:
        For ``parse_header``; the prefix alone where it is none.
    """
    prefix = read(PREFIX)
    length = int.from_bytes(prefix, "little")
    return prefix + (read(length) if 0 < length <= size - PREFIX else b"")


def head_of(content: memoryview | bytes | bytearray) -> bytes:
    """The first bytes of a file in memory, for ``parse_header``."""
    view, place = memoryview(content), 0

    def read(count: int) -> bytes:
        nonlocal place
        place += count
        return bytes(view[place - count : place])

    return read_head(read, len(view))


def header_of(content: memoryview | bytes | bytearray) -> Header:
    """The header of a file in memory.

    Raises:
        ValueError: it has none.
    """
    return parse_header(head_of(content), len(content))


def parse_header(head: bytes, size: int) -> Header:
    """What the first bytes of a file of ``size`` bytes say.

    Raises:
        ValueError: they are no header, or it names places outside the file.
    """
    text = head[PREFIX:]
    if int.from_bytes(head[:PREFIX], "little") != len(text):
        raise ValueError("a header that is cut off, or none")
    try:
        specs = json.loads(text)
        metadata = specs.pop("__metadata__", {})
        arrays = {name: _place(spec, len(head)) for name, spec in specs.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a header: {error!r}") from None
    if not isinstance(metadata, dict):
        raise ValueError("a header whose metadata are none")
    for name, array in arrays.items():
        if not len(head) <= array.start <= array.stop <= size:
            raise ValueError(f"{name} is not inside the file")
    return Header(metadata, arrays)


def _place(spec: dict, begin: int) -> Place:
    first, last = spec["data_offsets"]
    shape = tuple(int(length) for length in spec["shape"])
    return Place(str(spec["dtype"]), shape, begin + int(first), begin + int(last))
