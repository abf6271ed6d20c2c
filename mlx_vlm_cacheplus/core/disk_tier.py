"""The second tier of a segment cache, on disk.

What the cache in RAM takes in is written behind the requests, and what it has lost, or a
server that has ended had, is read back before a prompt is looked up.  Segments in RAM are
split, joined and evicted as they please: on disk a path is kept as it grew, each token
once, and a :class:`~disk_writer.Mark` on the nodes in RAM says how far.

What is promised:

1. A request never waits for a write, and for a read no longer than ``READ_SECONDS``, or
   than reading its prompt anew would take.
2. A token's keys and values are written once.  Of the end states those are written that
   are not superseded when a row ends, and the first one of a path.
3. No fault of the disk reaches a request.

Arrays are touched on the thread that computes alone, which calls everything here but
``flush``, ``clear`` and ``statistics``.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from . import eviction
from .disk_format import HostSegment, export_segments, to_segment, to_states
from .disk_index import COMPANION, Entry, least_recently_used
from .disk_reader import DiskReader, Found, Load, layout_text
from .disk_settings import QUEUE_BYTES
from .disk_store import DiskStore
from .disk_writer import FAULTS, DiskWriter, Mark, Parcel
from .draft_state import DraftPart
from .segment_cache import SegmentCache
from .segment_tree import Node
from .segments import Segment

logger = logging.getLogger(__name__)

# How long a request waits for the disk; how long an end waits for what is not written.
READ_SECONDS = 5.0
FLUSH_SECONDS = 10.0
# Paths that wait for room in the queue.
MOST_NOTES = 256
# Chunks shorter than this tell nothing about how fast prompts are read.
MEASURED_TOKENS = 32


class DiskTier:
    """See the module's text.

    Args:
        cache: the tier in RAM.
        store: where paths are kept; need not be open.
        identity: what the cache's arrays depend on; see ``disk_identity``.
        note: what lists call it.
        companions: names of the other models whose parts are kept, by identity.
        queue_bytes: what may wait to be written.
    """

    def __init__(
        self,
        cache: SegmentCache,
        store: DiskStore,
        identity: str,
        note: str = "",
        companions: dict[Any, str] | None = None,
        queue_bytes: int = QUEUE_BYTES,
    ):
        self.cache, self.store, self.identity = cache, store, identity
        self.companions = companions or {}
        self.prefill_rate = 0.0
        self.hits = self.restored_tokens = self.timeouts = 0
        self.reading = False
        # Salt and path; whether its end state is about to be superseded.
        self._notes: dict[tuple[int, tuple[int, ...]], bool] = {}
        self._replies: deque[tuple[str, bytes, bytes]] = deque(maxlen=MOST_NOTES)
        self._tried_at = -1
        self._has_more = True
        self._closed = False
        self._distrusted = False
        self.found: list[dict[str, Any]] = []
        self.writer = DiskWriter(store, queue_bytes, self.order, note)
        self.reader = DiskReader(
            store, identity, self.is_worth, self._set_aside, queue_bytes
        )
        cache.tier = self

    # -- what the cache tells ----------------------------------------------------------
    def grown(self, salt: int, ids: Sequence[int], has_states: bool) -> None:
        """The cache holds a path.

        Of a prompt that is still read the tokens are written ahead, so that little is
        left to write when the row ends.  Its end state, which the reply will supersede,
        is not.
        """
        if self._closed:
            return
        path, early = tuple(ids), self.reading and has_states
        for note, before in list(self._notes.items()):
            # A reply's end state that still waits is not the next prompt's to drop.
            if note[0] == salt and _begins(path, note[1]) and before >= early:
                del self._notes[note]
        self._notes[int(salt), path] = early
        while len(self._notes) > MOST_NOTES:
            del self._notes[next(iter(self._notes))]
        self._tried_at = -1

    def shrunk(self) -> None:
        """The cache has lost something, which may be on disk."""
        self._has_more = True

    # -- writing -----------------------------------------------------------------------
    def tick(self) -> None:
        """Hand over what was noted, as far as the queue has room; waits for nobody.

        Call between two steps: what was scheduled before the last one is there.
        """
        if self._distrusted:
            self._forget_everything()
        if self._replies and not self._notes:
            self.writer.do(functools.partial(_keep, self._take_replies()))
        if not self._notes or self._tried_at == self.writer.counts.parcels:
            return
        self._tried_at = self.writer.counts.parcels
        if self.writer.reads_only:
            self.writer.do(lambda store: None)  # has the other server gone?
            return
        for (salt, ids), early in list(self._notes.items()):
            try:
                if not self._spill(salt, ids, early):
                    return
            except Exception as error:
                logger.warning("Not kept on disk: %s", error, exc_info=True)
            self._notes.pop((salt, ids), None)

    def distrust(self, facts: dict[str, str]) -> None:
        """What was stored for these weights is of others; from any thread.

        It goes, here and on disk, and this process keeps nothing on disk any more.
        """

        def job(store: DiskStore) -> None:
            roots = {n for n, name, *_ in store.all_roots() if name == self.identity}
            store.drop([e for e in store.all_entries() if e.root in roots])
            store.note(facts)

        self._closed = self._distrusted = True
        self.writer.forget_all()
        self.writer.do(job)

    def _forget_everything(self) -> None:
        self._distrusted = False
        self._notes.clear()
        self._replies.clear()
        self.cache.clear()

    @property
    def is_closed(self) -> bool:
        """Whether nothing is read or written any more."""
        return self._closed

    def _spill(self, salt: int, ids: tuple[int, ...], early: bool) -> bool:
        """Hand over what the disk lacks of a path; False where the queue is full.

        early: without the state at its end, unless that is the first one of the path.
        """
        with self.cache.lock:
            layout, nodes = self._path(salt, ids)
            if not nodes:
                return True
            known = _known(nodes)
            stop = nodes[-1].end
            states = _states_to_keep(nodes, early)
            part = self._part_of(nodes[-1])
            renewed = part if known.part != part else ""
            if known.stop >= stop and not states and not renewed:
                return True
            taken = [
                node
                for node in nodes
                if node.end > known.stop
                or node.end in states
                or (renewed and self._part_of(node) == renewed)
            ]
            nbytes = sum(_nbytes(node, known.stop, states) for node in taken)
            if not self.writer.has_room(nbytes):
                return False
            parts = export_segments(
                [(node.start, node.payload) for node in taken],
                known.stop,
                states,
                self._pack,
            )
            everywhere = all(self._part_of(node) == part for node in nodes)
            mark = Mark(stop, known.states | states, part if everywhere else "")
            turns = tuple(turn for node in nodes for turn in node.turns)
            for node in nodes:
                node.stored = mark
        root = (self.identity, salt, layout_text(layout))
        about = (turns, self._session(nodes), self._take_replies())
        self.writer.put(Parcel(root, ids[:stop], parts, mark, nbytes, *about))
        return True

    def _take_replies(self) -> tuple[tuple[str, bytes, bytes], ...]:
        taken = tuple(self._replies)
        self._replies.clear()
        return taken

    def _path(self, salt: int, ids: Sequence[int]) -> tuple[tuple, list[Node]]:
        """Layout and nodes of the longest path along ``ids``."""
        found = [
            (layout, tree.match(ids).whole_nodes())
            for layout, tree in self.cache._under(salt)
        ]
        return max(found, key=lambda f: f[1][-1].end if f[1] else 0, default=((), []))

    def _session(self, nodes: Sequence[Node]) -> str:
        table = getattr(self.cache.policy, "table", {})
        here = [table[n] for n in nodes[-1].sessions if n in table]
        newest = max(here, key=lambda session: session.last_use, default=None)
        # Only a name is the same after a restart.
        return "" if newest is None else newest.name or ""

    def _pack(self, companion: Any) -> tuple[str, list, Any] | None:
        name = self.companions.get(companion.identity)
        if name is None or not isinstance(companion, DraftPart):
            return None
        return name, companion.spans, companion.pending

    def _unpack(self, name: str, spans: list, pending: Any) -> Any:
        for identity, known in self.companions.items():
            if known == name:
                return DraftPart(identity, spans, pending)
        return None

    def _part_of(self, node: Node) -> str:
        identity = node.payload.companion_identity
        return "" if identity is None else self.companions.get(identity, "")

    def keep_reply(self, owner: str, key: bytes, content: bytes) -> None:
        """Remember the tokens of a reply, which its text alone does not give back."""
        if not self._closed:
            self._replies.append((owner, key, content))

    def order(self, entries: list[Entry]) -> Iterable[int]:
        """What goes first: other models' paths, prompts that nobody extended, the rest."""
        mine = {
            root for root, name, *_ in self.store.all_roots() if name == self.identity
        }
        foreign = [entry for entry in entries if entry.root not in mine]
        yield from least_recently_used(foreign)
        own = [entry for entry in entries if entry.root in mine]
        parents = {entry.parent for entry in own}
        once = {e.number for e in own if not e.parent and e.number not in parents}
        late = []
        for number in least_recently_used(own):
            if number in once:
                yield number
            else:
                late.append(number)
        yield from late

    # -- reading -----------------------------------------------------------------------
    def ask(self, ids: Sequence[int], salt: int) -> Load | None:
        """Have the disk looked at for a prompt that will be looked up later.

        Returns:
            What to ``wait`` for, then ``adopt``; None where there is nothing to hope for.
        """
        if self._closed or not self._has_more or not self.store.is_open:
            return None
        if self.reader.hangs(READ_SECONDS):
            return None
        held = self.cache.match(ids, salt).length
        restorable = self.cache.peek(ids, salt)
        if restorable >= len(ids) - 1:
            return None
        load = Load(tuple(ids), int(salt), held, restorable)
        self.reader.ask(load)
        return load

    def wait(self, load: Load, seconds: float) -> bool:
        """Whether a load has come, after so long at most; one that hangs has not to."""
        left = load.since + READ_SECONDS - time.monotonic()
        if load.done.wait(max(0.0, min(seconds, left))):
            return True
        if seconds < left and not self.reader.hangs(READ_SECONDS):
            return False
        self.timeouts += 1
        logger.warning("The disk does not answer; a prompt is read by the model")
        self.reader.release(load)
        load.done.set()
        return True

    def adopt(self, load: Load) -> int:
        """Give the cache what was read; returns the tokens that can be restored now."""
        try:
            return self._adopt(load) if load.length else 0
        except Exception as error:
            logger.warning("Nothing taken from disk: %s", error, exc_info=True)
            return 0
        finally:
            self.reader.release(load)

    def _adopt(self, load: Load) -> int:
        ids, node = load.ids, None
        mark = Mark(load.length, numbers=load.numbers)
        states: set[int] = set()
        parts = {f.entry.parent: f for f in load.entries if f.entry.kind == COMPANION}
        first = next((f for f in load.entries if f.segment.states is not None), None)
        for found in load.entries:
            if found.entry.kind == COMPANION:
                continue
            stop = min(found.stop, load.length)
            keep = stop == load.length or found is first
            segment = _shaped(found, parts.get(found.entry.number), keep)
            taken = self.cache.adopt(
                ids[:stop],
                load.salt,
                load.layout,
                min(segment.start, stop),
                segment.nbytes,
                _Maker(segment, stop, self._unpack),
            )
            if taken is None:
                break
            node = taken
            if node.payload.states is not None and node.end == stop:
                states.add(stop)
        if node is None:
            return 0
        mark.states = frozenset(states)
        mark.stop = node.end
        part = self._part_of(node)
        mark.part = part if all(self._part_of(n) == part for n in node.path()) else ""
        with self.cache.lock:
            for above in node.path():
                above.stored = mark
        self.writer.know(mark)
        self.hits += 1
        self.restored_tokens += max(0, load.length - load.restorable)
        self.writer.do(lambda store: store.touch(load.numbers))
        return load.length

    def is_worth(self, nbytes: int, tokens: int) -> bool:
        """Whether reading so many bytes is faster than reading so many tokens anew.

        Both rates are measured; while one of them is not, it is tried.
        """
        if not self.prefill_rate or not self.reader.rate:
            return True
        return nbytes / self.reader.rate < tokens / self.prefill_rate

    def measure_prefill(self, tokens: int, seconds: float) -> None:
        """A chunk of a prompt took so long."""
        if tokens >= MEASURED_TOKENS and seconds > 0:
            rate = tokens / seconds
            self.prefill_rate = (self.prefill_rate + rate) / 2 or rate

    def _set_aside(self, entry: Entry) -> None:
        def job(store: DiskStore) -> None:
            self.writer._gone(store.drop_spoiled(entry))

        self.writer.do(job)

    # -- from any thread ---------------------------------------------------------------
    def flush(self, seconds: float) -> int:
        """Have everything written, for so long; returns how many paths were left.

        The thread that computes goes on meanwhile, and hands over what waits there.
        """
        deadline = time.monotonic() + seconds
        while (self._notes or self._replies) and time.monotonic() < deadline:
            if self.writer.reads_only:
                return 0  # what is another server's to keep
            time.sleep(0.02)
        self.writer.flush(max(0.0, deadline - time.monotonic()))
        return len(self._notes) + self.writer.pending

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
            store.forget_replies()
            done.set()

        self._notes.clear()
        self._replies.clear()
        self.writer.forget_all()
        self.writer.do(job)
        if not done.wait(seconds):
            raise OSError(
                "the disk was not cleared: another server writes, or it fails"
            )
        return len(gone)

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
            self.writer._gone(store.forget(chosen))

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
            "disk_pending_paths": len(self._notes) + self.writer.pending,
            "disk_pending_bytes": self.writer.pending_bytes,
            "disk_pending_most_bytes": self.writer.most_pending_bytes,
            "disk_queue_max_bytes": self.writer.max_bytes,
            "disk_written_entries": counts.entries,
            "disk_written_bytes": counts.written_bytes,
            "disk_write_faults": counts.failures,
            "disk_refused_entries": counts.refused,
            "disk_spoiled_entries": store.spoiled,
            "disk_restores": self.hits,
            "disk_restored_tokens": self.restored_tokens,
            "disk_declined_loads": self.reader.declined,
            "disk_read_faults": self.reader.failures,
            "disk_timeouts": self.timeouts,
            "disk_found": self.found,
        }

    def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Hand over and write what waits, for so long, and let the folder go.

        Call on the thread that computes, when no request is left.
        """
        if self.cache.tier is None:
            return
        deadline = time.monotonic() + seconds
        self.tick()
        while self._notes and time.monotonic() < deadline:
            self._tried_at = -1
            self.tick()
            if self._notes:
                self.writer.flush(min(1.0, seconds))
            if self.writer.reads_only:
                self._notes.clear()
        self._closed = True
        self.cache.tier = None
        notes, paths = len(self._notes), self.writer.pending
        left = self.writer.close(max(0.0, deadline - time.monotonic()))
        if notes or left:
            say_left(notes + paths, left, seconds)
        self.reader.close()
        try:
            self.store.close()
        except FAULTS as fault:
            logger.warning("The disk cache was not closed: %s", fault)


class _Maker:
    """Builds a segment when the cache has room for it."""

    def __init__(self, segment: HostSegment, stop: int, unpack: Any):
        self.segment, self.stop, self.unpack = segment, stop, unpack

    def __call__(self, start: int, with_states: bool) -> Segment:
        at_end = with_states and self.stop == self.segment.stop
        if start == self.stop:
            states = to_states(self.segment) if at_end else None
            return Segment(0, [], states)
        return to_segment(self.segment.cut(start, self.stop), self.unpack, at_end)


def say_left(paths: int, nbytes: int, seconds: float) -> None:
    """One line on what is lost."""
    logger.warning(
        "Not written to disk in %.0f s: %d paths, %.1f MB; they will be read anew",
        *(seconds, paths, nbytes / 1e6),
    )


def _shaped(found: Found, part: Found | None, with_states: bool) -> HostSegment:
    """What is taken of a file, with another model's part that was kept later."""
    segment = found.segment
    return HostSegment(
        *(segment.start, segment.stop, segment.spans),
        segment.states if with_states else None,
        segment.part if part is None else part.segment.part,
    )


