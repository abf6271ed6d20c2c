"""What a segment stores of each kind of layer, and what that costs."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest
from mlx_vlm.apc import make_warm_batch_exact_cache_multi
from mlx_vlm.models.hy_v4.cache import HyV4KVCache
from mlx_vlm.models.unlimited_ocr.language import RingSlidingKVCache

from mlx_vlm_cacheplus.core import segments
from mlx_vlm_cacheplus.core.segment_cache import SegmentCache
from mlx_vlm_cacheplus.core.segment_layers import STATE, layout_of
from tests.fakes.token_caches import (
    LAYOUTS,
    Layout,
    arrays_of,
    bytes_of,
    count_calls,
    nodes_of,
)
from tests.fakes.token_layers import Dense, Quantized, Recurrent, Window, encode

ROOM = 1 << 40
DENSE = Layout((Dense(heads=2), Dense()))
HYBRID = LAYOUTS["hybrid"]


def always(length):
    return True


def commit(cache, layout, ids, **kwargs):
    return cache.commit(ids, 0, layout.row(ids), 0, **kwargs)


def restore(cache, layout, ids):
    hit = cache.find(ids, 0, always)
    return hit.length, cache.restore(hit, layout.fresh(), len(ids))


# -- cost ---------------------------------------------------------------------------
OPERATIONS = ("concatenate", "contiguous", "zeros", "eval", "slice_update")


def calls_of_restore(monkeypatch, tokens, parts=1):
    cache = SegmentCache(ROOM)
    ids = tuple(n % 50 for n in range(tokens))
    for part in range(1, parts + 1):
        commit(cache, HYBRID, ids[: tokens * part // parts])
    with monkeypatch.context() as patch:
        counts = count_calls(patch, OPERATIONS)
        length, _ = restore(cache, HYBRID, (*ids, 99))
    assert length == tokens
    return counts


def test_the_operations_of_a_restore_do_not_depend_on_tokens(monkeypatch):
    assert calls_of_restore(monkeypatch, 20) == calls_of_restore(monkeypatch, 2000)


def test_a_restore_is_one_concatenation_a_side_however_many_segments(monkeypatch):
    one, many = calls_of_restore(monkeypatch, 240), calls_of_restore(
        monkeypatch, 240, parts=6
    )
    assert one["concatenate"] == many["concatenate"] and many["eval"] == 1


def test_a_commit_copies_the_new_tokens_only(monkeypatch):
    cache = SegmentCache(ROOM)
    ids = tuple(range(400))
    commit(cache, DENSE, ids[:390])
    live = DENSE.row(ids)
    taken = []
    part = segments._part
    monkeypatch.setattr(
        segments,
        "_part",
        lambda a, start, stop: taken.append(stop - start) or part(a, start, stop),
    )
    assert cache.commit(ids, 0, live, 0)
    assert taken == [10] * 4


def test_committing_again_what_is_known_copies_nothing(monkeypatch):
    cache = SegmentCache(ROOM)
    live = DENSE.row(range(40))
    cache.commit(range(40), 0, live, 0)
    counts = count_calls(monkeypatch, ("contiguous", "concatenate", "eval"))
    assert cache.commit(range(40), 0, live, 0)
    assert set(counts.values()) == {0}


# -- memory -------------------------------------------------------------------------
WIDE = Layout((Dense(heads=4, dim=64), Dense(heads=1, dim=256), Recurrent()))


def settle():
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


def test_bytes_counted_are_the_bytes_held_and_all_come_back():
    base = settle()
    cache = SegmentCache(ROOM)
    for n in range(6):
        commit(cache, WIDE, (*range(100), *range(1000 * n, 1000 * n + 300)))
    held = settle() - base
    slack = 16_384 * len(arrays_of(cache))  # what a page or a shared buffer may add
    assert abs(held - cache.nbytes) <= slack and cache.nbytes > 4 * 6 * 300 * 256 * 4
    cache.evict_to(cache.nbytes // 2)
    assert abs(settle() - base - cache.nbytes) <= slack
    cache.clear()
    assert settle() - base <= 16_384


def test_a_stored_row_does_not_keep_its_batch_alive():
    base = settle()
    cache = SegmentCache(ROOM)
    live = WIDE.left_padded([tuple(range(500)), tuple(range(40)), tuple(range(300))])
    cache.commit(tuple(range(40)), 0, live, 1)
    del live
    assert settle() - base <= cache.nbytes + 16_384 * len(arrays_of(cache))


@pytest.mark.parametrize("work", ["split", "join"])
def test_neither_split_nor_join_holds_the_whole_twice(monkeypatch, work):
    monkeypatch.setattr(segments, "AT_ONCE", 1 << 20)
    layout = Layout((Dense(heads=2, dim=128),) * 8)
    cache = SegmentCache(ROOM)
    ids = tuple(range(2000))
    commit(cache, layout, ids)
    (tree,) = cache._trees.values()
    (node,) = tree
    if work == "join":
        tree.split(node, 1000)
    before = settle()
    mx.reset_peak_memory()
    tree.split(node, 1000) if work == "split" else tree.join(node)
    assert mx.get_peak_memory() - before <= cache.nbytes / 4
    cache.check_invariants()


@pytest.mark.parametrize(("at_once", "waits"), [(segments.AT_ONCE, 1), (1, 8)])
def test_small_layers_are_split_and_joined_together(monkeypatch, at_once, waits):
    """Each wait for the device is a stall of the rows that decode."""
    monkeypatch.setattr(segments, "AT_ONCE", at_once)
    layout = Layout((Dense(heads=2),) * 8)
    cache = SegmentCache(ROOM)
    commit(cache, layout, tuple(range(200)))
    (tree,) = cache._trees.values()
    (node,) = tree
    done, evaluate = [], mx.eval
    monkeypatch.setattr(mx, "eval", lambda *a: done.append(a) or evaluate(*a))
    tree.split(node, 100)
    tree.join(node)
    assert len(done) == 2 * waits
    cache.check_invariants()


# -- borrowing ----------------------------------------------------------------------
@pytest.mark.parametrize("name", LAYOUTS)
def test_borrowed_in_turn_stored_arrays_stay_bit_identical(name):
    layout = LAYOUTS[name]
    cache = SegmentCache(ROOM)
    a, b = (*range(1, 13), 20), (*range(1, 13), 30, 31)
    commit(cache, layout, a[:12])
    commit(cache, layout, a)
    commit(cache, layout, b)
    before = bytes_of(arrays_of(cache))
    for ids in (a, b, a, b):
        length, restored = restore(cache, layout, (*ids, 40))
        assert length == len(ids)
        layout.check(restored, ids)
        layout.feed(restored, [[41]])
        layout.feed(restored, [[42, 43]])
        for entry in restored:
            if (
                not isinstance(entry, tuple)
                and entry.is_trimmable()
                and not entry.empty()
            ):
                entry.trim(5)
        layout.feed(restored, [[44]])
        mx.eval(
            [
                v
                for e in restored
                if not isinstance(e, tuple)
                for v in vars(e).values()
                if isinstance(v, mx.array)
            ]
        )
        assert bytes_of(arrays_of(cache)) == before


def test_rows_merged_and_extended_leave_what_is_stored_alone():
    cache = SegmentCache(ROOM)
    a, b = tuple(range(1, 20)), tuple(range(1, 9))
    commit(cache, HYBRID, b)
    commit(cache, HYBRID, a)
    stored = arrays_of(cache)
    before = bytes_of(stored)
    rows = [restore(cache, HYBRID, (*ids, 99))[1] for ids in (a, b)]
    merged, _ = make_warm_batch_exact_cache_multi(rows, [len(a), len(b)])
    assert merged is not None
    HYBRID.feed(merged, [[50, 51], [52, 53]])
    assert cache.commit((*a, 50, 51), 0, merged, 0)
    assert cache.commit((*b, 52, 53), 0, merged, 1)
    assert bytes_of(stored) == before
    for ids, fed in ((a, (50, 51)), (b, (52, 53))):
        length, again = restore(cache, HYBRID, (*ids, *fed, 99))
        assert length == len(ids) + 2
        HYBRID.check(again, (*ids, *fed))
        _, older = restore(cache, HYBRID, (*ids, 98))
        HYBRID.check(older, ids)


# -- what a row holds ---------------------------------------------------------------
def test_layers_that_disagree_in_length_are_not_stored():
    """A buffer has room for more tokens than a layer holds, and zeros are not tokens."""
    cache = SegmentCache(ROOM)
    live = DENSE.row(range(10))
    live[1].trim(4)
    with pytest.raises(ValueError, match="holds 6 of 10 tokens"):
        cache.commit(tuple(range(10)), 0, live, 0)
    assert not nodes_of(cache)


def test_a_batch_that_is_behind_is_not_stored():
    live = DENSE.left_padded([(1, 2, 3), (4,)])
    with pytest.raises(ValueError, match="holds 1 of 2 tokens"):
        SegmentCache(ROOM).commit((4, 5), 0, live, 1)


def test_right_padding_that_is_pending_is_not_taken_for_tokens():
    cache = SegmentCache(ROOM)
    live = DENSE.right_padded([tuple(range(9)), (1, 2, 3)], 9)
    assert cache.commit((1, 2, 3), 0, live, 1)
    _, restored = restore(cache, DENSE, (1, 2, 3, 4))
    DENSE.check(restored, (1, 2, 3))


def test_a_longer_layer_gives_what_was_asked_for():
    """After a chunk that broke off, some layers are ahead."""
    cache = SegmentCache(ROOM)
    live = DENSE.row(range(10))
    live[0].update_and_fetch(*map(mx.array, encode([[77]], 2, 4)))
    assert cache.commit(tuple(range(10)), 0, live, 0)
    _, restored = restore(cache, DENSE, (*range(10), 99))
    DENSE.check(restored, range(10))


@pytest.mark.parametrize(
    ("tokens", "room"), [(10, 256), (256, 512), (300, 512), (511, 512), (512, 768)]
)
def test_a_restored_layer_has_the_room_of_a_cold_one(tokens, room):
    """A cold cache of ``tokens`` and the prompt's last one has this many places."""
    cache = SegmentCache(ROOM)
    ids = tuple(n % 97 for n in range(tokens))
    commit(cache, DENSE, ids)
    _, restored = restore(cache, DENSE, (*ids, 99))
    cold = DENSE.row((*ids, 99))
    assert restored[0].keys.shape == cold[0].keys.shape == (1, 2, room, 4)


