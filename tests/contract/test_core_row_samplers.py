"""How a request asks to be sampled, and how the rows of a batch are."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_vlm_cacheplus.core import row_samplers as core
from mlx_vlm_cacheplus.core.request_sampling import make_sampling
from mlx_vlm_cacheplus.core.row_samplers import Sampling, sample_best

generation = importlib.import_module("mlx_vlm.server.generation")
sample_utils = importlib.import_module("mlx_vlm.sample_utils")

VOCABULARY = 12


def logprobs_of(rows, seed=0):
    logits = mx.random.normal((rows, VOCABULARY), key=mx.random.key(seed))
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def stock_server(top_logprobs_k=3):
    server = generation.ResponseGenerator.__new__(generation.ResponseGenerator)
    server.top_logprobs_k = top_logprobs_k
    return server


def asked(**fields):
    return make_sampling(stock_server(), generation.GenerationArguments(**fields))


class Noting:
    """A sampler that says the same token for all rows, and notes what it is given."""

    def __init__(self, token):
        self.token, self.calls = token, []

    def sample_target(self, logprobs, *, row_ids, positions):
        self.calls.append((logprobs.tolist(), row_ids, positions))
        return mx.full((logprobs.shape[0],), self.token, dtype=mx.uint32)


class TestRequests:
    @pytest.mark.parametrize("seed", [None, 5])
    def test_greedy_requests_agree_whatever_else_they_say(self, seed):
        found = asked(temperature=0, seed=seed, top_p=0.3, min_p=0.2)
        assert found == Sampling(sample_best)

    def test_no_seed_is_the_default_seed(self):
        found = asked(temperature=1.0)
        assert found.key == asked(temperature=1.0, seed=0).key and not found.seeded
        other = asked(temperature=1.0, seed=4)
        assert other.seeded and other.key != found.key

    @pytest.mark.parametrize(
        "fields",
        [
            {"top_p": 0.5},
            {"top_k": 3},
            {"min_p": 0.1},
            {"top_n_sigma": 1.0},
            {"p_less": True},
            {"typical_p": 0.5},
            {"temperature": 0.5},
        ],
        ids=lambda fields: next(iter(fields)),
    )
    def test_every_setting_tells_requests_apart(self, fields):
        base = {"temperature": 1.0, "seed": 1}
        assert asked(**{**base, **fields}).key != asked(**base).key
        assert asked(**{**base, **fields}).key == asked(**{**base, **fields}).key

    def test_logprobs_do_not_tell_draws_apart(self):
        found = asked(temperature=0, logprobs=True)
        assert (found.key, found.logprobs, found.depth) == (None, True, 3)
        assert asked(temperature=0).depth == 0

    @pytest.mark.parametrize(
        "own, keep",
        [
            ({"top_n_sigma": 1.0}, lambda x: sample_utils.apply_top_n_sigma(x, 1.0)),
            ({"p_less": True}, lambda x: sample_utils.apply_p_less(x, 2.0)),
            ({"typical_p": 0.6}, lambda x: sample_utils.apply_typical_p(x, 0.6)),
            ({}, lambda x: x),
        ],
        ids=["top n sigma", "p less", "typical p", "none"],
    )
    @pytest.mark.parametrize("min_p", [0.0, 0.1])
    def test_filters_leave_what_make_sampler_leaves(self, own, keep, min_p):
        fields = {"temperature": 2.0, "top_p": 0.8, "top_k": 5, **own}
        found = asked(**fields, min_p=min_p).sampler
        logprobs = logprobs_of(1)
        left = keep(logprobs)
        if own:
            left = sample_utils.apply_top_p(left, 0.8)
        if min_p:
            left = sample_utils.apply_min_p(left, min_p)
        left = sample_utils.apply_top_k(left, 5)
        if not own:  # the server's own sampler takes top-p of what is tempered
            tempered = left / 2.0
            tempered -= mx.logsumexp(tempered, axis=-1, keepdims=True)
            left = sample_utils.apply_top_p(tempered, 0.8)
        allowed = {i for i, x in enumerate(left[0].tolist()) if x > -mx.inf}
        many = mx.repeat(logprobs, 600, axis=0)
        drawn = found.sample_target(many, row_ids=[0] * 600, positions=list(range(600)))
        assert set(drawn.tolist()) == allowed and len(allowed) < VOCABULARY

    @pytest.mark.parametrize("min_p", [-0.5, 0.0, 2.0])
    def test_a_min_p_that_is_none_filters_nothing(self, min_p):
        """As the server treats a top-p or typical-p out of range; it fails no request."""
        draw = asked(temperature=1.0, seed=1, min_p=min_p).sampler.sample_target
        plain = asked(temperature=1.0, seed=1).sampler.sample_target
        where = {"row_ids": [0] * 3, "positions": [1, 2, 3]}
        logprobs = logprobs_of(3)
        assert draw(logprobs, **where).tolist() == plain(logprobs, **where).tolist()

    @pytest.mark.parametrize("fields", [{"min_p": 0.1}, {"p_less": True}, {}])
    def test_a_draw_depends_on_seed_and_position_alone(self, fields):
        fields = {"temperature": 3.0, **fields}
        draw = asked(**fields, seed=3).sampler.sample_target
        logprobs = logprobs_of(3)
        where = {"row_ids": [0] * 3, "positions": [4, 9, 2]}
        together = draw(logprobs, **where).tolist()
        mx.random.normal((5,))
        for row, token in enumerate(together):
            own = {"row_ids": [0], "positions": [where["positions"][row]]}
            assert draw(logprobs[row : row + 1], **own).tolist() == [token]


class TestGroups:
    def test_each_group_is_sampled_once_and_all_stay_in_order(self):
        two, three = Noting(2), Noting(3)
        rows = [
            Sampling(three, key=("three",)),
            Sampling(two, key=("two",)),
            Sampling(sample_best),
            Sampling(three, key=("three",)),
        ]
        logprobs = logprobs_of(4)
        drawn = core.GroupedSampler(rows).sample_target(
            logprobs, row_ids=[10, 11, 12, 13], positions=[0, 1, 2, 3]
        )
        best = mx.argmax(logprobs[2]).item()
        assert drawn.tolist() == [3, 2, best, 3]
        (call,) = three.calls
        assert call == (logprobs[mx.array([0, 3])].tolist(), [10, 13], [0, 3])
        assert [call[1:] for call in two.calls] == [([11], [1])]

    def test_a_seeded_row_draws_what_it_draws_alone(self):
        rows = [asked(temperature=2.0, seed=seed, top_p=0.9) for seed in (1, 2, 1)]
        rows.insert(1, asked(temperature=0))
        logprobs, positions = logprobs_of(4), [5, 6, 7, 8]
        drawn = core.GroupedSampler(rows).sample_target(
            logprobs, row_ids=[0] * 4, positions=positions
        )
        for place, row in enumerate(rows):
            own = logprobs[place : place + 1]
            draw = getattr(row.sampler, "sample_target", None)
            alone = (
                draw(own, row_ids=[0], positions=[positions[place]])
                if draw
                else row.sampler(own)
            )
            assert drawn[place].item() == alone.item()


HOT = Sampling(Noting(1), key=(1,))
TOLD = Sampling(sample_best, logprobs=True, depth=2)
BEST = Sampling(sample_best)


def prompt_batch(*uids):
    return SimpleNamespace(uids=list(uids), greedy_sampling="the generator's")


def sampler_of(**rows):
    table = core.RowSamplers(sample_best)
    table.rows = {int(name[1:]): sampling for name, sampling in rows.items()}
    return table


class TestPromptBatches:
    def test_rows_that_agree_get_the_sampler_of_one(self):
        batch, table = prompt_batch(1, 2), sampler_of(u1=HOT, u2=HOT, u3=BEST)
        found = core.sample_prompt_rows(batch, table, True, 9)
        assert found == (HOT.sampler, False, 0)
        assert batch.greedy_sampling is False

    def test_greedy_rows_stay_greedy(self):
        batch, table = prompt_batch(2, 1), sampler_of(u1=BEST, u2=TOLD)
        found = core.sample_prompt_rows(batch, table, False, 0)
        assert found == (sample_best, True, 2)
        assert batch.greedy_sampling is True

    def test_rows_that_differ_are_grouped(self):
        batch, table = prompt_batch(1, 2), sampler_of(u1=BEST, u2=HOT)
        sampler, *_ = core.sample_prompt_rows(batch, table, False, 0)
        assert isinstance(sampler, core.GroupedSampler)
        assert batch.greedy_sampling is False

    @pytest.mark.parametrize("sampler", [sample_best, sampler_of(u7=HOT)])
    def test_rows_that_nobody_described_are_stocks(self, sampler):
        batch = prompt_batch(1)
        assert core.sample_prompt_rows(batch, sampler, True, 4) == (sampler, True, 4)
        assert batch.greedy_sampling == "the generator's"
        decoding = SimpleNamespace(uids=[1])
        core.hand_over_sampling(batch, decoding)
        core.settle_sampling(decoding)
        assert core.sampling_of(decoding) == {} and not hasattr(decoding, "sampler")


class TestDecodeBatches:
    def make(self, **rows):
        known = {int(name[1:]): sampling for name, sampling in rows.items()}
        return SimpleNamespace(uids=list(known), row_sampling=known)

    def test_rows_join_and_leave(self):
        batch, other = self.make(u1=BEST), self.make(u2=HOT, u3=TOLD)
        batch.uids += other.uids
        core.join_sampling(batch, other)
        assert isinstance(batch.sampler, core.GroupedSampler)
        assert (batch.greedy_sampling, batch.compute_logprobs) == (False, True)
        assert batch.top_logprobs_k == 2
        batch.uids = [1, 3]
        core.settle_sampling(batch)
        assert (batch.sampler, batch.greedy_sampling) == (sample_best, True)
        assert (batch.compute_logprobs, batch.top_logprobs_k) == (True, 2)
        batch._next_lps, batch._next_top_idx, batch._next_top_lp = (
            "kept",
            "kept",
            "kept",
        )
        core.settle_sampling(batch)
        assert batch._next_lps == batch._next_top_idx == batch._next_top_lp == "kept"
        batch.uids = [1]
        core.settle_sampling(batch)
        assert (batch.compute_logprobs, batch.top_logprobs_k) == (False, 0)
        assert batch._next_lps is batch._next_top_idx is batch._next_top_lp is None
        assert batch.row_sampling == {1: BEST}
        batch.uids = []
        core.settle_sampling(batch)
        assert batch.sampler is sample_best

    def test_log_probabilities_go_to_those_who_ask(self):
        responses = [
            SimpleNamespace(uid=uid, token_logprob=-1.0, top_logprobs=[(1, -1.0)])
            for uid in (1, 2, 3)
        ]
        core.hide_unasked({1: BEST, 2: TOLD}, responses)
        kept = [(r.token_logprob, r.top_logprobs) for r in responses]
        assert kept == [(0.0, None), (-1.0, [(1, -1.0)]), (-1.0, [(1, -1.0)])]


class TestNotes:
    def test_rows_are_known_before_they_are_admitted(self):
        generator = SimpleNamespace(has_pending_prompts=True, sampler=sample_best)
        core.note_sampling(generator, {1: {"sampling": HOT}, 2: {}})
        table = generator.sampler
        assert table.rows == {1: HOT}
        assert table(logprobs_of(1)).tolist() == sample_best(logprobs_of(1)).tolist()
        core.note_sampling(generator, {3: {"sampling": BEST}})
        assert generator.sampler is table and table.rows == {3: BEST}

    def test_a_step_that_admits_nobody_touches_nothing(self):
        generator = SimpleNamespace(has_pending_prompts=False, sampler=sample_best)
        core.note_sampling(generator, {1: {"sampling": HOT}})
        assert generator.sampler is sample_best
