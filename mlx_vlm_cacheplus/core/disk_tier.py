"""The second tier of a segment cache, on disk.

What the cache in RAM takes in is written behind the requests, and what it has lost, or a
server that has ended had, is read back before a prompt is looked up.  Segments in RAM are
split, joined and evicted as they please: on disk a path is kept as it grew, each token
once, and a :class:`~disk_parcel.Mark` on the nodes in RAM says how far.

What is promised:

1. A request never waits for a write, but its end where that was asked for (``promise``),
   and for a read no longer than ``READ_SECONDS``, or than reading its prompt anew takes.
2. A token's keys and values are written once.  Of the end states those are written that
   are not superseded when a row ends, and the first one of a path.
3. No fault of the disk reaches a request.

Arrays are touched on the thread that computes alone, which calls everything here but
``flush``, ``clear`` and ``statistics``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from .disk_companions import CompanionNames
from .disk_index import Entry
from .disk_intake import Intake
from .disk_policy import Asking, Root, order
from .disk_reader import Load
from .disk_settings import QUEUE_BYTES
from .disk_spill import Spill
from .disk_store import DiskStore
from .disk_sync import Receipt, ReplySync
from .disk_writer import FAULTS, DiskWriter
from .segment_cache import SegmentCache

logger = logging.getLogger(__name__)

# How long a request waits for the disk; how long an end waits for what is not written.
READ_SECONDS = 5.0
FLUSH_SECONDS = 10.0


class DiskTier:
    """See the module's text.

    Args:
        cache: the tier in RAM.
        store: where paths are kept; need not be open.
        identity: what the cache's arrays depend on; see ``disk_identity``.
        note: what lists call it.
        companions: names of the other models whose parts are kept, by identity.
        queue_bytes: what may wait to be written.
        sync: whether ends of replies wait until they are written; see ``disk_sync``.
    """

    def __init__(
        self,
        cache: SegmentCache,
        store: DiskStore,
        identity: str,
        note: str = "",
        companions: dict[Any, str] | None = None,
        queue_bytes: int = QUEUE_BYTES,
        sync: bool = False,
    ):
        self.cache, self.store, self.identity = cache, store, identity
        self.reading = False
        self.sync = ReplySync() if sync else None
        self._closed = False
        self._distrusted = False
        self.found: list[dict[str, Any]] = []
        names = CompanionNames(companions or {})
        self.writer = DiskWriter(store, queue_bytes, self.order, note)
        self.spill = Spill(cache, self.writer, identity, names)
        self.intake = Intake(cache, store, self.writer, identity, names, queue_bytes)
        self.reader = self.intake.reader
        cache.tier = self

    # -- what the cache tells ----------------------------------------------------------
    def grown(self, salt: int, ids: Sequence[int], has_states: bool) -> None:
        """The cache holds a path.

        Of a prompt that is still read the tokens are written ahead, so that little is
        left to write when the row ends.  Its end state, which the reply will supersede,
        is not.
        """
        if not self._closed:
            self.spill.note(salt, ids, self.reading and has_states)

    def shrunk(self) -> None:
        """The cache has lost something, which may be on disk."""
        self.intake.has_more = True

    # -- writing -----------------------------------------------------------------------
    def tick(self) -> None:
        """Hand over what was noted, as far as the queue has room; waits for nobody.

        Call between two steps: what was scheduled before the last one is there.
        """
        self._hand_over()

    def _hand_over(self, again: bool = False) -> None:
        if self._distrusted:
            self._distrusted = False
            self.spill.clear()
            self.cache.clear()
        self.spill.hand_over(again)
        if self.sync is not None:
            refused = bool(self.spill.notes)
            self.sync.handed_over(_refuse if refused else self.writer.tell)

    def promise(self) -> Receipt | None:
        """What a reply's end is to wait for: all that was noted up to now.

        Call when the row has ended.

        Returns:
            None where it waits for nothing.
        """
        if self.sync is None or self._closed:
            return None
        receipt = self.sync.receipt()
        if self.spill.notes or self.spill.replies:
            self.sync.after_hand_over(receipt)
        else:
            self.writer.tell(receipt)
        return receipt

    def distrust(self, facts: dict[str, str]) -> None:
        """What was stored for these weights is of others; from any thread.

        It goes, here and on disk, and this process keeps nothing on disk any more.
        """

        def job(store: DiskStore) -> None:
            roots = {n for n, name, *_ in store.all_roots() if name == self.identity}
            store.drop([e for e in store.all_entries() if e.root in roots])
            store.note(facts)

        self._closed = self._distrusted = True
        self._give_up_all()
        self.writer.do(job)

    @property
    def is_closed(self) -> bool:
        """Whether nothing is read or written any more."""
        return self._closed

    def keep_reply(self, owner: str, key: bytes, content: bytes) -> None:
        """Remember the tokens of a reply, which its text alone does not give back."""
        if not self._closed:
            self.spill.replies.append((owner, key, content))

    def order(
        self, entries: list[Entry], asking: Asking | None = None
    ) -> Iterable[int]:
        """What goes first where the store is full; see ``disk_policy``."""
        store, policy = self.store, self.cache.policy
        mine = {
            number: Root(salt, '"state"' in layout)
            for number, name, salt, layout, _ in store.all_roots()
            if name == self.identity
        }
        budget = store.nbytes if store.max_bytes is None else store.max_bytes
        sessions = list(getattr(policy, "table", {}).values())
        pinned = frozenset(s.name for s in sessions if s.pinned and s.name)
        return order(entries, mine, budget, store.clock, asking, pinned)

    # -- reading -----------------------------------------------------------------------
    def ask(self, ids: Sequence[int], salt: int) -> Load | None:
        """Have the disk looked at for a prompt that will be looked up later.

        Returns:
            What to ``wait`` for, then ``adopt``; None where there is nothing to hope for.
        """
        return None if self._closed else self.intake.ask(ids, salt, READ_SECONDS)

    def wait(self, load: Load, seconds: float) -> bool:
        """Whether a load has come, after so long at most; one that hangs has not to."""
        return self.intake.wait(load, seconds, READ_SECONDS)

    def adopt(self, load: Load) -> int:
        """Give the cache what was read; returns the tokens that can be restored now."""
        return self.intake.adopt(load)

    def measure_prefill(self, tokens: int, seconds: float) -> None:
        """A chunk of a prompt took so long."""
        self.intake.measure_prefill(tokens, seconds)

    # -- from any thread ---------------------------------------------------------------
    def flush(self, seconds: float) -> int:
        """Have everything written, for so long; returns how many paths were left.

        The thread that computes goes on meanwhile, and hands over what waits there.
        """
        deadline = time.monotonic() + seconds
        spill = self.spill
        while (spill.notes or spill.replies) and time.monotonic() < deadline:
            if self.writer.reads_only:
                return 0  # what is another server's to keep
            if self.writer.is_refused:
                break
            time.sleep(0.02)
        self.writer.flush(max(0.0, deadline - time.monotonic()))
        return len(spill.notes) + self.writer.pending

    def clear(self, seconds: float) -> int:
        """Remove everything from the disk; returns how many entries there were.

        Raises:
            OSError: it is not done in this time, or another server writes there.
        """
        done = threading.Event()
        gone: list[Entry] = []

        def job(store: DiskStore) -> None:
            gone.extend(store.all_entries())
            store.drop(gone)
            self.writer.gone(gone)
            store.forget_replies()
            done.set()

        self.spill.clear()
        self._give_up_all()
        self.writer.do(job)
        if not done.wait(seconds):
            raise OSError(
                "the disk was not cleared: another server writes, or it fails"
            )
        return len(gone)

    def _give_up_all(self) -> None:
        self.writer.forget_all()
        if self.sync is not None:
            self.sync.handed_over(_refuse)

    def forget(
        self, session: str, paths: Sequence[tuple[int, tuple[int, ...], int]]
    ) -> None:
        """Remove what is a session's alone.

        Args:
            session: its name; what was written for it goes, if nobody goes on from it.
            paths: salt and token ids of paths that were its own, and how many tokens of
                each are not.
        """

        def job(store: DiskStore) -> None:
            named = [e for e in store.all_entries() if session and e.session == session]
            chosen = {entry.number for entry in named}
            for salt, ids, shared in paths:
                for root, _ in store.roots(self.identity, salt):
                    spans, _ = store.walk_to_write(root, ids)
                    chosen |= {span.number for span, _ in spans if span.stop > shared}
            self.writer.gone(store.forget(chosen))

        self.writer.do(job)

    def statistics(self) -> dict[str, Any]:
        """Counts for the cache's statistics endpoint."""
        counts, store = self.writer.counts, self.store
        return {
            "disk_path": str(store.folder.path),
            "disk_writes_here": store.is_writer,
            "disk_trouble": self.writer.trouble,
            "disk_bytes": store.nbytes,
            "disk_max_bytes": store.max_bytes,
            "disk_entries": store.entries,
            "disk_evictions": store.evictions,
            "disk_pending_paths": len(self.spill.notes) + self.writer.pending,
            "disk_pending_bytes": self.writer.pending_bytes,
            "disk_pending_most_bytes": self.writer.most_pending_bytes,
            "disk_queue_max_bytes": self.writer.max_bytes,
            "disk_written_entries": counts.entries,
            "disk_written_bytes": counts.written_bytes,
            "disk_write_faults": counts.failures,
            "disk_refused_entries": counts.refused,
            "disk_spoiled_entries": store.spoiled,
            "disk_restores": self.intake.hits,
            "disk_restored_tokens": self.intake.restored_tokens,
            "disk_declined_loads": self.reader.declined,
            "disk_read_faults": self.reader.failures,
            "disk_timeouts": self.intake.timeouts,
            "disk_found": self.found,
            **({} if self.sync is None else self.sync.statistics()),
        }

    def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Hand over and write what waits, for so long, and let the folder go.

        Call on the thread that computes, when no request is left.
        """
        if self.cache.tier is None:
            return
        deadline = time.monotonic() + seconds
        self._hand_over(again=True)
        while self.spill.notes and time.monotonic() < deadline:
            self._hand_over(again=True)
            tried = self.spill.notes and self.writer.flush(min(1.0, seconds))
            if tried and self.writer.reads_only:
                self.spill.clear()  # what is another server's to keep
            if self.writer.is_refused:
                break
        self._closed = True
        self.cache.tier = None
        notes, paths = len(self.spill.notes), self.writer.pending
        left = self.writer.close(max(0.0, deadline - time.monotonic()))
        if notes or left:
            say_left(notes + paths, self.writer.trouble, seconds)
        self.reader.close()
        try:
            self.store.close()
        except FAULTS as fault:
            logger.warning("The disk cache was not closed: %s", fault)


def _refuse(receipt: Receipt) -> None:
    receipt.tell(False)


def say_left(paths: int, trouble: str | None, seconds: float) -> None:
    """One line on what is lost, and why."""
    logger.warning(
        "Not written to disk: %d paths, which will be read anew: %s",
        paths,
        trouble or f"there was more than {seconds:.0f} s to write",
    )
