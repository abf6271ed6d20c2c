"""The prefix cache that stands on segment trees.

One :class:`SegmentCache` belongs to one storage manager, so to one model, adapter and
cache policy.  It has a tree for each salt and layout: nothing is shared across salts,
and rows whose layers are stored differently have nothing to share.  It finds the
longest restorable prefix of a prompt, restores it, takes in what a prefill or a reply
has added, and stays within its budget of bytes.

All array work runs on the caller's thread, the generation thread.  The lock covers
the trees, which other threads read for statistics.  It is never waited for by
``nbytes``, which the storage manager reads under a lock of its own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import eviction, segments
from .companions import CompanionSource, CompanionView, accompany
from .resumable import Hit, resumable
from .segment_layers import STATE, layout_of
from .segment_tier import Tier
from .segment_tree import Lease, Match, Node, SegmentTree, should_join

logger = logging.getLogger(__name__)


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
        self.stored_tokens = 0
        self.policy = eviction.Policy()
        self.tier: Tier | None = None
        self._make_room = make_room or self._evict_for
        self._trees: dict[tuple[int, tuple], SegmentTree] = {}
        self._clock = itertools.count(1)

    # -- reading ---------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        """Bytes of all segments, each counted once."""
        return sum(tree.nbytes for tree in list(self._trees.values()))

    def match(self, ids: Sequence[int], salt: int) -> Match:
        """How far a prompt follows what is known under its salt."""
        with self.lock:
            matches = [tree.match(ids) for _, tree in self._under(salt)]
        return max(matches, key=lambda match: match.length, default=Match((), 0))

    def find(
        self,
        ids: Sequence[int],
        salt: int,
        usable: Callable[[int], bool],
        companion: CompanionView | None = None,
    ) -> Hit | None:
        """The longest restorable prefix that leaves at least one token to compute.

        Args:
            usable: whether a prefix of that many tokens may be used (media).
            companion: another model that must be resumed with it; what it cannot
                resume is read again, so that it reads it too.
        """
        with self.lock:
            self.policy.asks(salt, functools.partial(self.match, ids, salt))
            found = self._longest(ids[:-1], salt, usable, companion)
            if found is None:
                return None
            length, node, layout = found
            self._touch(node.path())
            self.policy.restores(salt, length)
            return Hit(node, length, layout, node.payload.states, Lease(node))

    def peek(self, ids: Sequence[int], salt: int) -> int:
        """Length that ``find`` would restore if every length were usable."""
        with self.lock:
            found = self._longest(ids[:-1], salt, lambda length: True)
            return 0 if found is None else found[0]

    def restore(self, hit: Hit, template: Sequence[Any], capacity: int) -> list[Any]:
        """Build the single-row cache of a hit; the caller owns it."""
        with self.lock:
            path = hit.node.path()
            parts = [node.payload for node in path if node.start < hit.length]
        return segments.restore(
            parts, hit.length, hit.states, hit.layout, template, capacity
        )

    def _under(self, salt: int) -> list[tuple[tuple, SegmentTree]]:
        """The layouts and trees of a salt."""
        return [
            (layout, tree) for (of, layout), tree in self._trees.items() if of == salt
        ]

    def _longest(
        self,
        ids: Sequence[int],
        salt: int,
        usable: Callable[[int], bool],
        companion: CompanionView | None = None,
    ) -> tuple[int, Node, tuple] | None:
        found = [
            (length, node, layout)
            for layout, tree in self._under(salt)
            for length, node in resumable(tree.match(ids), layout, companion)
            if usable(length)
        ]
        return max(found, key=lambda f: f[0], default=None)

    # -- writing ---------------------------------------------------------------
    def commit(
        self,
        ids: Sequence[int],
        salt: int,
        prompt_cache: Sequence[Any],
        row: int,
        *,
        with_state: bool = True,
        companion: CompanionSource | None = None,
    ) -> bool:
        """Take in what a row's cache holds for ``ids`` and the tree does not.

        Args:
            ids: all tokens that the row's layers have processed.
            prompt_cache: the live cache; borrowed, only new tokens are copied.
            row: the row's place in it.
            with_state: False where the other layers are not at the end of ``ids``.
            companion: what another model holds of the row; segments that lack it get
                their part.

        Returns:
            Whether the tree now holds ``ids``.
        """
        if not ids:
            return False
        layout = layout_of(prompt_cache)
        with_state = with_state and STATE in layout
        with self.lock:
            tree = self._tree(salt, layout)
            found = tree.match(ids)
            with _kept(found):
                state = segments.state_nbytes(prompt_cache) if with_state else 0
                size = functools.partial(_span_nbytes, prompt_cache, companion)
                whole = size(len(ids)) + state
                added = size(len(ids) - found.length) + state
                with self.policy.wants(salt, found, added):
                    leaving = found.nodes if with_state else ()
                    room = self._room_for(tree, whole, added, leaving, len(ids))
                if not room:
                    self.refusals += 1
                    return False
                if companion is not None:
                    self._fill_in(tree, found.whole_nodes(), companion)
                node = self._grow(tree, ids, found, prompt_cache, row, with_state)
                self._stored(salt, layout, tree, node)
                if companion is not None:
                    accompany(tree, node, companion)
                if with_state and node.payload.states is None:
                    self._keep_state(tree, node, prompt_cache, row)
                self.policy.stands(salt, node.path())
                self._tidy(tree, node)
                if self.tier is not None:
                    self.tier.grown(salt, ids, tree.needs_states)
            return True

    def adopt(
        self,
        ids: Sequence[int],
        salt: int,
        layout: tuple,
        start: int,
        nbytes: int,
        make: Callable[[int, bool], segments.Segment],
    ) -> Node | None:
        """Take in a segment that a slower tier kept, as if it had been committed.

        Args:
            ids: the path up to the segment's end.
            start: tokens of it before the segment; what the tree holds behind is left.
            nbytes: the segment's bytes, for which room is made.
            make: called with the first token that is wanted and whether the end's
                states are; returns a segment of the rest of the path.

        Returns:
            The node that ends with ``ids``; None where it cannot be taken in.
        """
        with self.lock:
            tree = self._tree(salt, layout)
            found = tree.match(ids)
            if found.length < start:
                return None
            with _kept(found):
                if not self._make_room(nbytes):
                    self.refusals += 1
                    return None
                if found.length < len(ids):
                    node = tree.insert(ids, make(found.length, tree.needs_states))
                else:
                    node = _end_of(tree, ids, found, tree.needs_states)
                    if tree.needs_states and node.payload.states is None:
                        states = make(len(ids), True).states
                        tree.update(node, lambda segment: segment.set_states(states))
            self._stored(salt, layout, tree, node)
            return node

    def _tree(self, salt: int, layout: tuple) -> SegmentTree:
        """The tree of a salt and layout; a new one is kept when something stands there."""
        known = self._trees.get((salt, layout))
        return known or SegmentTree(needs_states=STATE in layout)

    def _stored(self, salt: int, layout: tuple, tree: SegmentTree, node: Node) -> None:
        self._trees[salt, layout] = tree
        self._touch(node.path())

    def _grow(
        self,
        tree: SegmentTree,
        ids: Sequence[int],
        found: Match,
        prompt_cache: Sequence[Any],
        row: int,
        with_state: bool,
    ) -> Node:
        """The node that holds ``ids``; it ends there if a state is to be kept."""
        if found.length < len(ids):
            new = len(ids) - found.length
            spans = segments.capture_span(prompt_cache, row, found.length, len(ids))
            self.stored_tokens += new
            return tree.insert(ids, segments.Segment(new, spans))
        return _end_of(tree, ids, found, with_state)

    def _fill_in(
        self, tree: SegmentTree, known: Sequence[Node], companion: CompanionSource
    ) -> None:
        """Give segments that were stored without it the companion's part."""
        for node in known:
            if companion.wants(node.payload, node.start) and self._make_room(
                companion.span_nbytes(len(node.ids))
            ):
                accompany(tree, node, companion)

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
        path = node.path()
        for surplus in eviction.surplus_states(path):
            tree.update(surplus, lambda segment: segment.set_states(None))
        for lower in path:
            while (upper := lower.parent) is not None and should_join(upper, lower):
                tree.join(lower)

    # -- budget ----------------------------------------------------------------
    def evict_to(self, target: int) -> int:
        """Drop what is least useful until ``target`` bytes remain; returns how many."""
        with self.lock:
            held = before = self.nbytes
            nodes = (node for tree in self._trees.values() for node in tree)
            if held <= target and all(node.nbytes for node in nodes):
                return 0
            for kind, tree, node in self.policy.losses(self._trees.values(), target):
                if held <= target and node.nbytes:
                    break
                if kind == "state":
                    held += tree.update(node, lambda segment: segment.set_states(None))
                else:
                    held -= tree.remove(node)
                self.evictions += 1
            self.drop_empty()
            self._lost()
        return before - held

    def _lost(self) -> None:
        if self.tier is not None:
            self.tier.shrunk()

    def drop_empty(self) -> None:
        """Forget the trees that hold nothing."""
        self._trees = {key: t for key, t in self._trees.items() if t.root.children}

    def clear(self) -> None:
        """Forget everything."""
        with self.lock:
            for tree in self._trees.values():
                tree.clear()
            self._trees = {}
            self.policy.cleared()
            self._lost()

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
        self,
        tree: SegmentTree,
        whole: int,
        added: int,
        path: Sequence[Node],
        stop: int,
    ) -> bool:
        """Make room for ``added`` bytes; False, and nobody evicted, if the ``whole``
        path with one end state would not fit the budget.

        Args:
            path: nodes whose own states a new one, at ``stop`` tokens, follows.
        """
        if whole > self.max_bytes:
            return False
        if self._make_room(added):
            return True
        # All that is left to go are the path's own states.
        for node in path:
            if node.payload.states is not None and node.end < stop:
                tree.update(node, lambda segment: segment.set_states(None))
                if self._make_room(added):
                    return True
        return False

    def _evict_for(self, nbytes: int) -> bool:
        self.evict_to(self.max_bytes - nbytes)
        return self.nbytes + nbytes <= self.max_bytes

    def _touch(self, path: Sequence[Node]) -> None:
        now = next(self._clock)
        for node in path:
            node.last_use = now
            node.born = node.born or now


@contextlib.contextmanager
def _kept(found: Match) -> Iterator[None]:
    """What a match has found stays while room is made."""
    lease = Lease(found.nodes[-1]) if found.nodes else None
    try:
        yield
    finally:
        if lease is not None:
            lease.release()


def _end_of(
    tree: SegmentTree, ids: Sequence[int], found: Match, with_state: bool
) -> Node:
    """The node in which a path that is there ends; its own end if a state is kept."""
    node = tree.node_at(ids) if with_state else found.nodes[-1]
    assert node is not None
    return node


def _span_nbytes(
    prompt_cache: Sequence[Any], companion: CompanionSource | None, tokens: int
) -> int:
    nbytes = segments.span_nbytes(prompt_cache, tokens)
    return nbytes if companion is None else nbytes + companion.span_nbytes(tokens)
