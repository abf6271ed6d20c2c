"""Writes paths to a disk store, behind the requests.

One thread does all that changes the store.  It handles host memory only.  What it is
given waits in a queue that is bounded by bytes: whoever finds it full keeps what it has
and comes again.  A fault of the medium stops the queue, not those who fill it: one line
says so, the head of the queue is tried again, and one line says when it works.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .disk_folder import Refused
from .disk_format import HostSegment, path_name, to_file
from .disk_index import COMPANION, SPAN, STATE, Entry, New
from .disk_store import DiskStore

logger = logging.getLogger(__name__)

FAULTS = (OSError, sqlite3.Error, Refused)
# Seconds between two tries while the medium does not take anything.
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
# Small things that wait while the medium does not answer; more are left out.
MOST_JOBS = 1024


@dataclass(eq=False)
class Mark:
    """What the store has, or is about to get, of one path.

    Attributes:
        stop: tokens of it.
        states: ends at which an end state is there.
        part: whose part of all these tokens is there too; empty for nobody's.
        numbers: entries that hold it, once they are known.
        alive: whether all that is still so.
    """

    stop: int
    states: frozenset[int] = frozenset()
    part: str = ""
    numbers: frozenset[int] = frozenset()
    alive: bool = True


@dataclass(eq=False)
class Parcel:
    """A path to be written, as far as the store lacks it.

    Attributes:
        root: identity, salt and layout, as the store keeps them.
        ids: the path's token ids, from its beginning.
        parts: consecutive segments up to its end, in host memory; those that are not
            ``whole`` come for their states, or another model's part, alone.
        mark: set to what became of it.
        nbytes: about how much of it goes to disk.
        replies: what ended meanwhile; see ``DiskStore.keep_reply``.
    """

    root: tuple[str, int, str]
    ids: tuple[int, ...]
    parts: list[HostSegment]
    mark: Mark
    nbytes: int
    turns: tuple[int, ...] = ()
    session: str = ""
    replies: tuple[tuple[str, bytes, bytes], ...] = ()


@dataclass
class Counts:
    """What was done since the start."""

    parcels: int = 0
    entries: int = 0
    written_bytes: int = 0
    failures: int = 0
    refused: int = 0
    dropped: int = 0


class DiskWriter:
    """See the module's text.

    Args:
        store: opened here where it is not.
        max_bytes: what may wait.
        order: what goes first when the store is full; see ``DiskStore.make_room``.
        note: what a root is called in lists.
    """

    def __init__(
        self,
        store: DiskStore,
        max_bytes: int,
        order: Callable[[list[Entry]], Iterable[int]] | None = None,
        note: str = "",
    ):
        self.store = store
        self.max_bytes = max_bytes
        self.counts = Counts()
        self.trouble: str | None = None
        self.pending_bytes = 0
        self.most_pending_bytes = 0
        self._order, self.note = order, note
        self._parcels: deque[Parcel] = deque()
        self._jobs: deque[Callable[[DiskStore], None]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._busy = False
        self._swept = False
        self.reads_only = False
        self._marks: weakref.WeakSet[Mark] = weakref.WeakSet()
        self._thread = threading.Thread(
            target=self._run, name="disk-writer", daemon=True
        )
        self._thread.start()

    # -- from any thread ---------------------------------------------------------------
    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes may wait; something always may if nothing does."""
        with self._changed:
            return not self._parcels or (self.pending_bytes + nbytes <= self.max_bytes)

    def put(self, parcel: Parcel) -> None:
        """Write this later; takes its parts."""
        with self._changed:
            self._parcels.append(parcel)
            self.pending_bytes += parcel.nbytes
            self.most_pending_bytes = max(self.most_pending_bytes, self.pending_bytes)
            self._marks.add(parcel.mark)
            self._changed.notify_all()

    def do(self, job: Callable[[DiskStore], None]) -> None:
        """Let the thread that may write do something; faults are its business."""
        with self._changed:
            if len(self._jobs) < MOST_JOBS:
                self._jobs.append(job)
            self._changed.notify_all()

    def know(self, mark: Mark) -> None:
        """Keep a mark true that was made from what was read."""
        with self._changed:
            self._marks.add(mark)

    @property
    def pending(self) -> int:
        """Parcels that wait."""
        return len(self._parcels)

    def flush(self, seconds: float) -> bool:
        """Wait until everything is written; False where it was not in this time."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._changed.notify_all()
            while self._parcels or self._jobs or self._busy:
                left = deadline - time.monotonic()
                if left <= 0 or not self._thread.is_alive():
                    return False
                self._changed.wait(left)
        return True

    def close(self, seconds: float) -> int:
        """Write what waits, for so long, and end; returns how many bytes were left."""
        self.flush(seconds)
        with self._changed:
            self._closing = True
            left = self.pending_bytes
            self._parcels.clear()
            self._jobs.clear()
            self._changed.notify_all()
        self._thread.join(1.0)
        return left

    def forget_all(self) -> None:
        """No mark is true any more, and nothing that waits is written."""
        with self._changed:
            self._kill(list(self._marks))
            self._parcels.clear()
            self.pending_bytes = 0
            self._changed.notify_all()

    # -- the thread --------------------------------------------------------------------
    def _run(self) -> None:
        pause = FIRST_PAUSE
        while True:
            with self._changed:
                while not (self._parcels or self._jobs or self._closing):
                    self._changed.wait()
                if self._closing:
                    return
                parcel = self._parcels[0] if self._parcels else None
                job = self._jobs.popleft() if parcel is None else None
                self._busy = True
            try:
                fine = self._attempt(job, parcel)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
            if fine:
                pause = FIRST_PAUSE
                continue
            with self._changed:
                if not self._closing:
                    self._changed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _attempt(
        self, job: Callable[[DiskStore], None] | None, parcel: Parcel | None
    ) -> bool:
        """Do one thing; False where the medium did not take it."""
        try:
            ready = self._ready()
            if job is not None:
                if ready:
                    job(self.store)
                return True
            assert parcel is not None
            if ready:
                self._write(parcel)
            else:
                self._give_up(parcel.mark)
        except FAULTS as fault:
            self._say_fault(fault)
            return job is not None
        except Exception as fault:
            logger.warning("Not written to disk: %s", fault, exc_info=True)
            self.counts.dropped += 1
            if parcel is not None:
                self._give_up(parcel.mark)
        else:
            self._say_fine()
        if parcel is not None:
            self._done(parcel)
        return True

    def _ready(self) -> bool:
        """Open what is not open; whether this process may write."""
        store = self.store
        if not store.is_there():
            with self._changed:
                self._kill(list(self._marks))
            store.open()
            self._swept = False
        if not store.try_to_write():
            if not self.reads_only:
                self.reads_only = True
                logger.warning(
                    "Another server writes to %s: this one reads only",
                    store.folder.path,
                )
            return False
        self.reads_only = False
        if not self._swept:
            store.sweep()
            self._swept = True
        return True

    def _done(self, parcel: Parcel) -> None:
        with self._changed:
            self.counts.parcels += 1
            if self._parcels and self._parcels[0] is parcel:
                self._parcels.popleft()
                self.pending_bytes -= parcel.nbytes
            self._changed.notify_all()

    def _give_up(self, mark: Mark) -> None:
        with self._changed:
            self._kill([mark])

    def _kill(self, marks: Iterable[Mark]) -> None:
        for mark in marks:
            mark.alive = False

    def _gone(self, entries: Sequence[Entry]) -> None:
        """Marks that stood on these entries are true no more."""
        numbers = {entry.number for entry in entries}
        with self._changed:
            self._kill([m for m in self._marks if not numbers.isdisjoint(m.numbers)])

    def _say_fault(self, fault: BaseException) -> None:
        self.counts.failures += 1
        text = f"{type(fault).__name__}: {fault}"
        if self.trouble is None:
            logger.warning(
                "Nothing is written to disk while this lasts; requests go on: %s", text
            )
        self.trouble = text

    def _say_fine(self) -> None:
        if self.trouble is not None:
            self.trouble = None
            logger.warning("Disk is written again: %s", self.store.folder.path)

    # -- one path ----------------------------------------------------------------------
    def _write(self, parcel: Parcel) -> None:
        store, ids, mark = self.store, parcel.ids, parcel.mark
        for reply in parcel.replies:
            store.keep_reply(*reply)
        root = store.root(*parcel.root, self.note)
        spans, extra = store.walk_to_write(root, ids)
        covered = spans[-1][1] if spans else 0
        there = {span.number for span, _ in spans}
        held = [part for part in parcel.parts if part.whole]
        if held and covered < held[0].start:
            # What it stands on has gone since: the next one brings the whole path.
            self._give_up(mark)
            return
        writing = _Writing(self, parcel, root, {e.number for e in extra} | there)
        writing.add_spans(held, covered, spans[-1][0].number if spans else 0)
        writing.add_states(spans, extra, covered)
        writing.add_parts(spans, extra)
        if not self._add(writing.news, writing.numbers):
            self._give_up(mark)
            return
        with self._changed:
            numbers = {new.number for new in writing.news}
            mark.numbers = frozenset(writing.numbers | numbers)

    def _add(self, news: Sequence[New], below: set[int]) -> bool:
        """Make room for entries and write them; False, said once, where they never fit."""
        store = self.store
        nbytes = sum(new.nbytes for new in news)
        gone = store.make_room(nbytes, self._order, below)
        if gone is None:
            if not self.counts.refused:
                logger.warning(
                    "An entry of %d bytes does not fit the disk cache of %s bytes",
                    nbytes,
                    store.max_bytes,
                )
            self.counts.refused += 1
            return False
        if gone:
            self._gone(gone)
        entries = store.add(news, below) if news else []
        self.counts.entries += len(entries)
        self.counts.written_bytes += sum(entry.nbytes for entry in entries)
        return True


@dataclass
class _Writing:
    """The entries of one parcel; ``numbers`` are those that they stand on."""

    writer: DiskWriter
    parcel: Parcel
    root: int
    numbers: set[int] = field(default_factory=set)
    news: list[New] = field(default_factory=list)

    def _add(
        self, kind: int, parent: int, parts: Sequence[HostSegment], **more: Any
    ) -> int:
        parcel = self.parcel
        start, stop = parts[0].start, parts[-1].stop
        turns = [turn for turn in parcel.turns if start < turn <= stop]
        row: dict[str, Any] = {
            "number": self.writer.store.reserve(),
            "parent": parent,
            "kind": kind,
            "start": start,
            "stop": stop,
            "ids": parcel.ids[start:stop] if kind == SPAN else (),
            "turns": ",".join(map(str, turns)),
            "session": parcel.session,
            **more,
        }
        # Whole files whose row was not written any more are taken in by it.
        text = json.dumps({"root": [*parcel.root, self.writer.note], **row})
        path = path_name(parcel.ids[:stop], repr(parcel.root))
        content, nbytes = to_file(parts, path, text)
        self.news.append(New(root=self.root, chunks=content, nbytes=nbytes, **row))
        return self.news[-1].number

    def add_spans(
        self, parts: Sequence[HostSegment], covered: int, parent: int
    ) -> None:
        """What the store lacks, one entry up to each end state."""
        group: list[HostSegment] = []
        for place, part in enumerate(parts):
            if part.stop <= covered:
                continue
            group.append(part.cut(max(part.start, covered), part.stop))
            following = parts[place + 1] if place + 1 < len(parts) else None
            goes_on = following is not None and part.states is None
            if goes_on and _part_name(following) == _part_name(part):
                continue
            parent = self._add(
                SPAN,
                parent,
                group,
                has_state=part.states is not None,
                companion=_part_name(part),
            )
            group = []

    def add_states(
        self, spans: Sequence[tuple[Entry, int]], extra: Sequence[Entry], covered: int
    ) -> None:
        """End states inside what the store had already."""
        there = {span.stop for span, _ in spans if span.has_state}
        there |= {entry.stop for entry in extra if entry.kind == STATE}
        for part in self.parcel.parts:
            if part.states is None or part.stop > covered or part.stop in there:
                continue
            below = next(span for span, end in spans if span.start < part.stop <= end)
            only = HostSegment(part.stop, part.stop, [], part.states)
            self._add(STATE, below.number, [only], has_state=True)

    def add_parts(
        self, spans: Sequence[tuple[Entry, int]], extra: Sequence[Entry]
    ) -> None:
        """Another model's part of spans that were stored without it."""
        named = {_part_name(part) for part in self.parcel.parts}
        for name in named - {""}:
            there = {e.parent for e in extra if e.companion == name}
            for span, end in spans:
                if span.companion == name or span.number in there or end < span.stop:
                    continue
                parts = _whole_part(self.parcel.parts, span, name)
                if parts:
                    self._add(COMPANION, span.number, parts, companion=name)


def _part_name(part: HostSegment | None) -> str:
    return "" if part is None or part.part is None else part.part.name


def _whole_part(
    parts: Sequence[HostSegment], span: Entry, name: str
) -> list[HostSegment]:
    """Parts that cover a span with one model's part of it; none if they do not."""
    found: list[HostSegment] = []
    place = span.start
    for part in parts:
        if part.stop <= place or part.start > place or _part_name(part) != name:
            continue
        stop = min(part.stop, span.stop)
        only = HostSegment(part.start, part.stop, [], None, part.part)
        found.append(only.cut(place, stop))
        place = stop
        if place == span.stop:
            return found
    return []
