"""Reads paths from a disk store ahead of the requests that want them.

One thread looks a prompt up in the index and reads what continues it into host memory,
checked, of each file what is of use.  Whoever waits for it waits for a bounded time; while the medium hangs, others
do not wait at all.  What is spoiled is a miss.
"""

from __future__ import annotations

import functools
import json
import logging
import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .disk_ahead import Ahead
from .disk_format import from_sections, path_name
from .disk_index import COMPANION, SPAN, Entry, is_broken
from .disk_plan import Plan, Wanted, state_ends, wanted_of
from .disk_sections import STATE as STATES
from .disk_sections import Head
from .disk_segment import HostSegment
from .disk_store import DiskStore, Spoiled

logger = logging.getLogger(__name__)

STATE_LAYER = ("state",)
# What a file's head says, and the sections that were read.
Sections = tuple[Head, dict[str, memoryview]]


@dataclass
class Found:
    """One entry that was read.

    Attributes:
        stop: tokens of the path that are of use.
        segment: what was read of its file.
    """

    entry: Entry
    stop: int
    segment: HostSegment


@dataclass(eq=False)
class Load:
    """What the store has of one prompt.

    Attributes:
        held: tokens of the prompt that are in RAM; ``restorable`` of them already.
        entries: what was read, in the order of the path.
        length: tokens that can be restored with them; 0 for no more than before.
        numbers: all entries of the path, those that were not read too.
        done: set when there is nothing to wait for.
    """

    ids: tuple[int, ...]
    salt: int
    held: int
    restorable: int
    layout: tuple = ()
    entries: list[Found] = field(default_factory=list)
    length: int = 0
    numbers: frozenset[int] = frozenset()
    nbytes: int = 0
    abandoned: bool = False
    since: float = field(default_factory=time.monotonic)
    done: threading.Event = field(default_factory=threading.Event)


