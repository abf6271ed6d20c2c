"""Writes paths to a disk store, behind the requests.

One thread does all that changes the store.  It handles host memory only.  What it is
given waits in a queue that is bounded by bytes: whoever finds it full keeps what it has
and comes again.  A fault of the medium stops the queue, not those who fill it: one line
says so, the head of the queue is tried again, and one line says when it works.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .disk_eviction import Order
from .disk_folder import Refused
from .disk_index import Entry, New, is_broken
from .disk_parcel import Mark, Parcel, Stored, entries_of
from .disk_policy import Asking
from .disk_store import DiskStore
from .disk_sync import Receipt

logger = logging.getLogger(__name__)

FAULTS = (OSError, sqlite3.Error, Refused)
# Seconds between two tries while the medium does not take anything.
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
# Small things that wait while the medium does not answer; more are left out.
MOST_JOBS = 1024

Job = Callable[[DiskStore], None]


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
        order: what goes first when the store is full, on behalf of a session; see
            ``DiskStore.make_room``.
        note: what a root is called in lists.
    """

    def __init__(
        self,
        store: DiskStore,
        max_bytes: int,
        order: Callable[[list[Entry], Asking], Iterable[int]] | None = None,
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
        self._first: deque[Job] = deque()
        self._jobs: deque[Job] = deque()
        self._receipts: list[Receipt] = []
        self._changed = threading.Condition()
        self._closing = False
        self._busy = False
        self.is_failing = False
        self._swept = False
        self._said_refused = False
        self.is_refused = False
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

    def do(self, job: Job, first: bool = False) -> None:
        """Let the thread that may write do something; faults are its business.

        Args:
            first: before the parcels that wait, which could stand on what it removes.
        """
        jobs = self._first if first else self._jobs
        with self._changed:
            if len(jobs) < MOST_JOBS:
                jobs.append(job)
            self._changed.notify_all()

    def tell(self, receipt: Receipt) -> None:
        """Let it know when all that waits now is written, or given up.

        Its files are forced to the medium and named then, and their rows are in the index.
        """
        with self._changed:
            if self._closing or self.reads_only or self.is_failing:
                receipt.tell(False)
            elif self._parcels:
                self._parcels[-1].receipts.append(receipt)
            elif self._busy or self._first or self._jobs:
                self._receipts.append(receipt)
            else:
                receipt.tell(True)

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
            tried = self.counts.failures
            self._changed.notify_all()
            while self._waits() or self._busy:
                if self.is_refused and self.counts.failures > tried:
                    return False  # until somebody mends the folder
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
            self._drop_parcels()
            self._tell(self._receipts, False)
            self._first.clear()
            self._jobs.clear()
            self._changed.notify_all()
        self._thread.join(1.0)
        return left

    def forget_all(self) -> None:
        """No mark is true any more, and nothing that waits is written."""
        with self._changed:
            self._kill(list(self._marks))
            self._drop_parcels()
            self.pending_bytes = 0
            self._changed.notify_all()

    # -- the thread --------------------------------------------------------------------
    def _run(self) -> None:
        pause = FIRST_PAUSE
        while True:
            with self._changed:
                while not (self._waits() or self._closing):
                    self._changed.wait()
                if self._closing:
                    return
                job, parcel = self._next()
                self._busy = True
            try:
                fine = self._attempt(job, parcel)
            finally:
                with self._changed:
                    self._busy = False
                    if not (self._first or self._jobs):
                        self._tell(self._receipts, self.trouble is None)
                    self._changed.notify_all()
            self.is_failing = not fine
            if fine:
                pause = FIRST_PAUSE
                continue
            with self._changed:
                if not self._closing:
                    self._changed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _waits(self) -> bool:
        return bool(self._first or self._parcels or self._jobs)

    def _next(self) -> tuple[Job | None, Parcel | None]:
        """A job, or the parcel at the head of the queue, which stays there."""
        if self._first:
            return self._first.popleft(), None
        if self._parcels:
            return None, self._parcels[0]
        return self._jobs.popleft(), None

    def _attempt(self, job: Job | None, parcel: Parcel | None) -> bool:
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
            if is_broken(fault) and self._mend():
                return True
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

    def _mend(self) -> bool:
        """Make a broken index anew; whether it could be.  What waits is tried again."""
        with self._changed:
            self._kill(list(self._marks))
        try:
            if not self.store.is_writer:
                return False
            self.store.mend()
        except FAULTS as fault:
            self._say_fault(fault)
            return False
        logger.warning("The disk's index was broken and is made anew from its files")
        self._swept = False
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
            self._tell(parcel.receipts, parcel.mark.alive)
            if self._parcels and self._parcels[0] is parcel:
                self._parcels.popleft()
                self.pending_bytes -= parcel.nbytes
            self._changed.notify_all()

    def _drop_parcels(self) -> None:
        for parcel in self._parcels:
            self._tell(parcel.receipts, False)
        self._parcels.clear()

    @staticmethod
    def _tell(receipts: list[Receipt], written: bool) -> None:
        for receipt in receipts:
            receipt.tell(written)
        receipts.clear()

    def _give_up(self, mark: Mark) -> None:
        with self._changed:
            self._kill([mark])

    def _kill(self, marks: Iterable[Mark]) -> None:
        for mark in marks:
            mark.alive = False

    def gone(self, entries: Sequence[Entry]) -> None:
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
        self.is_refused = isinstance(fault, Refused)

    def _say_fine(self) -> None:
        if self.trouble is not None:
            self.trouble, self.is_refused = None, False
            logger.warning("Disk is written again: %s", self.store.folder.path)

    # -- one path ----------------------------------------------------------------------
    def _write(self, parcel: Parcel) -> None:
        store, mark = self.store, parcel.mark
        for reply in parcel.replies:
            store.keep_reply(*reply)
        root = store.root(*parcel.root, self.note)
        stored = Stored(*store.walk_to_write(root, parcel.ids))
        news = entries_of(parcel, stored, root, store.reserve, self.note)
        # Where what it stands on has gone, the next one brings the whole path.
        if news is None or not self._add(parcel, root, news, stored.numbers):
            self._give_up(mark)
            return
        with self._changed:
            mark.numbers = frozenset(stored.numbers | {new.number for new in news})

    def _order_for(self, asking: Asking) -> Order | None:
        order = self._order
        return None if order is None else lambda entries: order(entries, asking)

    def _add(
        self, parcel: Parcel, root: int, news: Sequence[New], below: set[int]
    ) -> bool:
        """Make room for entries and write them.

        False where they never fit, which is said once, or not into the session's share.
        """
        store = self.store
        nbytes = sum(new.nbytes for new in news)
        owner = parcel.root[1], news[0].session if news else ""
        order = self._order_for(Asking(owner, nbytes, frozenset(below)))
        gone = store.make_room(nbytes, order, below, root)
        if gone is None:
            if not self._said_refused and nbytes > (store.max_bytes or 0):
                self._said_refused = True
                logger.warning(
                    "An entry of %d bytes does not fit the disk cache of %s bytes",
                    nbytes,
                    store.max_bytes,
                )
            self.counts.refused += 1
            return False
        if gone:
            self.gone(gone)
        entries = store.add(news, below) if news else []
        self.counts.entries += len(entries)
        self.counts.written_bytes += sum(entry.nbytes for entry in entries)
        return True
