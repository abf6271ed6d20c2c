"""What of the cache in RAM goes to disk: what the disk lacks of paths that have grown.

A mark on the nodes in RAM says what is there.  A path is looked at between two steps, on
the thread that computes, and handed to the writer if its queue has room.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Sequence

from . import eviction
from .disk_arrays import export_segments
from .disk_companions import CompanionNames
from .disk_parcel import Mark, Parcel, Reply
from .disk_reader import layout_text
from .disk_store import DiskStore
from .disk_writer import DiskWriter
from .segment_cache import SegmentCache
from .segment_tree import Node

logger = logging.getLogger(__name__)

# Paths that wait for room in the queue.
MOST_NOTES = 256


class Spill:
    """See the module's text.

    Args:
        identity: what the cache's arrays depend on.

    Attributes:
        notes: salt and ids of paths that have grown, the oldest first, and whether what
            ends them is about to be superseded.
        replies: what ended since something was handed over.
    """

    def __init__(
        self,
        cache: SegmentCache,
        writer: DiskWriter,
        identity: str,
        companions: CompanionNames,
    ):
        self.cache, self.writer, self.identity = cache, writer, identity
        self.companions = companions
        self.notes: dict[tuple[int, tuple[int, ...]], bool] = {}
        self.replies: deque[Reply] = deque(maxlen=MOST_NOTES)
        self._tried_at = -1

    def note(self, salt: int, ids: Sequence[int], early: bool) -> None:
        """This path has grown; it takes the place of what it goes on from.

        early: its end state is about to be superseded.
        """
        path = tuple(ids)
        for note, before in list(self.notes.items()):
            # A reply's end state that still waits is not the next prompt's to drop.
            if note[0] == salt and _begins(path, note[1]) and before >= early:
                del self.notes[note]
        self.notes[int(salt), path] = early
        while len(self.notes) > MOST_NOTES:
            del self.notes[next(iter(self.notes))]
        self._tried_at = -1

    def hand_over(self, again: bool = False) -> None:
        """Hand over what was noted, as far as the queue has room; waits for nobody.

        Args:
            again: though nothing was written since the last time.
        """
        if self.replies and not self.notes:
            self.writer.do(functools.partial(_keep, self._take_replies()))
        tried_at = -1 if again else self._tried_at
        if not self.notes or tried_at == self.writer.counts.parcels:
            return
        self._tried_at = self.writer.counts.parcels
        if self.writer.reads_only:
            self.writer.do(lambda store: None)  # has the other server gone?
            return
        for (salt, ids), early in list(self.notes.items()):
            try:
                if not self._spill(salt, ids, early):
                    return
            except Exception as error:
                logger.warning("Not kept on disk: %s", error, exc_info=True)
            self.notes.pop((salt, ids), None)

    def clear(self) -> None:
        """Forget what waits."""
        self.notes.clear()
        self.replies.clear()

    def _take_replies(self) -> tuple[Reply, ...]:
        taken = tuple(self.replies)
        self.replies.clear()
        return taken

    def _spill(self, salt: int, ids: tuple[int, ...], early: bool) -> bool:
        """Hand over what the disk lacks of a path; False where the queue is full."""
        with self.cache.lock:
            layout, nodes = self._path(salt, ids)
            if not nodes:
                return True
            known = _known(nodes)
            stop = nodes[-1].end
            states = _states_to_keep(nodes, early)
            part = self.companions.of(nodes[-1])
            renewed = part if known.part != part else ""
            if known.stop >= stop and not states and not renewed:
                return True
            taken = [
                node
                for node in nodes
                if node.end > known.stop
                or node.end in states
                or (renewed and self.companions.of(node) == renewed)
            ]
            nbytes = sum(_nbytes(node, known.stop, states) for node in taken)
            if not self.writer.has_room(nbytes):
                return False
            parts = export_segments(
                [(node.start, node.payload) for node in taken],
                known.stop,
                states,
                self.companions.pack,
            )
            everywhere = all(self.companions.of(node) == part for node in nodes)
            mark = Mark(stop, known.states | states, part if everywhere else "")
            turns = tuple(turn for node in nodes for turn in node.turns)
            for node in nodes:
                node.stored = mark
        root = (self.identity, salt, layout_text(layout))
        about = (turns, self._session(nodes), self._take_replies())
        self.writer.put(Parcel(root, ids[:stop], parts, mark, nbytes, *about))
        return True

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


def _keep(replies: Sequence[Reply], store: DiskStore) -> None:
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

    early: what ends the path is about to be superseded; the first state stays.
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
