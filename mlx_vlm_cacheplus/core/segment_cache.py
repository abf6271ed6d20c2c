"""The prefix cache that stands on segment trees.

One :class:`SegmentCache` belongs to one storage manager, so to one model, adapter and
cache policy.  It has a tree for each salt: nothing is shared across salts.  It finds
the longest restorable prefix of a prompt, restores it, takes in what a prefill or a
reply has added, and stays within its budget of bytes.

A length is restorable if the path to it holds every sliceable layer and, where the
model has other layers, the segment that ends there holds their end states.

All array work runs on the caller's thread, the generation thread.  The lock covers
the trees, which other threads read for statistics.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import eviction, segments
from .segment_tree import Lease, Match, Node, SegmentTree

logger = logging.getLogger(__name__)


@dataclass
class Hit:
    """A prefix that can be restored.

    Attributes:
        path: the segments that hold it, root first.
        length: its length in tokens; the last segment may reach further.
        lease: keeps the path until the request has taken in what it added.
    """

    path: list[Node]
    length: int
    lease: Lease


class SegmentCache:
    """See the module's text.

    Args:
        max_bytes: the budget.
        make_room: called with a number of bytes before they are stored; evicts, and
            says whether they fit.  The default knows no limit but the budget.
    """

    def __init__(self, max_bytes: int, make_room: Callable[[int], bool] | None = None):
        self.max_bytes = max_bytes
        self.lock = threading.RLock()
        self.evictions = 0
        self.refusals = 0
        self._make_room = make_room or self._evict_for
        self._trees: dict[int, SegmentTree] = {}
        self._layouts: dict[int, tuple] = {}
        self._clock = itertools.count(1)

    # -- reading ---------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        """Bytes of all segments, each counted once."""
        with self.lock:
            return sum(tree.nbytes for tree in self._trees.values())

    def match(self, ids: Sequence[int], salt: int) -> Match:
        """How far a prompt follows what is known under its salt."""
        with self.lock:
            tree = self._trees.get(salt)
            return Match((), 0) if tree is None else tree.match(ids)

    def find(
        self, ids: Sequence[int], salt: int, usable: Callable[[int], bool]
    ) -> Hit | None:
        """The longest restorable prefix that leaves at least one token to compute.

        Args:
            usable: whether a prefix of that many tokens may be used (media).
        """
        with self.lock:
            found = self.match(ids[:-1], salt)
            for length, count in self._restorable(found, salt):
                if usable(length):
                    path = list(found.nodes[:count])
                    self._touch(path)
                    return Hit(path, length, Lease(path[-1]))
        return None

    def peek(self, ids: Sequence[int], salt: int) -> int:
        """Length that ``find`` would restore if every length were usable."""
        with self.lock:
            found = self.match(ids[:-1], salt)
            return next((length for length, _ in self._restorable(found, salt)), 0)

    def restore(
        self, hit: Hit, salt: int, template: Sequence[Any], capacity: int
    ) -> list[Any]:
        """Build the single-row cache of a hit; the caller owns it."""
        with self.lock:
            path = hit.path[-1].path()
            parts = [node.payload for node in path]
            layout = self._layouts[salt]
        return segments.restore(parts, hit.length, layout, template, capacity)

    def _restorable(self, found: Match, salt: int) -> Iterator[tuple[int, int]]:
        """Restorable lengths of a match with the number of its nodes, longest first."""
        needs_state = segments.STATE in self._layouts.get(salt, ())
        if not needs_state and found.length:
            yield found.length, len(found.nodes)
            return
        for count, node in reversed(list(enumerate(found.whole_nodes(), 1))):
            if node.payload.states is not None:
                yield node.end, count

    # -- writing ---------------------------------------------------------------
    def commit(
        self,
        ids: Sequence[int],
        salt: int,
        prompt_cache: Sequence[Any],
        row: int,
        *,
        with_state: bool = True,
    ) -> bool:
        """Take in what a row's cache holds for ``ids`` and the tree does not.

        Args:
            ids: all tokens that the row's layers have processed.
            prompt_cache: the live cache; borrowed, only new tokens are copied.
            row: the row's place in it.
            with_state: False where the other layers are not at the end of ``ids``.

        Returns:
            Whether the tree now holds ``ids``.
        """
        layout = segments.layout_of(prompt_cache)
        with_state = with_state and segments.STATE in layout
        with self.lock:
            tree = self._tree(salt, layout)
            found = tree.match(ids)
            lease = Lease(found.nodes[-1]) if found.nodes else None
            try:
                if not self._room_for(ids, found, prompt_cache, row):
                    self.refusals += 1
                    return False
                node = self._grow(tree, ids, found, prompt_cache, row)
                if with_state and node.payload.states is None:
                    self._keep_state(tree, node, prompt_cache, row)
                self._touch(node.path())
                self._tidy(tree, node)
            finally:
                if lease is not None:
                    lease.release()
            return True

    def _grow(
        self,
        tree: SegmentTree,
        ids: Sequence[int],
        found: Match,
        prompt_cache: Sequence[Any],
        row: int,
    ) -> Node:
        if found.length == len(ids):
            node = tree.node_at(ids)
            assert node is not None
            return node
        spans = segments.capture_span(prompt_cache, row, found.length, len(ids))
        segments.evaluate(spans)
        return tree.insert(ids, segments.Segment(len(ids) - found.length, spans))

    def _keep_state(
        self, tree: SegmentTree, node: Node, prompt_cache: Sequence[Any], row: int
    ) -> None:
        states = segments.capture_states(prompt_cache, row)
        if states is None:
            logger.warning("A layer has no snapshot contract; its state is not kept")
            return
        tree.update(node, lambda segment: segment.set_states(states))

    def _tidy(self, tree: SegmentTree, node: Node) -> None:
        """Drop the path's surplus states, then join short segments into their like.

        A parent joins while it is shorter than twice its child, so that each token is
        copied a number of times that grows with the logarithm of the path.
        """
        for surplus in eviction.surplus_states(node.path()):
            tree.update(surplus, lambda segment: segment.set_states(None))
        while True:
            parent = node.parent
            if (
                parent is None
                or parent.parent is None
                or len(parent.children) != 1
                or parent.payload.states is not None
                or parent.leases
                or len(parent.ids) >= 2 * len(node.ids)
            ):
                return
            tree.join(node)

    # -- budget ----------------------------------------------------------------
    def evict_to(self, target: int) -> int:
        """Drop what is least useful until ``target`` bytes remain; returns how many."""
        freed = 0
        with self.lock:
            while self.nbytes > target:
                loss = self._lose_one()
                if not loss:
                    break
                freed += loss
        return freed

    def clear(self) -> None:
        """Forget everything."""
        with self.lock:
            self._trees.clear()
            self._layouts.clear()

    def statistics(self) -> dict[str, int]:
        """Counts for the cache's statistics endpoint."""
        with self.lock:
            nodes = [node for tree in self._trees.values() for node in tree]
            return {
                "segments": len(nodes),
                "segment_tokens": sum(len(node.ids) for node in nodes),
                "end_states": sum(node.payload.states is not None for node in nodes),
                "leases": sum(node.leases for node in nodes),
                "segment_evictions": self.evictions,
                "segment_refusals": self.refusals,
            }

    def check_invariants(self) -> None:
        """Raise AssertionError where an invariant is broken."""
        for tree in self._trees.values():
            tree.check_invariants()

    def _room_for(
        self, ids: Sequence[int], found: Match, prompt_cache: Sequence[Any], row: int
    ) -> bool:
        """Make room for the new part of ``ids``; False, and nobody evicted, if the
        whole path would not fit the budget."""
        added = segments.span_nbytes(prompt_cache, len(ids) - found.length)
        added += segments.state_nbytes(prompt_cache)
        held = sum(node.nbytes for node in found.nodes)
        return held + added <= self.max_bytes and self._make_room(added)

    def _evict_for(self, nbytes: int) -> bool:
        self.evict_to(self.max_bytes - nbytes)
        return self.nbytes + nbytes <= self.max_bytes

    def _lose_one(self) -> int:
        candidates = [
            (pick, tree)
            for tree in self._trees.values()
            if (pick := eviction.next_to_go(tree)) is not None
        ]
        if not candidates:
            return 0
        (kind, node), tree = min(
            candidates, key=lambda c: (c[0][0] == "leaf", c[0][1].last_use)
        )
        self.evictions += 1
        if kind == "state":
            return -tree.update(node, lambda segment: segment.set_states(None))
        return tree.remove(node)

    def _tree(self, salt: int, layout: tuple) -> SegmentTree:
        """The tree of a salt; one of another layout cannot be continued."""
        if self._layouts.get(salt) != layout:
            self._trees[salt] = SegmentTree()
            self._layouts[salt] = layout
        return self._trees[salt]

    def _touch(self, path: Sequence[Node]) -> None:
        now = next(self._clock)
        for node in path:
            node.last_use = now
