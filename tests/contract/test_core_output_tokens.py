"""Ledgers of decoding rows and their commit; batch, caches and coordinator are played by plain objects."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_vlm_cacheplus.core import output_tokens as core


class Coordinator:
    """Writes down what it is asked to commit."""

    def __init__(self, answer=True):
        self.answer = answer
        self.commits = []

    def commit(self, prompt_cache, ids, *, batch_idx=None, extra_hash=0):
        if isinstance(self.answer, Exception):
            raise self.answer
        self.commits.append((list(ids), batch_idx, extra_hash))
        return self.answer


class Layer:
    """A cache entry that knows the length of each row."""

    def __init__(self, *lengths):
        self.offset = mx.array(lengths) if len(lengths) > 1 else lengths[0]


def make_row(coordinator, ids=(1, 2, 3, 4, 5), prompt_len=3, extra_hash=0):
    return core.OutputRow(coordinator, list(ids), prompt_len, extra_hash)


def make_batch(rows, cache=(), **more):
    return SimpleNamespace(
        uids=list(rows), output_rows=dict(rows), prompt_cache=list(cache), **more
    )


def open_rows(**fields):
    defaults = {
        "uids": [7, 8],
        "_apc_coordinator": Coordinator(),
        "_apc_meta": [{"full_input_ids": [1, 2], "extra_hash": 9}, None],
    }
    return core.open_rows(SimpleNamespace(**{**defaults, **fields}))


def test_a_ledger_starts_as_the_whole_prompt_under_its_salt():
    rows = open_rows()
    assert list(rows) == [7]
    assert (rows[7].ids, rows[7].prompt_len, rows[7].extra_hash) == ([1, 2], 2, 9)


def test_a_ledger_owns_its_ids():
    ids = [1, 2]
    open_rows(_apc_meta=[{"full_input_ids": ids}, None])[7].ids.append(3)
    assert ids == [1, 2]


@pytest.mark.parametrize(
    "fields",
    [{"_apc_coordinator": None}, {"_apc_harvest_enabled": False}, {"_apc_meta": None}],
)
def test_without_prefix_cache_there_is_no_ledger(fields):
    assert open_rows(**fields) == {}


def test_a_speculative_batch_gets_no_ledger():
    batch = SimpleNamespace(is_speculative=True)
    core.attach_rows(batch, {1: make_row(Coordinator())})
    assert core.rows_of(batch) == {}


def test_a_step_enters_what_it_fed_under_the_right_row():
    rows = {7: make_row(None, [1], 1), 9: make_row(None, [2], 1)}
    batch = make_batch(rows)
    batch.uids = [7, 8, 9]
    result = core.step_recorded(batch, lambda: ([10, 11, 12], None))
    assert result == ([10, 11, 12], None)
    assert (rows[7].ids, rows[9].ids) == ([1, 10], [2, 12])


def test_a_torn_step_forgets_every_ledger():
    batch = make_batch({7: make_row(Coordinator()), 8: make_row(Coordinator())})

    def torn():
        raise RuntimeError("half of the layers have run")

    with pytest.raises(RuntimeError, match="half of the layers"):
        core.step_recorded(batch, torn)
    assert core.rows_of(batch) == {}


def test_rows_that_join_bring_their_ledgers():
    one, two = make_row(None, [1]), make_row(None, [2])
    batch, other = make_batch({1: one}), make_batch({2: two})
    core.merge_rows(batch, other)
    assert core.rows_of(batch) == {1: one, 2: two}


def test_only_rows_that_end_are_committed_each_at_its_own_index():
    coordinator = Coordinator()
    rows = {
        uid: make_row(coordinator, [uid, 2, 3, 4, 5], extra_hash=uid)
        for uid in (7, 8, 9)
    }
    batch = make_batch(rows, [Layer(5, 5, 5)])
    core.commit_ended_rows(batch, [1])
    assert coordinator.commits == [
        ([7, 2, 3, 4, 5], 0, 7),
        ([9, 2, 3, 4, 5], 2, 9),
    ]
    assert list(core.rows_of(batch)) == [8]
    assert rows[9].committed == 5 and rows[9].reason is None
    assert rows[8].committed == 0


def test_nothing_is_committed_while_every_row_stays():
    coordinator = Coordinator()
    batch = make_batch({7: make_row(coordinator)}, [Layer(5)])
    core.commit_ended_rows(batch, [0])
    assert coordinator.commits == [] and list(core.rows_of(batch)) == [7]


@pytest.mark.parametrize(
    "cache",
    [
        [Layer(5), Layer(4)],
        [Layer(5), Layer(6)],
        [Layer(4), Layer(4)],
        [],
        [SimpleNamespace(caches=(Layer(5), Layer(4)))],
        [(Layer(5), Layer(4))],
    ],
    ids=["behind", "ahead", "all behind", "none", "inside a list", "inside a tuple"],
)
def test_layers_that_disagree_store_nothing(cache):
    coordinator = Coordinator()
    row = make_row(coordinator)
    core.commit_row(row, cache, 0)
    assert coordinator.commits == []
    assert row.committed == 0 and row.reason


def test_the_length_that_counts_is_the_rows_own():
    coordinator = Coordinator()
    cache = [Layer(9, 5)]
    core.commit_row(make_row(coordinator), cache, 0)
    core.commit_row(make_row(coordinator), cache, 1)
    assert [index for _, index, _ in coordinator.commits] == [1]


def test_layers_without_a_length_cannot_object():
    coordinator = Coordinator()
    row = make_row(coordinator)
    recurrent = SimpleNamespace(state=[1])
    core.commit_row(row, [recurrent, Layer(5), Layer(0)], 0)
    assert row.committed == 5 and row.reason is None


def test_a_cache_that_holds_nothing_anywhere_is_not_stored():
    coordinator = Coordinator()
    row = make_row(coordinator)
    core.commit_row(row, [Layer(0), Layer(0)], 0)
    assert coordinator.commits == []
    assert row.committed == 0 and row.reason


def test_a_commit_that_raises_is_a_reason_not_an_error(caplog):
    row = make_row(Coordinator(RuntimeError("disk on fire")))
    core.commit_row(row, [Layer(5)], 0)
    assert row.committed == 0 and row.reason == "RuntimeError: disk on fire"
    assert "disk on fire" in caplog.text


def test_a_commit_that_is_refused_is_a_reason():
    row = make_row(Coordinator(answer=False))
    core.commit_row(row, [Layer(5)], 0)
    assert row.committed == 0 and "no room" in row.reason


def test_a_row_that_wrote_nothing_is_not_committed_again():
    coordinator = Coordinator()
    row = make_row(coordinator, [1, 2, 3], 3)
    core.commit_row(row, [Layer(3)], 0)
    assert coordinator.commits == [] and row.reason


def test_rows_are_committed_once_when_the_generator_raises():
    coordinator = Coordinator()
    batch = make_batch({7: make_row(coordinator)}, [Layer(5)])
    with (
        pytest.raises(ValueError),
        core.rows_survive_errors(SimpleNamespace(_generation_batch=batch)),
    ):
        raise ValueError("another row's prefill")
    assert coordinator.commits == [([1, 2, 3, 4, 5], 0, 0)]
    core.commit_ended_rows(batch, [])
    assert len(coordinator.commits) == 1


def test_a_join_that_failed_half_way_stores_no_row_that_is_torn():
    """Some layers hold the newcomer, some do not: own rows keep index and length."""
    coordinator = Coordinator()
    batch = make_batch({7: make_row(coordinator)}, [Layer(5, 3), Layer(5)])
    batch.uids.append(8)
    with (
        pytest.raises(ValueError),
        core.rows_survive_errors(SimpleNamespace(_generation_batch=batch)),
    ):
        raise ValueError("extend")
    assert coordinator.commits == [([1, 2, 3, 4, 5], 0, 0)]
