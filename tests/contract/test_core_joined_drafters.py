"""What two batches hold of their rows, side by side: caches, recurrent states, drafters' states."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_vlm.models.cache import ArraysCache, BatchKVCache

from mlx_vlm_cacheplus.core.draft_priming import PrimedRow
from mlx_vlm_cacheplus.core.joined_drafters import (
    LiveRows,
    RowFeatures,
    join_drafters,
    joined_entries,
    reason_apart,
)
from mlx_vlm_cacheplus.core.ragged_cache import HoledKVCache
from tests.contract.speculative_batches import (
    Batch,
    batch_cache,
    content,
    live,
    primer,
    read,
    single,
)


@pytest.mark.parametrize("order", [1, -1])
def test_rows_of_any_length_stand_side_by_side(order):
    lengths = [(5, 3), (300,)][::order]
    numbers = [range(len(lengths[0])), range(len(lengths[1]))]
    caches = [batch_cache(*lengths[0]), batch_cache(*lengths[1], first=10)]
    (joined,) = joined_entries(
        caches[:1], caches[1:], live(*numbers[0]), live(*numbers[1])
    )
    want = [(row, length) for row, length in enumerate(lengths[0])]
    want += [(10 + row, length) for row, length in enumerate(lengths[1])]
    assert [read(joined, place) for place in range(3)] == want
    # What was given is as it was.
    assert [read(caches[0], p) for p in numbers[0]] == want[: len(lengths[0])]
    assert [read(caches[1], p) for p in numbers[1]] == want[len(lengths[0]) :]


def test_rows_that_have_ended_are_left_behind():
    caches = batch_cache(5, 9, 3), batch_cache(4, 7, first=10)
    (joined,) = joined_entries(caches[:1], caches[1:], live(0, 2), live(1))
    assert [read(joined, place) for place in range(3)] == [(0, 5), (2, 3), (11, 7)]
    assert caches[0].batch_size == 3 and caches[1].batch_size == 2


def test_rows_go_on_from_where_they_were():
    (joined,) = joined_entries(
        [single(0, 4)], [batch_cache(6, first=1)], live(0), live(0)
    )
    new = mx.concatenate([content(0, 5)[:, :, 4:], content(1, 7)[:, :, 6:]])
    joined.update_and_fetch(new, new)
    assert [read(joined, place) for place in range(2)] == [(0, 5), (1, 7)]


def test_rows_with_holes_join_as_rows_without():
    holed = HoledKVCache.of(batch_cache(6, 4))
    new = mx.concatenate([content(0, 9)[:, :, 6:], content(1, 7)[:, :, 4:]])
    holed.update_and_fetch(new, new)
    holed.prepare(right_padding=[2, 0])
    holed.finalize()
    want = [(0, 7), (1, 7), (10, 5)]
    for order in (1, -1):
        given = [(holed, live(0, 1)), (batch_cache(5, first=10), live(0))][::order]
        (mine, own), (theirs, other) = given
        (joined,) = joined_entries([mine], [theirs], own, other)
        assert type(joined) is BatchKVCache
        assert sorted(read(joined, place) for place in range(3)) == want
        assert holed.has_holes, "what was given is as it was"


def test_recurrent_states_stand_side_by_side():
    def states(*values):
        cache = ArraysCache(2)
        cache.cache = [mx.array(values)[:, None], mx.array(values)[:, None] * 10]
        return cache

    a, b = states(1.0, 2.0), states(3.0)
    a.left_padding = mx.array([0, 2])
    (joined,) = joined_entries([a], [b], live(1), live(0))
    assert joined.cache[0].tolist() == [[2.0], [3.0]]
    assert joined.cache[1].tolist() == [[20.0], [30.0]]
    assert joined.left_padding.tolist() == [2, 0]
    assert a.cache[0].tolist() == [[1.0], [2.0]] and a.left_padding.tolist() == [0, 2]


def test_context_drafters_keep_a_cache_for_each_row():
    class Context(SimpleNamespace):
        def reset(self, target):
            return "fresh"

    def batch(first, lengths, accepted):
        rows = [PrimedRow([f"cache {first + row}"]) for row in range(len(lengths))]
        drafter = Context(accept_lens=[], draft_lens=[], make_cache=None)
        features = mx.arange(len(lengths) * 4, dtype=mx.float32).reshape(-1, 4, 1)
        return Batch(
            first,
            lengths,
            accepted,
            draft_kind="dflash",
            draft_model=drafter,
            verified_features=[features, features + 100],
            primer=primer(drafter, rows),
        )

    a, b = batch(0, (5, 9), (1, 2)), batch(10, (7,), (3,))
    features, install = join_drafters(LiveRows.of(a), LiveRows.of(b))
    assert features.shape == (3, 4, 2)
    assert [features[row : row + 1].shape[1] for row in range(3)] == [2, 3, 4]
    assert features[1:2].tolist() == [[[4.0, 104.0], [5.0, 105.0], [6.0, 106.0]]]
    install()
    assert a.draft_model.reset(None) == "fresh"
    handed = [a.draft_model.make_cache() for _ in range(3)]
    assert handed == [["cache 0"], ["cache 1"], ["cache 10"]]


def test_features_are_taken_row_by_row():
    features = RowFeatures([mx.zeros((1, 2, 3)), mx.ones((1, 5, 3))])
    assert features.shape == (2, 5, 3)
    assert mx.array_equal(features[1:2], mx.ones((1, 5, 3)))


def test_features_that_nobody_noted():
    batch = Batch(0, (5,), (1,), draft_kind="dflash")
    assert reason_apart(batch) == "its drafter's features are not known"
