"""Two speculative batches become one at a round boundary: rows, drafters, ledgers, draws."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_vlm_cacheplus.core import speculative_merge as core
from mlx_vlm_cacheplus.core.joined_drafters import reason_apart, shown_of_target
from tests.contract.speculative_batches import (
    DIM,
    Batch,
    always,
    generator_of,
    read,
    sampled,
)

__all__ = ["always"]


def test_two_batches_become_one():
    a, b = Batch(0, (5, 9), (1, 2), ended=[0]), Batch(10, (7,), (3,))
    drafters = a.draft_model, b.draft_model
    generator = generator_of(a, b)
    core.join_batches(generator)
    assert generator.speculative_batches == [a] and a.closed and b.closed
    assert a.uids == a._all_uids == [1, 10] and a._finished == [False, False]
    assert [read(a.prompt_cache[0], place) for place in range(2)] == [(1, 9), (10, 7)]
    assert a.first_tokens.tolist() == [51, 60]
    assert mx.allclose(a.hidden[:, 0, 0], mx.array([1.2, 10.3]))
    assert a.max_tokens == [20, 30] and a._num_tokens == [4, 14]
    assert a.drafted.active == [0, 1] and a.drafted.bonus == {0: 51, 1: 60}
    assert not a.drafted.accepted and a._rounds_iter is None
    assert [row.entries for row in a.primer.rows] == [9, 7]
    assert len(b) == 0 and b.prompt_cache == [] and b._rounds_iter is None
    assert a.draft_model is drafters[0]
    assert a.draft_model.reset(None) is a.draft_model._cache
    held = a.draft_model._cache[0]
    assert [read(held, place) for place in range(2)] == [(1, 8), (10, 6)]
    assert a.draft_model._seed_token.tolist() == [[1], [10]]
    assert a.draft_model._next_position.tolist() == [9, 7]
    assert a.draft_model.accept_lens == [3] * 32


def test_a_joined_batch_takes_another():
    a, b, c = Batch(0, (5,), (1,)), Batch(10, (7,), (3,)), Batch(20, (4,), (0,))
    generator = generator_of(a, b, c)
    c._rounds_iter = None
    core.join_batches(generator)
    assert generator.speculative_batches == [a, c]
    a.draft_model.reset(None)
    a.draft_model.verified_hidden = mx.zeros((2, 4, 1))
    a.drafted.accepted = {0: 0, 1: 0}
    a._rounds_iter, c._rounds_iter = (SimpleNamespace(close=x.close) for x in (a, c))
    core.join_batches(generator)
    assert generator.speculative_batches == [a] and a.uids == [0, 10, 20]
    assert [read(a.prompt_cache[0], p)[0] for p in range(3)] == [0, 10, 20]


def test_position_deltas_go_with_their_rows():
    deltas = [mx.array([[3], [4]]), mx.array([[7]])]
    a = Batch(0, (5, 9), (1, 2), ended=[0], _rope_deltas=deltas[0])
    b = Batch(10, (7,), (3,), _rope_deltas=deltas[1])
    core.join_batches(generator_of(a, b))
    assert a._rope_deltas.tolist() == [[4], [7]]


def test_an_assistant_is_shown_the_joined_caches_of_the_target():
    class Assistant(SimpleNamespace):
        def reset(self, target):
            self.accept_lens = []
            return "nothing of its own"

    def batch(first, lengths, accepted, **more):
        hidden = first + mx.arange(len(lengths) * 4.0).reshape(-1, 4, 1)
        drafter = Assistant(set_shared_kv=None, accept_lens=[2] * 40, draft_lens=[])
        layers = [SimpleNamespace(layer_type="full_attention")]
        model = SimpleNamespace(model=SimpleNamespace(layers=layers))
        fields = {"draft_model": drafter, "model": model, "primer": None, **more}
        return Batch(first, lengths, accepted, verified_features=[hidden], **fields)

    a, b = batch(0, (5, 9), (1, 2), ended=[0]), batch(10, (7,), (3,))
    core.join_batches(generator_of(a, b))
    assert a.uids == [1, 10] and a.hidden[:, 0, 0].tolist() == [6.0, 13.0]
    keys, values = a.shared_kv_states["full_attention"]
    assert keys.shape == values.shape == (2, 1, 9, DIM)
    assert a.draft_model.reset(None) == "nothing of its own"
    assert a.draft_model.accept_lens == [2] * 32
    c, d = (batch(20, (4,), (0,)) for _ in range(2))
    d.verified_features = None
    assert reason_apart(c) is None
    assert reason_apart(d) == "its drafter's features are not known"
    c.model.model.layers = []
    with pytest.raises(ValueError, match="not those that its drafter reads"):
        shown_of_target(c, c.prompt_cache)


def test_a_fault_in_what_is_reported_closes_no_loop(monkeypatch):
    def fail(_):
        raise RuntimeError("planted")

    a, b = Batch(0, (5,), (1,)), Batch(10, (7,), (3,))
    monkeypatch.setattr(core.batch_drafter, "report_back", fail)
    generator = generator_of(a, b)
    core.join_batches(generator)
    assert generator.speculative_batches == [a, b] and not (a.closed or b.closed)


def test_a_fault_leaves_both_as_they_were(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("planted")

    a, b = Batch(0, (5,), (1,)), Batch(10, (7,), (3,))
    before = [dict(vars(batch)) for batch in (a, b)]
    monkeypatch.setattr(core, "_joined_deltas", fail)
    generator = generator_of(a, b)
    core.join_batches(generator)
    assert generator.speculative_batches == [a, b] and not (a.closed or b.closed)
    assert vars(a) == before[0] and "reset" not in vars(a.draft_model)
    figures = a.draft_figures[0], b.draft_figures[10]
    assert [one.batching for one in figures] == ["turns"] * 2
    assert figures[0].batching_reason == "joining failed: planted"
    monkeypatch.undo()
    core.join_batches(generator)
    assert generator.speculative_batches == [a, b], "tried again at every step"
    assert caplog.text.count("Batches take turns: planted") == 1


def test_a_row_draws_where_it_stands():
    a, b = sampled((1, 0.5), (1, 0.5))
    core.join_batches(generator_of(a, b))
    assert core.row_numbers(a) == [0, 1] and core.tokens_left(a) == 17
    sampler = core.sampler_of(a)
    # The loop starts both at 1; they have drawn 4 and 14 tokens.
    drawn = sampler.sample_target(None, row_ids=[0, 1, 1], positions=[1, 1, 2])
    assert drawn == [(0, 4), (0, 14), (0, 15)]
    assert sampler.sample_proposal(None, row_ids=[1], positions=[3]) == [(0, 16)]
    assert sampler("log-probabilities") == "without a key"


def test_a_batch_that_never_joined_starts_as_before():
    a, _ = sampled((1, 0.5), (1, 0.5))
    assert core.row_numbers(a) == [0] and core.tokens_left(a) == 20
    assert core.sampler_of(a) is a.sampler


def test_one_batch_is_left_alone():
    a = Batch(0, (5,), (1,))
    for generator in (generator_of(a), generator_of(), SimpleNamespace()):
        core.join_batches(generator)
    assert not a.closed and a.draft_figures[0].batching is None