class DiskReader:
    """See the module's text.

    Args:
        identity: of the roots that are read.
        worth: whether it is worth it to read so many bytes for so many tokens.
        knows: whether another model of that name is here, so that its parts are read.
        spoiled: told of entries that are not what was written.
        broken: told that the index is not.
        max_bytes: what may be held for requests that wait.
    """

    def __init__(
        self,
        store: DiskStore,
        identity: str,
        worth: Callable[[int, int], bool],
        knows: Callable[[str], bool],
        spoiled: Callable[[Entry], None],
        broken: Callable[[], None],
        max_bytes: int,
    ):
        self.store, self.identity = store, identity
        self.rate = 0.0
        self.declined = self.failures = 0
        self._worth, self._knows, self._max_bytes = worth, knows, max_bytes
        self._spoiled, self._broken = spoiled, broken
        self._loads: deque[Load] = deque()
        self._current: Load | None = None
        # Whoever gives a load up need not say so.
        self._held: weakref.WeakSet[Load] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._closing = False
        self._said = False
        self._thread = threading.Thread(
            target=self._run, name="disk-reader", daemon=True
        )
        self._thread.start()

    def hangs(self, seconds: float) -> bool:
        """Whether a read has taken longer than this and is not back yet."""
        with self._changed:
            current = self._current
        return current is not None and time.monotonic() - current.since > seconds

    def ask(self, load: Load) -> None:
        """Read this ahead."""
        with self._changed:
            self._loads.append(load)
            self._changed.notify_all()

    def release(self, load: Load) -> None:
        """Nobody waits for this any more, or what it brought was taken."""
        load.abandoned = True
        load.entries = []
        with self._changed:
            self._held.discard(load)
            if load in self._loads:
                self._loads.remove(load)
            self._changed.notify_all()

    def close(self) -> None:
        """End; loads that were not begun are misses."""
        with self._changed:
            self._closing = True
            for load in self._loads:
                load.done.set()
            self._loads.clear()
            self._changed.notify_all()
        self._thread.join(1.0)

    # -- the thread --------------------------------------------------------------------
    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._closing or self._next()):
                    self._changed.wait()
                if self._closing:
                    return
                load = self._current = self._loads.popleft()
                load.since = time.monotonic()
                self._held.add(load)
            try:
                self._read(load)
                self._said = False
            except (OSError, sqlite3.Error, ValueError) as fault:
                self._say(fault)
                if is_broken(fault):
                    self._broken()
            except Exception as fault:
                logger.warning("Not read from disk: %s", fault, exc_info=True)
            finally:
                load.done.set()
                with self._changed:
                    self._current = None
                    if load.abandoned:
                        self._held.discard(load)
                del load

    def _next(self) -> bool:
        """Whether the first load may begin: what others wait with is not too much."""
        held = sum(load.nbytes for load in self._held)
        return bool(self._loads) and (not held or held < self._max_bytes)

    def _say(self, fault: BaseException) -> None:
        self.failures += 1
        if not self._said:
            self._said = True
            logger.warning("Nothing is read from disk while this lasts: %s", fault)

    # -- one prompt --------------------------------------------------------------------
    def _read(self, load: Load) -> None:
        plan = self._plan(load)
        if plan is None:
            return
        if not self._worth(plan.nbytes, plan.length - load.restorable):
            self.declined += 1
            return
        began = time.perf_counter()
        ahead = Ahead(self._fetch, plan.wanted, plan.nbytes)
        try:
            for number, wanted in enumerate(plan.wanted):
                if load.abandoned:
                    return
                fetch = functools.partial(ahead.take, number)
                segment = self._open(load, plan, wanted, fetch)
                if segment is None:
                    break
                load.entries.append(Found(wanted.entry, wanted.stop, segment))
                load.nbytes += wanted.nbytes
        finally:
            ahead.stop()
        self._measure(load.nbytes, time.perf_counter() - began)
        load.layout, load.numbers = plan.layout, plan.numbers
        load.length = self._restorable(load, plan)

    def _plan(self, load: Load) -> Plan | None:
        """The root that takes the prompt furthest, if that is further than RAM does."""
        best = None
        for number, text in self.store.roots(self.identity, load.salt):
            try:
                layout = to_layout(text)
            except ValueError:
                continue  # a damaged row
            spans = self.store.walk(number, load.ids[:-1])
            extra = [
                entry
                for entry in self.store.supplements([span for span, _ in spans])
                if entry.kind != COMPANION or self._knows(entry.companion)
            ]
            length = spans[-1][1] if spans else 0
            if STATE_LAYER in layout:
                length = max(state_ends(spans, extra), default=0)
            if length > max(load.restorable, best.length if best else 0):
                wanted = wanted_of(spans, extra, load.held, length, self._knows)
                numbers = frozenset(span.number for span, _ in spans)
                root = (self.identity, load.salt, text)
                best = Plan(layout, length, wanted, numbers, root)
        return best

    def _fetch(self, wanted: Wanted) -> Sections:
        """In any thread: the index is not asked."""
        return self.store.read_sections(wanted.entry, wanted.sections)

    def _open(
        self, load: Load, plan: Plan, wanted: Wanted, fetch: Callable[[], Sections]
    ) -> HostSegment | None:
        entry = wanted.entry
        try:
            segment = from_sections(*fetch())
            ids = load.ids[: entry.stop]
            if wanted.stop < entry.stop:
                ids = (*load.ids[: entry.start], *self.store.ids_of(entry))
            if segment.metadata["path"] != path_name(ids, repr(plan.root)):
                raise Spoiled(f"{entry.name} belongs to another path")
        except (Spoiled, ValueError) as fault:
            logger.warning("Set aside, and read again by the model: %s", fault)
            self._spoiled(entry)
            return None
        return segment

    def _restorable(self, load: Load, plan: Plan) -> int:
        """How far one gets with what was read, or with the last state on the way."""
        if len(load.entries) == len(plan.wanted):
            return plan.length
        spans = [found for found in load.entries if found.entry.kind == SPAN]
        if STATE_LAYER not in plan.layout:
            reached = max([load.held, *(found.stop for found in spans)])
            return reached if reached > load.restorable else 0
        for found in reversed(spans):
            entry = found.entry
            if not load.restorable < found.stop == entry.stop or not entry.has_state:
                continue
            if found.segment.states is None:
                # What lies beyond could not be read, so that it is of use after all.
                wanted = Wanted(entry, found.stop, frozenset({STATES}))
                fetch = functools.partial(self._fetch, wanted)
                only = self._open(load, plan, wanted, fetch)
                states = None if only is None else only.states
                found.segment = replace(found.segment, states=states)
            if found.segment.states is not None:
                return entry.stop
        return 0

    def _measure(self, nbytes: int, seconds: float) -> None:
        if nbytes and seconds > 0:
            rate = nbytes / seconds
            self.rate = rate if not self.rate else (self.rate + rate) / 2


def to_layout(text: str) -> tuple:
    """A layout from its text in the store."""
    return _tuples(json.loads(text))


def layout_text(layout: Sequence[Any]) -> str:
    """A layout as text."""
    return json.dumps(layout, separators=(",", ":"))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
