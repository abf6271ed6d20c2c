"""Entries of token paths on disk, and the index that finds them.

An entry is one file, written once.  A *span* holds tokens ``start`` to ``stop`` of a
path; its parent is the span that the path goes through before, and may reach further:
where two paths part inside a span, the span is not cut, the new one begins there.  A
*supplement* belongs to a span, its parent, and holds what was kept later: the end state
at a place of it, or what another model keeps of it.

Invariants:

1. A row of the index stands for a whole file with its checksum: the file is forced to
   the medium before the row is.
2. Of one parent, no two spans begin at the same place with the same token, so a path
   is found by one look-up a span.
3. An entry's parent is there: what has children is not removed.
4. Whoever does not hold the folder's lock writes nothing.

What an entry means is the caller's business: this knows bytes, tokens and numbers.  It
is used by one thread that writes and one that reads; each has its own connection.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import xxhash

from .disk_folder import TEMPORARY, Folder
from .disk_index import (
    COLUMNS,
    INDEX,
    SCHEMA,
    SPAN,
    TABLES,
    Entry,
    New,
    Order,
    connect,
    count_children,
    least_recently_used,
    pack,
    standing_on,
    supplements,
    unpack,
    walk,
)

# Of the cap, what an eviction leaves free, so that not every write needs one.
SLACK = 0.05
# Replies whose tokens are remembered.
MOST_REPLIES = 256


class Spoiled(Exception):
    """A file is not what was written; it was set aside."""


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
        self.folder.open()
        self.is_writer = self.folder.take_lock()
        path = self.folder.make(INDEX)
        try:
            self._connect(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) or not self.is_writer:
                raise
            self._begin_anew(path)
        self.count()

    def _connect(self, path: Path) -> None:
        self._writing = connect(path)
        version = self._writing.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, SCHEMA):
            raise sqlite3.DatabaseError(f"schema {version}")
        if self.is_writer:
            self._writing.executescript(TABLES)
            self._writing.execute(f"PRAGMA user_version = {SCHEMA}")
        self._reading = connect(path)

    def _begin_anew(self, path: Path) -> None:
        """An index that cannot be read stands for nothing; its files are swept later."""
        self._disconnect()
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        self._connect(self.folder.make(INDEX))

    def count(self) -> None:
        """Read the totals and the clock from the index."""
        row = self._managing.execute(
            "SELECT COUNT(*), COALESCE(SUM(nbytes), 0), COALESCE(MAX(number), 0) "
            "FROM entries"
        )
        self.entries, self.nbytes, self._last = row.fetchone()
        self.clock = max(self.clock, int(self.recall("clock") or 0))

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

        A file is called by its checksum and says what its row would be: one that was
        written to its end, and had no row yet, is taken in.
        """
        rows = self._writer.execute("SELECT name FROM entries")
        strays = self.folder.strays({name for (name,) in rows})
        whole = [found for found in map(self._whole, strays) if found is not None]
        # Parents have the lower numbers.
        taken = {
            name
            for name, new, checksum in sorted(whole, key=lambda f: f[1].number)
            if self._take_in(name, new, checksum)
        }
        for name in set(strays) - taken:
            self.folder.remove(name.removesuffix(TEMPORARY))
        return len(strays) - len(taken)

    def _whole(self, name: str) -> tuple[str, New, bytes] | None:
        """A stray file's row and checksum, if all of it was written."""
        content = self.folder.read(name)
        digest = xxhash.xxh3_128(content)
        if digest.hexdigest() != name.split("-")[0]:
            return None
        try:
            length = int.from_bytes(content[:8], "little")
            metadata = json.loads(content[8 : 8 + length])["__metadata__"]
            row = json.loads(metadata["row"])
            row["root"] = self.root(*row["root"])
            new = New(chunks=(), nbytes=len(content), **row)
        except (ValueError, KeyError, TypeError):
            return None
        return name, new, digest.digest()

    def _take_in(self, name: str, new: New, checksum: bytes) -> bool:
        below = self._writer.execute(
            "SELECT root FROM entries WHERE number = ?", (new.parent,)
        ).fetchone()
        if new.parent and below != (new.root,):
            return False
        whole = name.removesuffix(TEMPORARY)
        if whole != name:
            self.folder.finish([whole])
        try:
            self._enter([(new, whole, new.nbytes, checksum)], ())
        except sqlite3.IntegrityError:
            return False
        return True

    # -- finding ---------------------------------------------------------------------
    def roots(self, identity: str, salt: int) -> list[tuple[int, str]]:
        """Number and layout of each root of an identity and a salt."""
        return self._reader.execute(
            "SELECT number, layout FROM roots WHERE identity = ? AND salt = ?",
            (identity, str(int(salt))),
        ).fetchall()

    def walk(self, root: int, ids: Sequence[int]) -> list[tuple[Entry, int]]:
        """The spans that a path goes through, each with how far it follows it.

        Returns:
            Entries from the root on, with the tokens of the path that they share: all
            but the last are followed to where the next one begins.
        """
        return walk(self._reader, root, ids)

    def supplements(self, spans: Iterable[Entry]) -> list[Entry]:
        """What was kept later of these spans."""
        return supplements(self._reader, spans)

    def ids_of(self, entry: Entry) -> list[int]:
        """Token ids of a span, or of the one that a supplement belongs to."""
        number = entry.number if entry.kind == SPAN else entry.parent
        row = self._reader.execute(
            "SELECT ids FROM entries WHERE number = ?", (number,)
        ).fetchone()
        if row is None:
            raise OSError(f"{entry.name} has gone")
        return unpack(row[0])

    def all_entries(self) -> list[Entry]:
        """Every row; for lists and evictions, not for requests."""
        return [
            Entry(*row)
            for row in self._managing.execute(f"SELECT {COLUMNS} FROM entries")
        ]

    def all_roots(self) -> list[tuple[int, str, int, str, str]]:
        """Number, identity, salt, layout and note of every root."""
        found = self._managing.execute(
            "SELECT number, identity, salt, layout, note FROM roots"
        )
        return [(number, name, int(salt), *rest) for number, name, salt, *rest in found]

    def read(self, entry: Entry) -> memoryview:
        """The content of an entry's file, checked.

        Raises:
            Spoiled: it is missing or not what was written.
            OSError: it cannot be read now.
        """
        try:
            content = self.folder.read(entry.name)
        except FileNotFoundError:
            raise Spoiled(f"{entry.name} is missing") from None
        if xxhash.xxh3_128_digest(content) != entry.checksum:
            self.spoiled += 1
            raise Spoiled(f"{entry.name} is not what was written")
        return memoryview(content)

    def recall(self, name: str) -> str | None:
        """A fact that was noted, or None."""
        row = self._managing.execute(
            "SELECT value FROM facts WHERE name = ?", (name,)
        ).fetchone()
        return None if row is None else row[0]

    # -- writing ---------------------------------------------------------------------
    def note(self, facts: dict[str, str]) -> None:
        """Remember facts."""
        with self._writer as writer:
            writer.executemany(
                "INSERT OR REPLACE INTO facts VALUES (?, ?)", list(facts.items())
            )

    @contextlib.contextmanager
    def _unforced(self) -> Iterator[sqlite3.Connection]:
        """Rows that outlive the process at once, and the power with the next entry's.

        What stands for no file needs no more, and an entry that comes does not wait.
        """
        writer = self._writer
        writer.execute("PRAGMA synchronous = NORMAL")
        try:
            with writer:
                yield writer
        finally:
            writer.execute("PRAGMA synchronous = FULL")

    def keep_reply(self, owner: str, key: bytes, content: bytes) -> None:
        """Remember what a reply's tokens were; the oldest of many go."""
        self.clock += 1
        with self._unforced() as writer:
            writer.execute(
                "INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?)",
                (key, owner, content, self.clock),
            )
            writer.execute(
                "DELETE FROM replies WHERE key IN (SELECT key FROM replies "
                "ORDER BY last_use DESC LIMIT -1 OFFSET ?)",
                (MOST_REPLIES,),
            )
            self._touch(writer, ())

    def replies(self, owner: str) -> list[bytes]:
        """What was remembered of an owner's replies, the newest last."""
        rows = self._managing.execute(
            "SELECT content FROM replies WHERE owner = ? ORDER BY last_use", (owner,)
        )
        return [content for (content,) in rows]

    def forget_replies(self) -> None:
        """Remember none."""
        with self._writer as writer:
            writer.execute("DELETE FROM replies")

    def root(self, identity: str, salt: int, layout: str, note: str = "") -> int:
        """The number of a root, which is made if it is not there."""
        known = self._writer.execute(
            "SELECT number FROM roots WHERE identity = ? AND salt = ? AND layout = ?",
            (identity, str(int(salt)), layout),
        ).fetchone()
        if known is not None:
            return int(known[0])
        with self._writer as writer:
            cursor = writer.execute(
                "INSERT INTO roots (identity, salt, layout, note) VALUES (?, ?, ?, ?)",
                (identity, str(int(salt)), layout, note),
            )
        return int(cursor.lastrowid or 0)

    def walk_to_write(
        self, root: int, ids: Sequence[int]
    ) -> tuple[list[tuple[Entry, int]], list[Entry]]:
        """``walk`` and ``supplements`` for the thread that writes."""
        spans = walk(self._writer, root, ids)
        return spans, supplements(self._writer, [span for span, _ in spans])

    def reserve(self) -> int:
        """The number of an entry that will be added; parents' are lower."""
        self._last += 1
        return self._last

    def add(self, news: Sequence[New], used: Iterable[int] = ()) -> list[Entry]:
        """Write entries; they are complete when this returns, or not there at all.

        All content is written before any of it is forced to the medium, so that a
        process that is killed meanwhile loses as little as can be.

        Args:
            used: numbers of others that were used with them.
        """
        if not self.is_writer:
            raise OSError("another process writes to this store")
        written: list[tuple[New, str, int, bytes]] = []
        names: list[str] = []
        try:
            for new in news:
                digest = xxhash.xxh3_128()
                for _ in _hashed(new.chunks, digest):
                    pass
                names.append(f"{digest.hexdigest()}-{uuid.uuid4().hex[:8]}")
                nbytes = self.folder.write(names[-1], new.chunks)
                written.append((new, names[-1], nbytes, digest.digest()))
            self.folder.finish(names)
            return self._enter(written, used)
        except (OSError, sqlite3.Error):
            for name in names:
                self.folder.remove(name)
            raise

    def _enter(
        self, files: Sequence[tuple[New, str, int, bytes]], used: Iterable[int]
    ) -> list[Entry]:
        """The rows of files that are there."""
        self.clock += 1
        entries = [
            Entry(
                *(new.number, new.root, new.parent, new.kind, new.start, new.stop),
                *(name, nbytes, checksum, new.has_state, new.companion),
                *(self.clock, new.turns, new.session),
            )
            for new, name, nbytes, checksum in files
        ]
        marks = ", ".join("?" * 16)
        with self._writer as writer:
            writer.executemany(
                f"INSERT INTO entries ({COLUMNS}, first, ids) VALUES ({marks})",
                [
                    (*astuple(entry), new.ids[0] if new.ids else None, pack(new.ids))
                    for entry, (new, *_) in zip(entries, files, strict=True)
                ],
            )
            self._touch(writer, used)
        for entry in entries:
            self.entries, self.nbytes = self.entries + 1, self.nbytes + entry.nbytes
            self._last = max(self._last, entry.number)
        return entries

    def touch(self, numbers: Iterable[int]) -> None:
        """These entries were used now."""
        self.clock += 1
        with self._unforced() as writer:
            self._touch(writer, numbers)

    def _touch(self, writer: sqlite3.Connection, numbers: Iterable[int]) -> None:
        writer.executemany(
            "UPDATE entries SET last_use = ? WHERE number = ?",
            [(self.clock, number) for number in numbers],
        )
        writer.execute(
            "INSERT OR REPLACE INTO facts VALUES ('clock', ?)", (str(self.clock),)
        )

    def drop(self, entries: Iterable[Entry], spoiled: bool = False) -> None:
        """Remove entries; files go after their rows, so that no row is without one."""
        gone = list(entries)
        with self._writer as writer:
            writer.executemany(
                "DELETE FROM entries WHERE number = ?", [(e.number,) for e in gone]
            )
            writer.execute(
                "DELETE FROM roots WHERE number NOT IN (SELECT root FROM entries)"
            )
        for entry in gone:
            self.nbytes, self.entries = self.nbytes - entry.nbytes, self.entries - 1
            if spoiled:
                self.folder.set_aside(entry.name)
            else:
                self.folder.remove(entry.name)

    def drop_spoiled(self, entry: Entry) -> list[Entry]:
        """Set a spoiled entry aside; what stands on it goes.  Returns what has gone."""
        above = standing_on(entry, self.all_entries())
        self.drop(above)
        self.drop([entry], spoiled=True)
        return [entry, *above]

    def forget(self, chosen: set[int]) -> list[Entry]:
        """Remove these entries for good, and what stands inside them.

        One that others go on from at its end is theirs too, and stays.
        """
        entries = self.all_entries()
        by_number = {entry.number: entry for entry in entries}
        theirs = {
            entry.parent
            for entry in entries
            if entry.number not in chosen
            and entry.parent in by_number
            and entry.kind == SPAN
            and entry.start == by_number[entry.parent].stop
        }
        gone: dict[int, Entry] = {}
        for entry in entries:
            if entry.number in chosen - theirs:
                gone[entry.number] = entry
                gone |= {e.number: e for e in standing_on(entry, entries)}
        self.drop(gone.values())
        return list(gone.values())

    def make_room(
        self, nbytes: int, order: Order | None = None, keep: Collection[int] = ()
    ) -> list[Entry] | None:
        """Remove entries until ``nbytes`` fit; nobody goes where they never would.

        Args:
            order: numbers of what goes first, children before their parents; the least
                recently used first where it is not given.
            keep: numbers of what stays.

        Returns:
            What has gone, or None where it does not fit.
        """
        if self.max_bytes is None or self.nbytes + nbytes <= self.max_bytes:
            return []
        if nbytes > self.max_bytes:
            return None
        target = max(0, int(self.max_bytes * (1 - SLACK)) - nbytes)
        gone = list(self._losses(target, order or least_recently_used, keep))
        self.drop(gone)
        self.evictions += len(gone)
        return gone if self.nbytes + nbytes <= self.max_bytes else None

    def _losses(
        self, target: int, order: Order, keep: Collection[int]
    ) -> Iterator[Entry]:
        entries = {entry.number: entry for entry in self.all_entries()}
        children = count_children(entries.values())
        held = self.nbytes
        for number in order(list(entries.values())):
            if held <= target:
                return
            if children.get(number) or number not in entries or number in keep:
                continue
            entry = entries.pop(number)
            children[entry.parent] = children.get(entry.parent, 1) - 1
            held -= entry.nbytes
            yield entry


def _hashed(chunks: Iterable[memoryview | bytes], digest: Any) -> Iterator[memoryview]:
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        digest.update(view)
        yield view


def summary(store: DiskStore) -> list[dict[str, Any]]:
    """What is stored, one row a root."""
    totals: dict[int, list[int]] = {}
    for entry in store.all_entries():
        total = totals.setdefault(entry.root, [0, 0, 0, 0])
        total[0] += 1
        total[1] += entry.nbytes
        total[2] += entry.stop - entry.start if entry.kind == SPAN else 0
        total[3] = max(total[3], entry.last_use)
    return [
        {
            "root": number,
            "model": note,
            "identity": identity,
            "salt": salt,
            "entries": totals[number][0],
            "bytes": totals[number][1],
            "tokens": totals[number][2],
            "last_use": totals[number][3],
        }
        for number, identity, salt, _, note in store.all_roots()
        if number in totals
    ]