def test_a_subclass_of_a_sliceable_layer_is_kept_whole_and_comes_back_as_itself():
    """What it inherited knows nothing of what it adds."""
    ring, hy = RingSlidingKVCache(window_size=4), HyV4KVCache()
    for layer in (ring, hy):
        layer.update_and_fetch(*map(mx.array, encode([range(1, 7)], 1, 4)))
    live = [ring, hy]
    assert layout_of(live) == (STATE, STATE)
    cache = SegmentCache(ROOM)
    assert cache.commit(tuple(range(1, 7)), 0, live, 0)
    hit = cache.find((*range(1, 7), 9), 0, always)
    back = cache.restore(hit, [RingSlidingKVCache(window_size=4), HyV4KVCache()], 8)
    assert [type(entry) for entry in back] == [RingSlidingKVCache, HyV4KVCache]
    assert [entry.offset for entry in back] == [6, 6]
    assert back[0].meta_state == ring.meta_state


def test_an_empty_slot_of_a_recurrent_layer_stays_empty():
    layout = Layout((Recurrent(both=False),))
    live = layout.left_padded([(1, 2, 3), (4, 5)])
    cache = SegmentCache(ROOM)
    assert cache.commit((4, 5), 0, live, 1)
    _, restored = restore(cache, layout, (4, 5, 6))
    layout.check(restored, (4, 5))


