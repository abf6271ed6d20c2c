"""What comes back from disk: asked for ahead, waited for so long, given to the cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .disk_arrays import to_segment, to_states
from .disk_companions import CompanionNames
from .disk_index import COMPANION, Entry
from .disk_parcel import Mark
from .disk_reader import DiskReader, Found, Load
from .disk_segment import HostPart, HostSegment
from .disk_store import DiskStore
from .disk_writer import DiskWriter
from .segment_cache import SegmentCache
from .segments import Segment

logger = logging.getLogger(__name__)

# Chunks shorter than this tell nothing about how fast prompts are read.
MEASURED_TOKENS = 32


class Intake:
    """See the module's text.

    Args:
        identity: what the cache's arrays depend on.
        max_bytes: what may be held for requests that wait.

    Attributes:
        has_more: whether the disk may hold what RAM does not.
        prefill_rate: tokens a second that the model reads; 0 while it is not known.
    """

    def __init__(
        self,
        cache: SegmentCache,
        store: DiskStore,
        writer: DiskWriter,
        identity: str,
        companions: CompanionNames,
        max_bytes: int,
    ):
        self.cache, self.store, self.writer = cache, store, writer
        self.companions = companions
        self.has_more = True
        self.prefill_rate = 0.0
        self.hits = self.restored_tokens = self.timeouts = 0
        self.reader = DiskReader(
            *(store, identity, self.is_worth, companions.knows),
            *(self._set_aside, self._look_at_index, max_bytes),
        )

    def ask(self, ids: Sequence[int], salt: int, limit: float) -> Load | None:
        """Have the disk looked at for a prompt that will be looked up later.

        Args:
            limit: seconds after which a read hangs.

        Returns:
            What to ``wait`` for, then ``adopt``; None where there is nothing to hope for.
        """
        if not self.has_more or not self.store.is_open or self.reader.hangs(limit):
            return None
        held = self.cache.match(ids, salt).length
        restorable = self.cache.peek(ids, salt)
        if restorable >= len(ids) - 1:
            return None
        load = Load(tuple(ids), int(salt), held, restorable)
        self.reader.ask(load)
        return load

    def wait(self, load: Load, seconds: float, limit: float) -> bool:
        """Whether a load has come, after so long at most; one that hangs has not to."""
        left = load.since + limit - time.monotonic()
        if load.done.wait(max(0.0, min(seconds, left))):
            return True
        if seconds < left and not self.reader.hangs(limit):
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
        parts = _parts(load.entries)
        for found in load.entries:
            if found.entry.kind == COMPANION:
                continue
            stop = min(found.stop, load.length)
            segment = replace(found.segment, part=parts.get(found.entry.number))
            taken = self.cache.adopt(
                ids[:stop],
                load.salt,
                load.layout,
                min(segment.start, stop),
                segment.nbytes,
                _Maker(segment, stop, self.companions.unpack),
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
        part = self.companions.of(node)
        mark.part = (
            part if all(self.companions.of(n) == part for n in node.path()) else ""
        )
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
            self.writer.gone(store.drop_spoiled(entry))

        self.writer.do(job, first=True)

    def _look_at_index(self) -> None:
        """Whoever writes finds it broken, and makes it anew."""
        self.writer.do(lambda store: store.check(), first=True)


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


def _parts(entries: Sequence[Found]) -> dict[int, HostPart]:
    """Another model's part of each span, by number; one that was kept later goes first."""
    parts: dict[int, HostPart] = {}
    for found in entries:
        entry, part = found.entry, found.segment.part
        if part is not None:
            parts[entry.parent if entry.kind == COMPANION else entry.number] = part
    return parts
