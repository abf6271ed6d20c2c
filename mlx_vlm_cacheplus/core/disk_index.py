"""The index of a disk store: its tables, and its rows read and written."""

from __future__ import annotations

import contextlib
import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

SCHEMA = 3
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
  session TEXT, born INTEGER, kv_nbytes INTEGER, state_nbytes INTEGER,
  part_nbytes INTEGER);
CREATE UNIQUE INDEX IF NOT EXISTS by_first ON entries (root, parent, start, first)
  WHERE kind = 0;
CREATE INDEX IF NOT EXISTS by_parent ON entries (parent);
"""
COLUMNS = (
    "number, root, parent, kind, start, stop, name, nbytes, checksum, has_state, "
    "companion, last_use, turns, session, born, kv_nbytes, state_nbytes, part_nbytes"
)
TYPES = [int] * 6 + [str, int, bytes, int, str, int, str, str] + [int] * 4


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
        born: the logical time when it was written.
        kv_nbytes, state_nbytes, part_nbytes: what of ``nbytes`` its sections have.
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
    born: int
    kv_nbytes: int = 0
    state_nbytes: int = 0
    part_nbytes: int = 0


@dataclass(frozen=True)
class New:
    """An entry to be written; the attributes are :class:`Entry`'s.

    Attributes:
        number: see ``DiskStore.reserve``.
        ids: the token ids of a span; empty for a supplement.
        chunks: the file's content, of which the first is its head.
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


# -- opening -----------------------------------------------------------------------------
def open_tables(path: Path, is_writer: bool) -> sqlite3.Connection:
    """Connect to an index, which whoever writes makes where it is not.

    Raises:
        sqlite3.DatabaseError: it is none, or another version's, or not as it was written.
    """
    try:
        connection = connect(path)
    except UnicodeDecodeError as error:
        # SQLite quotes what it cannot read.
        raise sqlite3.DatabaseError(f"not readable: {error}") from None
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, SCHEMA):
            raise sqlite3.DatabaseError(f"schema {version}")
        if version:
            _check_tables(connection)
        if is_writer:
            connection.executescript(TABLES)
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
    except UnicodeDecodeError as error:
        connection.close()
        raise sqlite3.DatabaseError(f"not readable: {error}") from None
    except BaseException:
        connection.close()
        raise
    return connection


def _check_tables(connection: sqlite3.Connection) -> None:
    """Raise sqlite3.DatabaseError where the tables are not called as they were made."""
    query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
    with contextlib.closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(TABLES)
        wanted = fresh.execute(query).fetchall()
    if connection.execute(query).fetchall() != wanted:
        raise sqlite3.DatabaseError("other tables")


def check(path: Path) -> None:
    """Raise sqlite3.DatabaseError where it is not whole; reads all of it."""
    # A connection that is open knows pages that the medium has lost.
    with contextlib.closing(connect(path)) as connection:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(found)


def is_broken(fault: BaseException) -> bool:
    """Whether SQLite says that an index is not what it wrote."""
    return type(fault) is sqlite3.DatabaseError


