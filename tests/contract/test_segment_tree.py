"""The tree by itself: spans of token ids, with payloads that only count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_vlm_cacheplus.core.segment_cache import SegmentCache
from mlx_vlm_cacheplus.core.segment_tree import Lease, Node, SegmentTree, common_prefix
from tests.fakes.token_caches import Layout, nodes_of
from tests.fakes.token_layers import Dense, Recurrent

ROOM = 1 << 40


class Part:
    """A payload of one byte a token."""

    states = None

    def __init__(self, tokens):
        self.tokens = tokens

    @property
    def nbytes(self):
        return self.tokens

    def split(self, at):
        return Part(at), Part(self.tokens - at)

    def join(self, tail):
        return Part(self.tokens + tail.tokens)


def tree_of(*paths):
    tree = SegmentTree()
    for path in paths:
        tree.insert(path, Part(len(path) - tree.match(path).length))
    tree.check_invariants()
    return tree


def spans(tree):
    return sorted(node.ids for node in tree)


# -- finding and adding -------------------------------------------------------------
def test_a_prompt_leaves_the_tree_inside_a_span():
    tree = tree_of((1, 2, 3, 4))
    found = tree.match((1, 2, 9))
    assert (found.length, len(found.nodes), found.whole_nodes()) == (2, 1, [])


def test_an_empty_prompt_and_an_unknown_one_match_nothing():
    tree = tree_of((1, 2))
    assert tree.match(()).length == tree.match((9,)).length == 0


def test_a_divergence_splits_the_span():
    tree = tree_of((1, 2, 3, 4), (1, 2, 9))
    assert spans(tree) == [(1, 2), (3, 4), (9,)]
    assert tree.match((1, 2, 3, 7)).length == 3


def test_what_is_known_cannot_be_inserted_again():
    with pytest.raises(ValueError, match="nothing to insert"):
        tree_of((1, 2)).insert((1, 2), Part(0))


def test_node_at_gives_a_node_that_ends_there():
    tree = tree_of((1, 2, 3, 4))
    assert tree.node_at((1, 2)).end == 2
    assert tree.node_at((1, 2, 3, 4)).end == 4
    assert tree.node_at((1, 2, 9)) is None and tree.node_at((1, 2, 3, 4, 5)) is None
    tree.check_invariants()


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [
        ((), (), 0),
        ((1,), (), 0),
        ((1, 2), (1, 2), 2),
        ((1, 2), (1, 3), 1),
        ((1, 2), (1, 2, 3), 2),
    ],
)
def test_common_prefix(a, b, length):
    assert common_prefix(a, b) == length


@given(
    st.lists(st.integers(0, 2)),
    st.lists(st.integers(0, 2)),
    st.lists(st.integers(0, 2)),
)
def test_common_prefix_is_what_a_loop_finds(shared, a, b):
    a, b = (*shared, *a), (*shared, *b)
    loop = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
        min(len(a), len(b)),
    )
    assert common_prefix(a, b) == loop


# -- splitting and joining ----------------------------------------------------------
def test_a_split_keeps_leases_and_children_with_the_tail():
    tree = tree_of((1, 2, 3), (1, 2, 3, 4))
    node = tree.match((1, 2, 3)).nodes[0]
    lease = Lease(node)
    head = tree.split(node, 1)
    assert (head.ids, head.leases, node.ids, node.leases) == ((1,), 0, (2, 3), 1)
    assert node.path() == [head, node] and list(node.children) == [4]
    tree.check_invariants()
    lease.release()
    lease.release()
    assert node.leases == 0


@pytest.mark.parametrize("at", [0, 3, 4, -1])
def test_a_split_leaves_no_empty_span(at):
    tree = tree_of((1, 2, 3))
    with pytest.raises(ValueError, match="cannot split"):
        tree.split(next(iter(tree)), at)


def test_a_joined_node_takes_the_leases_of_its_parent():
    tree = tree_of((1, 2), (1, 2, 3))
    leaf = tree.match((1, 2, 3)).nodes[-1]
    leaf.parent.leases = 1
    tree.join(leaf)
    assert (leaf.ids, leaf.start, leaf.leases) == ((1, 2, 3), 0, 1)
    tree.check_invariants()


def test_a_node_with_brothers_or_at_the_root_cannot_join():
    tree = tree_of((1, 2), (1, 3))
    for node in tree:
        with pytest.raises(ValueError, match="single child"):
            tree.join(node)


def test_only_a_leaf_without_leases_is_removed():
    tree = tree_of((1, 2), (1, 2, 3))
    upper, leaf = tree.match((1, 2, 3)).nodes
    with pytest.raises(ValueError, match="only a leaf"):
        tree.remove(upper)
    lease = Lease(leaf)
    with pytest.raises(ValueError, match="only a leaf"):
        tree.remove(leaf)
    del lease
    assert tree.remove(leaf) == 1 and tree.nbytes == 2


# -- the check sees what it is for --------------------------------------------------
def break_span(tree, node):
    node.ids = ()


def break_start(tree, node):
    node.start += 1


def break_path(tree, node):
    node.parent.children[99] = node


def break_payload(tree, node):
    node.payload.tokens += 1


def break_bytes(tree, node):
    tree.nbytes += 1


def break_leases(tree, node):
    node.leases = -1


def break_second_path(tree, node):
    twin = Node(node.parent, node.ids, Part(len(node.ids)))
    node.parent.children[98] = twin
    tree.nbytes += twin.nbytes


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (break_span, "1: empty"),
        (break_start, "1: span does not follow"),
        (break_second_path, "2: two paths"),
        (break_payload, "3: payload"),
        (break_bytes, "4: "),
        (break_path, "4: "),
        (break_leases, "5: "),
    ],
)
def test_a_broken_invariant_is_detected(harm, says):
    tree = tree_of((1, 2, 3))
    harm(tree, next(iter(tree)))
    with pytest.raises(AssertionError, match=says):
        tree.check_invariants()


# -- the cache that stands on trees -------------------------------------------------
DENSE = Layout((Dense(heads=2),))
HYBRID = Layout((Dense(heads=2), Recurrent()))


def commit(cache, layout, ids, salt=0, **kwargs):
    return cache.commit(ids, salt, layout.row(ids), 0, **kwargs)


def always(length):
    return True


def test_nothing_is_shared_across_salts():
    cache = SegmentCache(ROOM)
    assert commit(cache, DENSE, (1, 2, 3), salt=1)
    assert cache.find((1, 2, 3, 4), 2, always) is None
    assert cache.find((1, 2, 3, 4), 1, always).length == 3


def test_at_least_one_token_is_left_to_compute():
    cache = SegmentCache(ROOM)
    commit(cache, DENSE, (1, 2, 3))
    assert cache.find((1, 2, 3), 0, always).length == 2
    assert cache.peek((1, 2, 3), 0) == 2
    assert cache.find((1,), 0, always) is None


def test_an_exact_repeat_of_a_dense_prompt_splits_nothing():
    cache = SegmentCache(ROOM)
    commit(cache, DENSE, (1, 2, 3, 4))
    commit(cache, DENSE, (1, 2))
    assert [node.ids for node in nodes_of(cache)] == [(1, 2, 3, 4)]


def test_a_state_is_kept_where_a_known_prompt_ends():
    cache = SegmentCache(ROOM)
    commit(cache, HYBRID, (1, 2, 3, 4))
    commit(cache, HYBRID, (1, 2))
    assert cache.find((1, 2, 9), 0, always).length == 2


def test_an_empty_commit_is_refused_quietly():
    assert not SegmentCache(ROOM).commit((), 0, DENSE.fresh(), 0)


def test_a_length_that_may_not_be_used_gives_way_to_a_shorter_one():
    cache = SegmentCache(ROOM)
    commit(cache, HYBRID, (1, 2))
    commit(cache, HYBRID, (1, 2, 3, 4))
    assert cache.find((1, 2, 3, 4, 5), 0, lambda length: length < 4).length == 2


def test_equal_appends_are_copied_a_logarithmic_number_of_times(monkeypatch):
    copied = [0]
    join = SegmentTree.join

    def counted(tree, node):
        copied[0] += len(node.parent.ids) + len(node.ids)
        join(tree, node)

    monkeypatch.setattr(SegmentTree, "join", counted)
    cache, turns, step = SegmentCache(ROOM), 64, 4
    for turn in range(1, turns + 1):
        commit(cache, DENSE, tuple(range(turn * step)))
    assert (
        copied[0] <= turns * step * 6
    )  # 64 = 2 ** 6; a copy each turn would be 32 a token
    assert len(nodes_of(cache)) <= 7


def test_a_long_conversation_of_a_hybrid_model_stays_short_in_segments():
    cache = SegmentCache(ROOM)
    for turn in range(1, 65):
        commit(cache, HYBRID, tuple(range(turn * 4)))
    assert cache.statistics()["end_states"] == 8
    # The kept states need a segment each; what lies between is merged.
    assert len(nodes_of(cache)) <= 8 + 7
    cache.check_invariants()


# -- layouts, leases, budgets -------------------------------------------------------
def test_rows_of_two_layouts_live_side_by_side():
    """As short rows in floating point and long ones that are quantized do."""
    cache = SegmentCache(ROOM)
    other = Layout((Dense(heads=1),))
    commit(cache, DENSE, (1, 2, 3))
    commit(cache, other, (1, 2, 3, 4))
    commit(cache, DENSE, (1, 2, 3, 5))
    hit = cache.find((1, 2, 3, 5, 6), 0, always)
    DENSE.check(cache.restore(hit, DENSE.fresh(), 5), (1, 2, 3, 5))
    hit = cache.find((1, 2, 3, 4, 6), 0, always)
    other.check(cache.restore(hit, other.fresh(), 5), (1, 2, 3, 4))


@pytest.mark.parametrize("harm", ["clear", "evict", "drop", "other layout"])
def test_a_hit_is_restored_whatever_happens_to_the_tree(harm):
    cache = SegmentCache(ROOM)
    commit(cache, HYBRID, (1, 2, 3))
    hit = cache.find((1, 2, 3, 4), 0, always)
    if harm == "clear":
        cache.clear()
    elif harm == "evict":
        cache.evict_to(0)
    elif harm == "drop":
        commit(cache, HYBRID, (1, 2, 3, 4))
        cache.evict_to(0)
        assert hit.node.payload.states is None
    else:
        commit(cache, DENSE, (1, 2, 3, 4))
    HYBRID.check(cache.restore(hit, HYBRID.fresh(), 8), (1, 2, 3))


def test_an_oversize_prompt_is_refused_and_evicts_nobody():
    cache = SegmentCache(10_000)
    commit(cache, DENSE, (1, 2, 3))
    before = cache.nbytes
    assert not commit(cache, DENSE, tuple(range(100, 400)))
    assert (cache.nbytes, cache.refusals, cache.evictions) == (before, 1, 0)


@pytest.mark.parametrize("budget", [0, -1])
def test_without_a_budget_nothing_is_kept(budget):
    cache = SegmentCache(budget)
    assert not commit(cache, HYBRID, (1, 2, 3))
    assert cache.nbytes == 0 and not nodes_of(cache)


def test_what_was_read_last_is_kept():
    one = SegmentCache(ROOM)
    commit(one, DENSE, tuple(range(10)))
    cache = SegmentCache(2 * one.nbytes)
    commit(cache, DENSE, tuple(range(10)))
    commit(cache, DENSE, tuple(range(20, 30)))
    cache.find(tuple(range(11)), 0, always).lease.release()
    commit(cache, DENSE, tuple(range(40, 50)))
    assert cache.match(tuple(range(10)), 0).length == 10
    assert cache.match(tuple(range(20, 30)), 0).length == 0


def test_end_states_alone_never_stop_a_conversation():
    """Its keys and values fit with one end state, not with all of them."""
    layout = Layout((Dense(), Recurrent()))
    probe = SegmentCache(ROOM)
    commit(probe, layout, tuple(range(12)))
    cache = SegmentCache(probe.nbytes)
    lease = None
    for end in (3, 6, 9, 12):
        ids = tuple(range(end))
        assert commit(cache, layout, ids), f"{end} tokens refused"
        assert cache.nbytes <= cache.max_bytes
        if lease is not None:
            lease.release()
        lease = cache.find((*ids, 99), 0, always).lease


def test_an_emptied_tree_leaves_nothing_behind():
    cache = SegmentCache(ROOM)
    for salt in range(20):
        commit(cache, DENSE, (1, 2, 3), salt=salt)
    cache.evict_to(0)
    assert cache._trees == {}


def test_bytes_can_be_read_while_a_commit_holds_the_lock():
    """The storage manager reads them under its own lock, which a commit may wait for."""
    import threading

    cache = SegmentCache(ROOM)
    read = []
    with cache.lock:
        reader = threading.Thread(target=lambda: read.append(cache.nbytes))
        reader.start()
        reader.join(5)
        assert read == [0], "reading the number of bytes waits for the lock"