def test_a_window_in_the_middle_of_a_padded_prefill_is_this_rows():
    layout = Layout((Window(),))
    cache = SegmentCache(ROOM)
    ids = tuple(range(1, 12))
    live = layout.right_padded(
        [(*ids, *range(50, 60)), (*ids, 61, 62)], len(ids), chunk=4
    )
    assert cache.commit(ids, 0, live, 1)
    _, restored = restore(cache, layout, (*ids, 9))
    layout.check(restored, ids)


def test_bytes_of_one_row_are_measured_without_padding_or_room():
    live = WIDE.left_padded([(1,) * 50, (2,) * 10])
    whole = segments.Segment(
        10, segments.capture_span(live, 1, 0, 10), segments.capture_states(live, 1)
    )
    assert segments.span_nbytes(live, 10) + segments.state_nbytes(live) == whole.nbytes


# -- faults -------------------------------------------------------------------------
@pytest.mark.parametrize("work", ["split", "join"])
@pytest.mark.parametrize(
    ("at_once", "layer"), [(1, 0), (1, 1), (1, 2), (segments.AT_ONCE, 0)]
)
def test_after_a_fault_in_a_split_or_join_the_segments_are_whole(
    monkeypatch, work, at_once, layer
):
    layout = Layout((Dense(heads=2), Quantized(), Dense()))
    ids = tuple(range(10))
    cache = SegmentCache(ROOM)
    commit(cache, layout, ids)
    (tree,) = cache._trees.values()
    (node,) = tree
    if work == "join":
        tree.split(node, 4)
    calls = []
    evaluate = mx.eval
    monkeypatch.setattr(segments, "AT_ONCE", at_once)

    def failing(*arrays):
        calls.append(arrays)
        if len(calls) == layer + 1:
            raise RuntimeError("out of memory")
        evaluate(*arrays)

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            tree.split(node, 4) if work == "split" else tree.join(node)
    cache.check_invariants()
    for held in tree:
        layout.check_stored(held.payload, held.ids)
    _, restored = restore(cache, layout, (*ids, 99))
    layout.check(restored, ids)