@contextlib.contextmanager
def unforced(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """A transaction that outlives the process at once, and the power with the next one.

    What stands for no file needs no more, and an entry that comes does not wait for it.
    """
    connection.execute("PRAGMA synchronous = NORMAL")
    try:
        with connection:
            yield connection
    finally:
        connection.execute("PRAGMA synchronous = FULL")


def connect(path: Path) -> sqlite3.Connection:
    # Each connection has one user at a time; who opens and closes may be another thread.
    connection = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    connection.text_factory = _text
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA fullfsync = 1")
    return connection


def _text(content: bytes) -> str:
    """Text that was damaged is another text, and no fault."""
    return content.decode("utf-8", "replace")


def remove(path: Path) -> None:
    """Remove an index and what SQLite keeps beside it."""
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


# -- finding -----------------------------------------------------------------------------
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
        entry = None if row is None else _entry(row[:-1])
        shared = 0 if entry is None else _shared(unpack(row[-1]), path, place)
        if entry is None or not shared:
            break
        place += shared
        found.append((entry, place))
        parent = entry.number
    return found


def supplements(connection: sqlite3.Connection, spans: Iterable[Entry]) -> list[Entry]:
    """What was kept later of these spans; not what a row gives to a wrong one."""
    numbered = {span.number: span for span in spans}
    numbers = ",".join(map(str, numbered))
    rows = connection.execute(
        f"SELECT {COLUMNS} FROM entries WHERE parent IN ({numbers}) AND kind > 0"
    )
    return [e for e in _entries(rows) if _belongs(e, numbered.get(e.parent))]


def _belongs(entry: Entry, span: Entry | None) -> bool:
    """Whether a supplement can be this span's: a state inside it, or a part of all."""
    if span is None:
        return False
    if entry.kind == STATE:
        return span.start < entry.start == entry.stop <= span.stop
    return (entry.start, entry.stop) == (span.start, span.stop)


def _entries(rows: Iterable[tuple]) -> list[Entry]:
    """Those of rows that can be what was written."""
    return [entry for entry in map(_entry, rows) if entry is not None]


def _entry(row: tuple) -> Entry | None:
    """A row, or None where a type, a size or a number is not what is written."""
    entry = Entry(*row)
    if [type(value) for value in row] != TYPES or not 0 <= entry.parent < entry.number:
        return None
    sections = (entry.kv_nbytes, entry.state_nbytes, entry.part_nbytes)
    return entry if min(sections) >= 0 and sum(sections) <= entry.nbytes else None


def _shared(span: Sequence[int], path: Sequence[int], place: int) -> int:
    """How many tokens a span shares with a path from ``place`` on."""
    rest = path[place : place + len(span)]
    if rest == span:
        return len(span)
    pairs = enumerate(zip(span, rest, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(span), len(rest)))


def ids_of(connection: sqlite3.Connection, number: int) -> list[int] | None:
    """Token ids of a span, or None where there is none."""
    row = connection.execute(
        "SELECT ids FROM entries WHERE number = ?", (number,)
    ).fetchone()
    return None if row is None else unpack(row[0])


def all_entries(connection: sqlite3.Connection) -> list[Entry]:
    return _entries(connection.execute(f"SELECT {COLUMNS} FROM entries"))


def root_of(connection: sqlite3.Connection, number: int) -> int | None:
    """The root of an entry, or None where there is none."""
    row = connection.execute(
        "SELECT root FROM entries WHERE number = ?", (number,)
    ).fetchone()
    return None if row is None else row[0]


def roots_of(
    connection: sqlite3.Connection, identity: str, salt: int
) -> list[tuple[int, str]]:
    """Number and layout of each root of an identity and a salt."""
    return connection.execute(
        "SELECT number, layout FROM roots WHERE identity = ? AND salt = ?",
        (identity, str(int(salt))),
    ).fetchall()


def all_roots(connection: sqlite3.Connection) -> list[tuple[int, str, int, str, str]]:
    """Number, identity, salt, layout and note of every root."""
    found = connection.execute("SELECT number, identity, salt, layout, note FROM roots")
    return [
        (number, name, int(salt), *rest)
        for number, name, salt, *rest in found
        if salt.lstrip("-").isdecimal()
    ]


def fact(connection: sqlite3.Connection, name: str) -> str | None:
    """A fact that was noted, or None."""
    row = connection.execute(
        "SELECT value FROM facts WHERE name = ?", (name,)
    ).fetchone()
    return None if row is None else row[0]


# -- writing -----------------------------------------------------------------------------
def add_root(
    writer: sqlite3.Connection, identity: str, salt: int, layout: str, note: str
) -> int:
    """The number of a root, which is made if it is not there."""
    known = {text: number for number, text in roots_of(writer, identity, salt)}
    if layout in known:
        return known[layout]
    with writer:
        cursor = writer.execute(
            "INSERT INTO roots (identity, salt, layout, note) VALUES (?, ?, ?, ?)",
            (identity, str(int(salt)), layout, note),
        )
    return int(cursor.lastrowid or 0)


def entry_of(
    new: New,
    name: str,
    nbytes: int,
    checksum: bytes,
    last_use: int,
    sections: Iterable[int],
) -> Entry:
    """The row of a new entry whose file is there; ``sections`` are their bytes."""
    return Entry(
        *(new.number, new.root, new.parent, new.kind, new.start, new.stop),
        *(name, nbytes, checksum, new.has_state, new.companion),
        *(last_use, new.turns, new.session, last_use),
        *sections,
    )


def note(writer: sqlite3.Connection, facts: Mapping[str, str]) -> None:
    """Remember facts."""
    writer.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())


def touch(writer: sqlite3.Connection, numbers: Iterable[int], clock: int) -> None:
    """These entries were used at this time, which is noted too."""
    writer.executemany(
        "UPDATE entries SET last_use = ? WHERE number = ?",
        [(clock, number) for number in numbers],
    )
    note(writer, {"clock": str(clock)})


def insert(
    writer: sqlite3.Connection, rows: Iterable[tuple[Entry, Sequence[int]]]
) -> None:
    """Add rows, each with its token ids."""
    marks = ", ".join("?" * 20)
    writer.executemany(
        f"INSERT INTO entries ({COLUMNS}, first, ids) VALUES ({marks})",
        [(*astuple(entry), ids[0] if ids else None, pack(ids)) for entry, ids in rows],
    )


def delete(writer: sqlite3.Connection, entries: Iterable[Entry], root: int = 0) -> None:
    """Remove rows, and the roots that have none left but ``root``."""
    writer.executemany(
        "DELETE FROM entries WHERE number = ?", [(e.number,) for e in entries]
    )
    writer.execute(
        "DELETE FROM roots WHERE number NOT IN (SELECT root FROM entries) "
        "AND number != ?",
        (root,),
    )


def split(turns: str) -> list[int]:
    """Places where prompts were answered, from a row's text."""
    if turns.isdecimal():
        return [int(turns)]
    return [int(place) for place in turns.split(",") if place.isdecimal()]


def pack(ids: Sequence[int]) -> bytes:
    return array("q", ids).tobytes()


def unpack(blob: bytes) -> list[int]:
    """Token ids; none of what cannot be a row's."""
    ids = array("q")
    if isinstance(blob, bytes) and not len(blob) % ids.itemsize:
        ids.frombytes(blob)
    return ids.tolist()
