"""Entries of token paths on disk, and the index that finds them.

An entry is one file, written once.  A *span* holds tokens ``start`` to ``stop`` of a
path; its parent is the span that the path goes through before, and may reach further:
where two paths part inside a span, the span is not cut, the new one begins there.  A
*supplement* belongs to a span, its parent, and holds what was kept later: the end state
at a place of it, or what another model keeps of it.

Invariants:

1. A row of the index stands for a whole file with its checksum, from which those of its
   sections follow: the file is forced to the medium before the row is.
2. Of one parent, no two spans begin at the same place with the same token, so a path
   is found by one look-up a span.
3. An entry's parent is there: what has children is not removed.
4. Whoever does not hold the folder's lock writes nothing.

What an entry means is the caller's business: this knows bytes, tokens and numbers.  It
is used by one thread that writes and one that reads; each has its own connection.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from . import disk_eviction, disk_files, disk_index, disk_replies
from .disk_eviction import Order
from .disk_files import Spoiled, Stray, Written
from .disk_folder import TEMPORARY, Folder
from .disk_index import INDEX, SPAN, Entry, New
from .disk_sections import ORDER, Head

# Of the cap, what an eviction leaves free, so that not every write needs one.
SLACK = 0.05


class DiskStore:
    """See the module's text.

    Args:
        path: the folder.
        max_bytes: what all files may take together; None for no limit.

    Attributes:
        is_writer: whether this process holds the lock.
        nbytes, entries: of all files, as far as this process knows.
        spoiled, evictions: counts since it was opened.
    """

    def __init__(self, path: Path, max_bytes: int | None = None):
        self.folder = Folder(path, INDEX)
        self.max_bytes = max_bytes
        self.is_writer = False
        self.nbytes = self.entries = 0
        self.spoiled = self.evictions = 0
        self.clock = self._last = 0
        self._reading: sqlite3.Connection | None = None
        self._writing: sqlite3.Connection | None = None

    # -- opening ---------------------------------------------------------------------
    def open(self) -> None:
        """Open or create; reads no entry.  Whoever has the lock may then ``write``.

        Raises:
            Refused: the folder is not a private one.
            OSError, sqlite3.Error: it cannot be used now.
        """
        self.close()
        had_entries = self.folder.has_entries()
        self.folder.open()
        self.is_writer = self.folder.take_lock()
        path = self.folder.make(INDEX)
        try:
            self._connect(path)
            self.count()
            if self.entries and not had_entries and self.is_writer:
                raise sqlite3.DatabaseError("all files have gone")
        except sqlite3.DatabaseError as error:
            if not disk_index.is_broken(error) or not self.is_writer:
                raise
            self.mend()

    def mend(self) -> None:
        """Begin the index anew: broken, it stands for nothing; ``sweep`` finds its files.

        Raises:
            OSError, sqlite3.Error: it cannot be done now.
        """
        self._disconnect()
        disk_index.remove(self.folder.path / INDEX)
        self._connect(self.folder.make(INDEX))
        self.count()

    def check(self) -> None:
        """Raise sqlite3.DatabaseError where the index is broken; reads all of it."""
        disk_index.check(self.folder.path / INDEX)

    def _connect(self, path: Path) -> None:
        self._writing = disk_index.open_tables(path, self.is_writer)
        self._reading = disk_index.connect(path)

    def count(self) -> None:
        """Read the totals and the clock from the index."""
        row = self._managing.execute(
            "SELECT COUNT(*), COALESCE(SUM(nbytes), 0), COALESCE(MAX(number), 0) "
            "FROM entries"
        )
        self.entries, self.nbytes, self._last = map(int, row.fetchone())
        noted = str(self.recall("clock"))
        self.clock = max(self.clock, int(noted) if noted.isdecimal() else 0)

    def try_to_write(self) -> bool:
        """Take the lock if the process that held it has gone."""
        if not self.is_writer and self.folder.take_lock():
            self.open()
        return self.is_writer

    def is_there(self) -> bool:
        """Whether folder and index are those that were opened."""
        return self.folder.is_there() and (self.folder.path / INDEX).exists()

    @property
    def is_open(self) -> bool:
        """Whether it can be read."""
        return self._reading is not None

    def close(self) -> None:
        """Give everything back."""
        self._disconnect()
        self.folder.give_lock()
        self.is_writer = False

    def _disconnect(self) -> None:
        for connection in (self._reading, self._writing):
            if connection is not None:
                connection.close()
        self._reading = self._writing = None

    @property
    def _reader(self) -> sqlite3.Connection:
        if self._reading is None:
            raise OSError("the store is not open")
        return self._reading

    @property
    def _managing(self) -> sqlite3.Connection:
        """What is asked beside requests goes another way than what they ask."""
        if self._writing is None:
            raise OSError("the store is not open")
        return self._writing

    @property
    def _writer(self) -> sqlite3.Connection:
        if self._writing is None or not self.is_writer:
            raise OSError("another process writes to this store")
        return self._writing

    def sweep(self) -> int:
        """Deal with what writers that died have left; returns how many files went.

        What was written to its end, and had no row yet, is taken in.
        """
        rows = self._writer.execute("SELECT name FROM entries")
        strays = self.folder.strays({name for (name,) in rows})
        whole = disk_files.whole_strays(self.folder, strays)
        taken = {stray.found for stray in whole if self._take_in(stray)}
        for name in set(strays) - taken:
            self.folder.remove(name.removesuffix(TEMPORARY))
        return len(strays) - len(taken)

    def _take_in(self, stray: Stray) -> bool:
        file = stray.under(self.root(*stray.root))
        parent = file.new.parent
        if parent and disk_index.root_of(self._writer, parent) != file.new.root:
            return False
        disk_files.finish_stray(self.folder, stray)
        try:
            self._enter([file], ())
        except sqlite3.IntegrityError:
            return False
        return True

    # -- finding ---------------------------------------------------------------------
    def roots(self, identity: str, salt: int) -> list[tuple[int, str]]:
        """Number and layout of each root of an identity and a salt."""
        return disk_index.roots_of(self._reader, identity, salt)

    def walk(self, root: int, ids: Sequence[int]) -> list[tuple[Entry, int]]:
        """The spans that a path goes through, each with how far it follows it.

        Returns:
            Entries from the root on, with the tokens of the path that they share: all
            but the last are followed to where the next one begins.
        """
        return disk_index.walk(self._reader, root, ids)

    def supplements(self, spans: Iterable[Entry]) -> list[Entry]:
        """What was kept later of these spans."""
        return disk_index.supplements(self._reader, spans)

    def ids_of(self, entry: Entry) -> list[int]:
        """Token ids of a span, or of the one that a supplement belongs to."""
        number = entry.number if entry.kind == SPAN else entry.parent
        ids = disk_index.ids_of(self._reader, number)
        if ids is None:
            raise OSError(f"{entry.name} has gone")
        return ids

    def all_entries(self) -> list[Entry]:
        """Every row; for lists and evictions, not for requests."""
        return disk_index.all_entries(self._managing)

    def all_roots(self) -> list[tuple[int, str, int, str, str]]:
        """Number, identity, salt, layout and note of every root."""
        return disk_index.all_roots(self._managing)

    def read(self, entry: Entry) -> memoryview:
        """The content of an entry's file, all of it checked.

        Raises:
            Spoiled: it is missing or not what was written.
            OSError: it cannot be read now.
        """
        with self._counting():
            return disk_files.read_file(self.folder, entry)

    def read_sections(
        self, entry: Entry, wanted: Collection[str]
    ) -> tuple[Head, dict[str, memoryview]]:
        """A file's head and these sections, checked as in ``read``; the others are not
        looked at.  Any thread may call it, since the index is not asked."""
        with self._counting():
            return disk_files.read_sections(self.folder, entry, wanted)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except Spoiled:
            self.spoiled += 1
            raise

    def recall(self, name: str) -> str | None:
        """A fact that was noted, or None."""
        return disk_index.fact(self._managing, name)

    # -- writing ---------------------------------------------------------------------
    def note(self, facts: dict[str, str]) -> None:
        """Remember facts."""
        with self._writer as writer:
            disk_index.note(writer, facts)

    def keep_reply(self, owner: str, key: bytes, content: bytes) -> None:
        """Remember what a reply's tokens were; the oldest of many go."""
        self.clock += 1
        with disk_index.unforced(self._writer) as writer:
            disk_replies.keep(writer, owner, key, content, self.clock)
            disk_index.touch(writer, (), self.clock)

    def replies(self, owner: str) -> list[bytes]:
        """What was remembered of an owner's replies, the newest last."""
        return disk_replies.of(self._managing, owner)

    def forget_replies(self) -> None:
        """Remember none."""
        with self._writer as writer:
            disk_replies.forget(writer)

    def root(self, identity: str, salt: int, layout: str, note: str = "") -> int:
        """The number of a root, which is made if it is not there."""
        return disk_index.add_root(self._writer, identity, salt, layout, note)

    def walk_to_write(
        self, root: int, ids: Sequence[int]
    ) -> tuple[list[tuple[Entry, int]], list[Entry]]:
        """``walk`` and ``supplements`` for the thread that writes."""
        spans = disk_index.walk(self._writer, root, ids)
        below = [span for span, _ in spans]
        return spans, disk_index.supplements(self._writer, below)

    def reserve(self) -> int:
        """The number of an entry that will be added; parents' are lower."""
        self._last += 1
        return self._last

    def add(self, news: Sequence[New], used: Iterable[int] = ()) -> list[Entry]:
        """Write entries; they are complete when this returns, or not there at all.

        Args:
            used: numbers of others that were used with them.
        """
        if not self.is_writer:
            raise OSError("another process writes to this store")
        files = disk_files.write_files(self.folder, news)
        try:
            return self._enter(files, used)
        except (OSError, sqlite3.Error):
            disk_files.remove_files(self.folder, files)
            raise

    def _enter(self, files: Sequence[Written], used: Iterable[int]) -> list[Entry]:
        """The rows of files that are there."""
        self.clock += 1
        entries = [
            disk_index.entry_of(
                *(new, name, nbytes, head.checksum, self.clock),
                map(head.nbytes, ORDER),
            )
            for new, name, nbytes, head in files
        ]
        rows = zip(entries, (file.new.ids for file in files), strict=True)
        with self._writer as writer:
            disk_index.insert(writer, rows)
            disk_index.touch(writer, used, self.clock)
        for entry in entries:
            self.entries, self.nbytes = self.entries + 1, self.nbytes + entry.nbytes
            self._last = max(self._last, entry.number)
        return entries

    def touch(self, numbers: Iterable[int]) -> None:
        """These entries were used now."""
        self.clock += 1
        with disk_index.unforced(self._writer) as writer:
            disk_index.touch(writer, numbers, self.clock)

    def drop(
        self, entries: Iterable[Entry], spoiled: bool = False, root: int = 0
    ) -> None:
        """Remove entries; files go after their rows, so that no row is without one.

        Args:
            root: a root that stays where nothing of it is left.
        """
        gone = list(entries)
        with self._writer as writer:
            disk_index.delete(writer, gone, root)
        for entry in gone:
            self.nbytes, self.entries = self.nbytes - entry.nbytes, self.entries - 1
            if spoiled:
                self.folder.set_aside(entry.name)
            else:
                self.folder.remove(entry.name)

    def drop_spoiled(self, entry: Entry) -> list[Entry]:
        """Set a spoiled entry aside; what stands on it goes.  Returns what has gone."""
        above = disk_eviction.standing_on(entry, self.all_entries())
        self.drop(above)
        self.drop([entry], spoiled=True)
        return [entry, *above]

    def forget(self, chosen: set[int]) -> list[Entry]:
        """Remove these entries for good, and what stands inside them.

        One that others go on from at its end is theirs too, and stays.
        """
        gone = disk_eviction.with_what_stands_inside(chosen, self.all_entries())
        self.drop(gone)
        return gone

    def make_room(
        self,
        nbytes: int,
        order: Order | None = None,
        keep: Collection[int] = (),
        root: int = 0,
    ) -> list[Entry] | None:
        """Remove entries until ``nbytes`` fit; nobody goes where they never would.

        Args:
            order: numbers of what goes first, children before their parents; the least
                recently used first where it is not given.
            keep: numbers of what stays.
            root: that of what the room is for; it stays, though nothing may be left of it.

        Returns:
            What has gone, or None where it does not fit.
        """
        if self.max_bytes is None or self.nbytes + nbytes <= self.max_bytes:
            return []
        if nbytes > self.max_bytes:
            return None
        excess = self.nbytes - max(0, int(self.max_bytes * (1 - SLACK)) - nbytes)
        order = order or disk_eviction.least_recently_used
        gone = list(disk_eviction.losses(self.all_entries(), excess, order, keep))
        self.drop(gone, root=root)
        self.evictions += len(gone)
        return gone if self.nbytes + nbytes <= self.max_bytes else None