def _keep(replies: Sequence[tuple[str, bytes, bytes]], store: DiskStore) -> None:
    for reply in replies:
        store.keep_reply(*reply)


def _begins(path: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return path[: len(other)] == other


def _known(nodes: Sequence[Node]) -> Mark:
    """What the disk has of this path, as far as it is known."""
    states = frozenset(
        node.end
        for node in nodes
        if node.stored is not None
        and node.stored.alive
        and node.end in node.stored.states
    )
    for node in reversed(nodes):
        mark = node.stored
        if mark is not None and mark.alive:
            return Mark(min(mark.stop, node.end), states, mark.part)
    return Mark(0)


def _states_to_keep(nodes: Sequence[Node], early: bool) -> frozenset[int]:
    """Ends of the path's nodes whose states belong on disk and are not there.

    early: what ends the path is about to be superseded.
    """
    holding = [node for node in nodes if node.payload.states is not None]
    if early and holding[1:] and holding[-1] is nodes[-1]:
        holding.pop()
    return frozenset(
        node.end
        for place, node in enumerate(holding)
        if (place == 0 or not eviction.superseded(node))
        and not (
            node.stored is not None
            and node.stored.alive
            and node.end in node.stored.states
        )
    )


def _nbytes(node: Node, stored: int, states: frozenset[int]) -> int:
    """About how many bytes of a node go to disk."""
    lacking = node.end - max(node.start, min(stored, node.end))
    nbytes = node.nbytes * lacking // len(node.ids)
    return nbytes or (node.nbytes if node.end in states else 0)
