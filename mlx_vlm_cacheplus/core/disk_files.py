"""The files of a disk store: written, and found where their rows were not.

A file is called by its checksum, which is its head's, and says what its row would be, so
that one which a writer that died has left is known to be whole, and what it is.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .disk_folder import TEMPORARY, Folder
from .disk_index import Entry, New
from .disk_sections import Changed, Head, check, open_head, parse_head, read_section


class Spoiled(Exception):
    """A file is not what was written; it was set aside."""


class Written(NamedTuple):
    """A file that is there, and what its row says."""

    new: New
    name: str
    nbytes: int
    head: Head


def write_files(folder: Folder, news: Sequence[New]) -> list[Written]:
    """Write the files of entries; they have their names when this returns.

    All content is written before any of it is forced to the medium, so that a process
    that is killed meanwhile loses as little as can be.  After a fault none is there.
    """
    written: list[Written] = []
    try:
        for new in news:
            chunks = iter(new.chunks)
            first = bytes(next(chunks))
            head = parse_head(first, new.nbytes)
            name = f"{head.checksum.hex()}-{uuid.uuid4().hex[:8]}"
            nbytes = folder.write(name, itertools.chain([first], chunks))
            written.append(Written(new, name, nbytes, head))
        folder.finish([file.name for file in written])
    except (OSError, ValueError):
        remove_files(folder, written)
        raise
    return written


def remove_files(folder: Folder, files: Iterable[Written]) -> None:
    """Remove them, and parts of them."""
    for file in files:
        folder.remove(file.name)


# -- reading -----------------------------------------------------------------------------
def read_file(folder: Folder, entry: Entry) -> memoryview:
    """See ``DiskStore.read``."""
    with _spoiled_if_changed(entry):
        content = memoryview(folder.read(entry.name))
        check(content, entry.checksum)
        return content


def read_sections(
    folder: Folder, entry: Entry, wanted: Collection[str]
) -> tuple[Head, dict[str, memoryview]]:
    """See ``DiskStore.read_sections``."""
    with _spoiled_if_changed(entry), folder.open_file(entry.name) as file:
        head = open_head(file, entry.checksum)
        return head, {
            name: read_section(file, section)
            for name, section in head.sections.items()
            if name in wanted
        }


@contextlib.contextmanager
def _spoiled_if_changed(entry: Entry) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise Spoiled(f"{entry.name} is missing") from None
    except Changed as fault:
        raise Spoiled(f"{entry.name} is not what was written: {fault}") from None


# -- what dead writers left --------------------------------------------------------------
@dataclass(frozen=True)
class Stray:
    """A file without a row that was written to its end.

    Attributes:
        found: as it is called now; ``file`` has the name that it gets.
        root: identity, salt, layout and note.
    """

    found: str
    root: tuple[str, int, str, str]
    file: Written

    def under(self, root: int) -> Written:
        """The file, whose row names a root by its number."""
        return self.file._replace(new=replace(self.file.new, root=root))


def whole_strays(folder: Folder, names: Iterable[str]) -> list[Stray]:
    """Those that were written to their end, parents before what stands on them."""
    found = [_stray(folder, name) for name in names]
    whole = [stray for stray in found if stray is not None]
    return sorted(whole, key=lambda stray: stray.file.new.number)


def _stray(folder: Folder, found: str) -> Stray | None:
    try:
        checksum = bytes.fromhex(found.split("-")[0].removesuffix(TEMPORARY))
        content = folder.read(found)
        head = check(content, checksum)
        row = json.loads(head.header.metadata["row"])
        identity, salt, layout, note = row.pop("root")
        new = New(root=0, chunks=(), nbytes=len(content), **row)
        root = (identity, int(salt), layout, note)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    name = found.removesuffix(TEMPORARY)
    return Stray(found, root, Written(new, name, new.nbytes, head))


def finish_stray(folder: Folder, stray: Stray) -> None:
    """Force it to the medium under its name, where that was not done."""
    if stray.found != stray.file.name:
        folder.finish([stray.file.name])
