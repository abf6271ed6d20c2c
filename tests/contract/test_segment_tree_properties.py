"""Random histories of a segment cache against plain lists, on every cache layout.

The model is the list of what was committed.  After each step the trees must hold
their invariants and every stored array must hold the tokens of its span; whatever is
restored must be what a cold cache of these tokens has.
"""

from __future__ import annotations

import gc

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mlx_vlm_cacheplus.core.segment_cache import SegmentCache
from mlx_vlm_cacheplus.core.segment_tree import common_prefix
from tests.fakes.token_caches import LAYOUTS, Layout, arrays_of, bytes_of, nodes_of

ROOM = 1 << 40
# Few tokens, so that prompts share prefixes, leave the tree inside spans and come back.
TOKENS = st.integers(0, 2)
SPANS = st.lists(TOKENS, min_size=1, max_size=12)
# None keeps an earlier prompt whole, as most turns do.
CUTS = st.one_of(st.none(), st.integers(0, 99))
SHAPES = ("one row", "left padded", "right padded", "finalized")


class History(RuleBasedStateMachine):
    """What a server may do to its segment cache, in any order."""

    layout: Layout

    def __init__(self):
        super().__init__()
        self.cache = SegmentCache(ROOM)
        self.committed: list[tuple[int, tuple[int, ...]]] = []
        self.held: list[tuple] = []

    # -- the model ----------------------------------------------------------------
    def prompt(self, base: int, cut: int | None, more: list[int]) -> tuple[int, ...]:
        """An earlier prompt, cut somewhere and continued: extension, rewind, divergence."""
        known = self.committed[base % len(self.committed)][1] if self.committed else ()
        kept = len(known) if cut is None else cut % (len(known) + 1)
        return (*known[:kept], *more)

    def expected(self, ids: tuple[int, ...], salt: int) -> int:
        """The restorable length if nothing was dropped since it was committed."""
        known = [path for under, path in self.committed if under == salt]
        if self.layout.has_states:
            return max(
                (len(p) for p in known if p == ids[: len(p)] and len(p) < len(ids)),
                default=0,
            )
        return max((common_prefix(p, ids[:-1]) for p in known), default=0)

    @property
    def complete(self) -> bool:
        """Whether the cache still has all that the model has."""
        if any(
            self.cache.match(ids, salt).length < len(ids)
            for salt, ids in self.committed
        ):
            return False
        states = sum(node.payload.states is not None for node in nodes_of(self.cache))
        return not self.layout.has_states or states == len(set(self.committed))

    # -- steps --------------------------------------------------------------------
    @rule(
        base=st.integers(0, 99),
        cut=CUTS,
        more=SPANS,
        salt=st.integers(0, 1),
        shape=st.sampled_from(SHAPES),
        chunk=st.integers(0, 3),
    )
    def commit(self, base, cut, more, salt, shape, chunk):
        self.take_in(self.prompt(base, cut, more), salt, shape, chunk)

    @rule(again=st.integers(0, 99), shape=st.sampled_from(SHAPES))
    @precondition(lambda self: self.committed)
    def repeat(self, again, shape):
        salt, ids = self.committed[again % len(self.committed)]
        self.take_in(ids, salt, shape, 0)

    def take_in(self, ids, salt, shape, chunk):
        other = [5] * (len(ids) // 2 + 3)
        row = 0
        if shape == "one row":
            live = self.layout.row(ids, chunk)
        elif shape == "left padded":
            row, live = 1, self.layout.left_padded([other, ids, ids[:1]], chunk)
        elif shape == "right padded":
            # The other row's prefill goes on; this one's ends with this chunk.
            row, live = 1, self.layout.right_padded(
                [[*ids, *other], ids], len(ids), chunk
            )
        else:
            rows = [[*ids, *other], ids]
            row, live = 1, self.layout.finalize(
                self.layout.right_padded(rows, len(rows[0]), chunk)
            )
        # A recurrent layer has run over the right padding in one fake, not in a model.
        assert self.cache.commit(ids, salt, live, row)
        self.committed.append((salt, tuple(ids)))

    @rule(
        base=st.integers(0, 99),
        cut=CUTS,
        more=SPANS,
        salt=st.integers(0, 1),
        keep=st.booleans(),
    )
    def find(self, base, cut, more, salt, keep):
        ids = self.prompt(base, cut, more)
        complete = self.complete
        hit = self.cache.find(ids, salt, lambda length: True)
        length = hit.length if hit else 0
        assert length < len(ids)
        assert length <= self.expected(ids, salt)
        if complete:
            assert length == self.expected(ids, salt)
        if hit is None:
            return
        self.borrow(hit, ids, salt)
        if keep:
            self.held.append((hit, ids, salt))
        else:
            hit.lease.release()

    def borrow(self, hit, ids, salt):
        """Restore, then write on: what is stored must not change."""
        before = bytes_of(arrays_of(self.cache))
        restored = self.cache.restore(hit, self.layout.fresh(), len(ids))
        self.layout.check(restored, ids[: hit.length])
        self.layout.feed(restored, [ids[hit.length :]])
        self.layout.check(restored, ids)
        self.layout.feed(restored, [[7]])
        assert bytes_of(arrays_of(self.cache)) == before

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: self.held)
    def release(self, which):
        hit, _, _ = self.held.pop(which % len(self.held))
        hit.lease.release()
        hit.lease.release()

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: self.held)
    def restore_held(self, which):
        self.borrow(*self.held[which % len(self.held)])

    @rule(which=st.integers(0, 99), at=st.integers(0, 99))
    @precondition(lambda self: any(len(n.ids) > 1 for n in nodes_of(self.cache)))
    def split(self, which, at):
        tree, node = self.pick(which, lambda node: len(node.ids) > 1)
        tree.split(node, 1 + at % (len(node.ids) - 1))

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: any(map(joinable, nodes_of(self.cache))))
    def join(self, which):
        tree, node = self.pick(which, joinable)
        tree.join(node)

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: any(map(droppable, nodes_of(self.cache))))
    def drop_state(self, which):
        tree, node = self.pick(which, droppable)
        tree.update(node, lambda segment: segment.set_states(None))

    def pick(self, which, fits):
        found = [
            (tree, node)
            for tree in self.cache._trees.values()
            for node in tree
            if fits(node)
        ]
        return found[which % len(found)]

    @rule(percent=st.integers(0, 100))
    def evict(self, percent):
        before = self.cache.nbytes
        freed = self.cache.evict_to(before * percent // 100)
        assert self.cache.nbytes == before - freed
        if not self.held:
            assert self.cache.nbytes <= before * percent // 100

    @rule()
    def clear(self):
        self.cache.clear()
        self.committed.clear()
        assert self.cache.nbytes == 0

    # -- after each step ----------------------------------------------------------
    @invariant()
    def holds(self):
        self.cache.check_invariants()

    @invariant()
    def every_span_holds_its_tokens(self):
        for node in nodes_of(self.cache):
            self.layout.check_stored(node.payload, node.ids)

    @invariant()
    def every_end_state_is_that_of_its_path(self):
        for node in nodes_of(self.cache):
            path = [token for above in node.path() for token in above.ids]
            self.layout.check_states(node.payload, path)

    @invariant()
    def bytes_are_counted(self):
        assert self.cache.nbytes == sum(a.nbytes for a in arrays_of(self.cache))

    def teardown(self):
        for hit, _, _ in self.held:
            hit.lease.release()
        self.held.clear()
        gc.collect()
        assert self.cache.statistics()["leases"] == 0
        self.cache.evict_to(0)
        assert self.cache.nbytes == 0 and not nodes_of(self.cache)


def joinable(node):
    above = node.parent
    return (
        above.parent is not None
        and len(above.children) == 1
        and above.payload.states is None
        and not above.leases
    )


def droppable(node):
    return node.payload.states is not None and not node.leases


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_histories(name):
    run_histories(name, examples=12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LAYOUTS)
def test_many_random_histories(name):
    run_histories(name, examples=150)


def run_histories(name, examples):
    machine = type(
        "HistoryOf" + name.title().replace(" ", ""),
        (History,),
        {"layout": LAYOUTS[name]},
    )
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=15,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
