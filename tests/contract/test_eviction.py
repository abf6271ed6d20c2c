"""What goes first when bytes are short."""

from __future__ import annotations

import sys
from collections import Counter

from mlx_vlm_cacheplus.core import eviction
from mlx_vlm_cacheplus.core.segment_tree import Lease, SegmentTree


class Part:
    """A payload of one byte a token, and ten for its end state."""

    def __init__(self, tokens, state=False):
        self.tokens = tokens
        self.states = [object()] if state else None

    @property
    def nbytes(self):
        return self.tokens + (10 if self.states else 0)

    def split(self, at):
        tail = Part(self.tokens - at)
        tail.states = self.states
        return Part(at), tail

    def drop(self):
        self.states = None


def grow(tree, ids, now, state=False):
    """Add a path's new span, and touch the path."""
    node = tree.insert(ids, Part(len(ids) - tree.match(ids).length, state))
    for passed in node.path():
        passed.last_use = now
    return node


def lose(*trees, count=None):
    """The order of losses, each named by the end and last token of its node."""
    order = []
    for kind, tree, node in eviction.losses(trees):
        order.append((kind, node.end, node.ids[-1]))
        if kind == "state":
            tree.update(node, Part.drop)
        else:
            tree.remove(node)
        tree.check_invariants()
        if count is not None and len(order) == count:
            break
    return order


def test_the_least_recently_used_leaf_goes_first_and_a_shared_prefix_last():
    tree = SegmentTree()
    grow(tree, (1, 2), 1)
    grow(tree, (1, 2, 3), 2)
    grow(tree, (1, 2, 4), 4)
    grow(tree, (1, 2, 5), 3)
    assert lose(tree) == [
        ("leaf", 3, 3),
        ("leaf", 3, 5),
        ("leaf", 3, 4),
        ("leaf", 2, 2),
    ]


def test_superseded_states_go_before_any_leaf_and_the_newest_stays():
    tree = SegmentTree()
    for n in (1, 2, 3):
        grow(tree, tuple(range(n)), n, state=True)
    grow(tree, (9,), 0)
    # Touched together by the last commit, so the deeper of the superseded ones goes first.
    assert lose(tree, count=3) == [("state", 2, 1), ("state", 1, 0), ("leaf", 1, 9)]
    assert [n.payload.states is not None for n in tree.match((0, 1, 2)).nodes] == [
        False,
        False,
        True,
    ]


def test_a_state_where_conversations_part_is_not_superseded_until_one_branch_is_left():
    tree = SegmentTree()
    grow(tree, (1,), 1, state=True)
    grow(tree, (1, 2), 2, state=True)
    grow(tree, (1, 3), 3, state=True)
    assert lose(tree) == [
        ("leaf", 2, 2),
        ("state", 1, 1),
        ("leaf", 2, 3),
        ("leaf", 1, 1),
    ]


def test_a_state_whose_successor_has_gone_is_superseded_no_more():
    tree = SegmentTree()
    grow(tree, (1,), 1, state=True)
    leaf = grow(tree, (1, 2), 1, state=True)
    found = eviction.losses([tree])
    leaf.payload.drop()
    kind, _, node = next(found)
    assert (kind, node) == ("leaf", leaf)


def test_what_is_leased_stays_and_so_do_its_ancestors():
    tree = SegmentTree()
    grow(tree, (1,), 1)
    leased = grow(tree, (1, 2), 2)
    grow(tree, (1, 2, 3), 3)
    grow(tree, (7,), 9)
    lease = Lease(leased)
    assert lose(tree) == [("leaf", 3, 3), ("leaf", 1, 7)]
    lease.release()
    assert lose(tree) == [("leaf", 2, 2), ("leaf", 1, 1)]


def test_trees_compete_by_use():
    one, two = SegmentTree(), SegmentTree()
    grow(one, (1,), 1)
    grow(two, (2,), 2)
    grow(one, (3,), 3)
    assert lose(one, two) == [("leaf", 1, 1), ("leaf", 1, 2), ("leaf", 1, 3)]


def test_a_segment_that_stores_nothing_goes_before_what_stores_something():
    tree = SegmentTree()
    grow(tree, (1,), 1)
    bare = grow(tree, (2,), 2)
    bare.payload.tokens = 0
    kind, _, node = next(eviction.losses([tree]))
    assert (kind, node) == ("leaf", bare)


def path_with_states(count):
    tree = SegmentTree()
    node = None
    for n in range(1, count + 1):
        node = grow(tree, tuple(range(n)), n, state=True)
    return tree, node


def test_a_path_keeps_its_first_state_and_the_newest():
    _, leaf = path_with_states(12)
    surplus = eviction.surplus_states(leaf.path(), keep=8)
    assert [node.end for node in surplus] == [2, 3, 4, 5]


def test_no_surplus_among_few_states():
    _, leaf = path_with_states(8)
    assert eviction.surplus_states(leaf.path(), keep=8) == []


def test_states_where_conversations_part_are_no_surplus():
    tree, leaf = path_with_states(12)
    grow(tree, (0, 1, 99), 20)
    surplus = eviction.surplus_states(leaf.path(), keep=8)
    assert [node.end for node in surplus] == [3, 4, 5, 6]


def test_however_many_places_were_left_the_newest_states_stay():
    tree, leaf = path_with_states(20)
    for n in range(2, 15):
        grow(tree, (*range(n), 99), 30)
    surplus = eviction.surplus_states(leaf.path(), keep=8)
    assert [node.end for node in surplus] == [15, 16]


def test_eviction_of_thousands_of_segments_is_not_quadratic():
    def calls(count):
        tree = SegmentTree()
        for n in range(count):
            grow(tree, (n, 1), n)
        made = Counter()
        sys.setprofile(lambda frame, event, arg: made.update([event]))
        try:
            lost = [tree.remove(node) for _, _, node in eviction.losses([tree])]
        finally:
            sys.setprofile(None)
        assert len(lost) == count
        return made["call"] + made["c_call"]

    assert calls(5000) < 11 * calls(500)
