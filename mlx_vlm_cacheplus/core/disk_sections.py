"""The sections of a file, each of which is read and checked by itself.

A file's head, which is its safetensors header, says of each section how long it is and
what its digest is; the sections follow it without gaps, in the order of ``ORDER``.  The
file's checksum is its head's: whoever has checked that may trust the digests in it, and
needs to read no section but those that are wanted.

>>> head = pack_head({"kv.0.0": Array("U8", (2,), 2)}, {"kv": digest([b"ab"])}, {})
>>> found = parse_head(head, len(head) + 2)
>>> found.sections["kv"].nbytes, found.sections["kv"].digest == digest([b"ab"])
(2, True)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from .disk_safetensors import (
    PREFIX,
    Array,
    Header,
    pack_header,
    parse_header,
    read_head,
)

# An array's section is what its name begins with: keys and values of the tokens, the end
# states behind the last of them, another model's part of the tokens.
KV, STATE, PART = ORDER = ("kv", "state", "part")
NO_DIGEST = bytes(16)
# Bytes that are hashed while the processor has them at hand.
BLOCK = 1 << 20


class Changed(ValueError):
    """A file that is not what was written."""


class Section(NamedTuple):
    """Bytes ``start`` to ``stop`` of a file, and what their digest is."""

    start: int
    stop: int
    digest: bytes

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Head:
    """What a file's head says; ``checksum`` is the file's."""

    header: Header
    checksum: bytes
    sections: dict[str, Section] = field(default_factory=dict)

    def nbytes(self, name: str) -> int:
        """Bytes of a section; 0 where there is none."""
        return self.sections[name].nbytes if name in self.sections else 0


class Source(Protocol):
    """A file that is read from any place on.

    Attributes:
        size: its bytes.
    """

    size: int

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with what is in the file from ``start`` on."""


def section_of(array: str) -> str:
    """The section of an array."""
    return array.partition(".")[0]


def digest(chunks: Iterable[memoryview | bytes]) -> bytes:
    """The digest of a section, or of a head."""
    made = xxhash.xxh3_128()
    for chunk in chunks:
        made.update(chunk)
    return made.digest()


# -- writing -----------------------------------------------------------------------------
def pack_head(
    arrays: Mapping[str, Array],
    digests: Mapping[str, bytes],
    metadata: Mapping[str, str],
) -> bytes:
    """A file's head, whose length does not depend on the digests.

    Args:
        arrays: those of each section together, the sections in their order.
        digests: of the sections.
    """
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        section = section_of(name)
        sizes[section] = sizes.get(section, 0) + array.nbytes
    sections = [[name, size, digests[name].hex()] for name, size in sizes.items()]
    return pack_header(arrays, {**metadata, "sections": json.dumps(sections)})


# -- reading -----------------------------------------------------------------------------
def parse_head(head: bytes, size: int) -> Head:
    """What the head of a file of ``size`` bytes says.

    Raises:
        ValueError: it is none, or the file is not as long as it says.
    """
    header = parse_header(head, size)
    sections: dict[str, Section] = {}
    place = len(head)
    try:
        for name, nbytes, text in json.loads(header.metadata["sections"]):
            sections[name] = Section(place, place + nbytes, bytes.fromhex(text))
            place += nbytes
        for name, array in header.arrays.items():
            section = sections[section_of(name)]
            if not section.start <= array.start <= array.stop <= section.stop:
                raise ValueError(f"{name} is not inside its section")
    except (KeyError, TypeError) as error:
        raise ValueError(f"no sections: {error!r}") from None
    if place != size:
        raise ValueError(f"{size} bytes instead of {place}")
    return Head(header, digest([head]), sections)


def open_head(source: Source, checksum: bytes) -> Head:
    """The head of a file with this checksum.

    Raises:
        Changed: it has none.
        OSError: it cannot be read now.
    """
    place = 0

    def read(count: int) -> bytes:
        nonlocal place
        content = bytearray(min(count, source.size - place))
        source.read_into(place, memoryview(content))
        place += len(content)
        return bytes(content)

    head = read_head(read, source.size) if source.size >= PREFIX else b""
    if digest([head]) != checksum:
        raise Changed("its head is another")
    try:
        return parse_head(head, source.size)
    except ValueError as error:
        raise Changed(str(error)) from None


def read_section(source: Source, section: Section) -> memoryview:
    """A section's content, in memory of its own.

    Raises:
        Changed: it is not what was written.
        OSError: it cannot be read now.
    """
    # Memory that nobody clears first.
    view = np.empty(section.nbytes, np.uint8).data
    made = xxhash.xxh3_128()
    for place in range(0, len(view), BLOCK):
        block = view[place : place + BLOCK]
        source.read_into(section.start + place, block)
        made.update(block)
    if made.digest() != section.digest:
        raise Changed("a section is another")
    return view


class Memory:
    """A file's content as a source."""

    def __init__(self, content: memoryview | bytes | bytearray):
        self._view = memoryview(content)
        self.size = len(self._view)

    def read_into(self, start: int, view: memoryview) -> None:
        view[:] = self._view[start : start + len(view)]


def check(content: memoryview | bytes | bytearray, checksum: bytes) -> Head:
    """The head of a file in memory, of which all sections are what was written.

    Raises:
        Changed: it is another.
    """
    head = open_head(Memory(content), checksum)
    for name, section in head.sections.items():
        if (
            digest([memoryview(content)[section.start : section.stop]])
            != section.digest
        ):
            raise Changed(f"its section {name} is another")
    return head
