"""The index of a disk store: rows, how they are found, and what stands on what."""

from __future__ import annotations

import itertools
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from pathlib import Path

SCHEMA = 1
INDEX = "index.sqlite"
SPAN, STATE, COMPANION = range(3)

# A salt may have 256 bits, and is kept as text: SQLite's integers have 64.
TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS replies (
  key BLOB PRIMARY KEY, owner TEXT, content BLOB, last_use INTEGER);
CREATE TABLE IF NOT EXISTS roots (
  number INTEGER PRIMARY KEY, identity TEXT, salt TEXT, layout TEXT, note TEXT,
  UNIQUE (identity, salt, layout));
CREATE TABLE IF NOT EXISTS entries (
  number INTEGER PRIMARY KEY, root INTEGER, parent INTEGER, kind INTEGER,
  start INTEGER, stop INTEGER, first INTEGER, ids BLOB, name TEXT, nbytes INTEGER,
  checksum BLOB, has_state INTEGER, companion TEXT, last_use INTEGER, turns TEXT,
  session TEXT);
CREATE UNIQUE INDEX IF NOT EXISTS by_first ON entries (root, parent, start, first)
  WHERE kind = 0;
CREATE INDEX IF NOT EXISTS by_parent ON entries (parent);
"""
COLUMNS = (
    "number, root, parent, kind, start, stop, name, nbytes, checksum, has_state, "
    "companion, last_use, turns, session"
)


@dataclass(frozen=True)
class Entry:
    """One row of the index; see the module's text.

    Attributes:
        parent: number of the entry that it stands on; 0 for none.
        start, stop: places in the path, in tokens; equal for a state alone.
        has_state: whether the end state at ``stop`` is in it.
        companion: which other model has a part in it; empty for none.
        last_use: logical time.
        turns: places where a prompt was answered, as text.
        session: whose it is, as text; empty for nobody's.
    """

    number: int
    root: int
    parent: int
    kind: int
    start: int
    stop: int
    name: str
    nbytes: int
    checksum: bytes
    has_state: bool
    companion: str
    last_use: int
    turns: str
    session: str


@dataclass(frozen=True)
class New:
    """An entry to be written; the attributes are :class:`Entry`'s.

    Attributes:
        number: see ``DiskStore.reserve``.
        ids: the token ids of a span; empty for a supplement.
        chunks: the file's content.
        nbytes: its length.
    """

    number: int
    root: int
    parent: int
    kind: int
    start: int
    stop: int
    ids: Sequence[int]
    chunks: Iterable[memoryview | bytes]
    nbytes: int
    has_state: bool = False
    companion: str = ""
    turns: str = ""
    session: str = ""


Order = Callable[[list[Entry]], Iterable[int]]


def walk(
    connection: sqlite3.Connection, root: int, ids: Sequence[int]
) -> list[tuple[Entry, int]]:
    """See :meth:`DiskStore.walk`."""
    found: list[tuple[Entry, int]] = []
    parent, place, path = 0, 0, list(ids)
    while place < len(path):
        row = connection.execute(
            f"SELECT {COLUMNS}, ids FROM entries WHERE kind = 0 AND root = ? "
            "AND parent = ? AND start = ? AND first = ?",
            (root, parent, place, path[place]),
        ).fetchone()
        if row is None:
            break
        entry = Entry(*row[:-1])
        place += _shared(unpack(row[-1]), path, place)
        found.append((entry, place))
        parent = entry.number
    return found


def supplements(connection: sqlite3.Connection, spans: Iterable[Entry]) -> list[Entry]:
    """What was kept later of these spans."""
    numbers = ",".join(str(span.number) for span in spans)
    rows = connection.execute(
        f"SELECT {COLUMNS} FROM entries WHERE parent IN ({numbers}) AND kind > 0"
    )
    return [Entry(*row) for row in rows]


def least_recently_used(entries: list[Entry]) -> Iterator[int]:
    """Leaves, the least recently used first; parents follow as they become leaves."""
    by_number = {entry.number: entry for entry in entries}
    children = count_children(entries)
    tie = itertools.count()
    queue = [(e.last_use, next(tie), e) for e in entries if not children.get(e.number)]
    heapify(queue)
    while queue:
        _, _, entry = heappop(queue)
        yield entry.number
        parent = by_number.get(entry.parent)
        if parent is not None:
            children[parent.number] -= 1
            if not children[parent.number]:
                heappush(queue, (parent.last_use, next(tie), parent))


def standing_on(entry: Entry, entries: list[Entry]) -> list[Entry]:
    """All that has this entry below it."""
    children: dict[int, list[Entry]] = {}
    for each in entries:
        children.setdefault(each.parent, []).append(each)
    found, open_ = [], [entry]
    while open_:
        above = children.get(open_.pop().number, [])
        found.extend(above)
        open_.extend(above)
    return found


def count_children(entries: Iterable[Entry]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for entry in entries:
        counts[entry.parent] = counts.get(entry.parent, 0) + 1
    return counts


def _shared(span: Sequence[int], path: Sequence[int], place: int) -> int:
    """How many tokens a span shares with a path from ``place`` on."""
    rest = path[place : place + len(span)]
    if rest == span:
        return len(span)
    pairs = enumerate(zip(span, rest, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(span), len(rest)))


def connect(path: Path) -> sqlite3.Connection:
    # Each connection has one user at a time; who opens and closes may be another thread.
    connection = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA fullfsync = 1")
    return connection


def pack(ids: Sequence[int]) -> bytes:
    return array("q", ids).tobytes()


def unpack(blob: bytes) -> list[int]:
    ids = array("q")
    ids.frombytes(blob)
    return ids.tolist()
