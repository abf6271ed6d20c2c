"""Which rows are prefilled together, and what a step of the generator finds changed."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_vlm_cacheplus.core import undrafted_requests as core

DRAFTER = object()
SIZE = 4


def row(uid, length=3, processors=(), budget=None):
    """A queue entry as BatchGenerator.insert makes it."""
    return (uid, list(range(length)), 8, {}, list(processors), budget)


def plain_row(uid, length=3):
    return row(uid, length, processors=[lambda tokens, logits: logits])


class Batch(list):
    """A decoding batch of uids."""

    def __init__(self, uids, speculative=False, logprobs=False, k=0):
        super().__init__(uids)
        self.is_speculative = speculative
        self.compute_logprobs, self.top_logprobs_k = logprobs, k


class Apc:
    plain_rows = False


class Generator(SimpleNamespace):
    """A batch generator's queue and batches."""

    @property
    def has_pending_prompts(self):
        return bool(self._unprocessed_sequences) or self._prompt_batch is not None


def make(rows, decoding=(), **fields):
    decoding = decoding if isinstance(decoding, Batch) else Batch(decoding)
    defaults = {
        "draft_model": DRAFTER,
        "draft_kind": "mtp",
        "sampler": None,
        "prefill_batch_size": SIZE,
        "compute_logprobs": False,
        "top_logprobs_k": 0,
        "apc": Apc(),
        "_unprocessed_sequences": list(rows),
        "_prompt_batch": None,
        "_generation_batch": decoding,
    }
    return Generator(**{**defaults, **fields})


def admit(generator):
    """(uids, whether they are drafted) of the prompt batch that a step would build."""
    with core.rows_of_one_kind(generator):
        size = min(generator.prefill_batch_size, len(generator._unprocessed_sequences))
        rows = generator._unprocessed_sequences[:size]
        generator._unprocessed_sequences = generator._unprocessed_sequences[size:]
        core.choose_drafting(generator, rows)
        drafted = generator.draft_model is not None
        assert generator.apc.plain_rows is not drafted
        assert (generator.draft_kind is not None) is drafted
    assert (generator.draft_model, generator.draft_kind) == (DRAFTER, "mtp")
    assert generator.prefill_batch_size == SIZE
    assert (generator.compute_logprobs, generator.top_logprobs_k) == (False, 0)
    assert generator.apc.plain_rows is False
    return [entry[0] for entry in rows], drafted


def test_rows_of_one_kind_keep_their_order():
    generator = make([row(3), row(1), row(2)])
    assert admit(generator) == ([3, 1, 2], True)
    generator = make([plain_row(3), plain_row(1)])
    assert admit(generator) == ([3, 1], False)


def test_the_kind_of_the_oldest_goes_first():
    rows = [row(2), plain_row(1), row(3), plain_row(4)]
    generator = make(rows)
    assert admit(generator) == ([1, 4], False)
    assert admit(generator) == ([2, 3], True)


def test_the_oldest_is_admitted_however_many_arrive():
    """Shorter prompts stand before it in stock's queue."""
    for kind, other in ((row, plain_row), (plain_row, row)):
        waiting = [kind(0, 900), other(1, 800)]
        for uid in range(2, 60, 2):
            generator = make(
                sorted(
                    [*waiting, kind(uid, 5), other(uid + 1, 5)],
                    key=lambda entry: len(entry[1]),
                )
            )
            waiting = generator._unprocessed_sequences
            oldest = min(entry[0] for entry in waiting)
            uids, _ = admit(generator)
            assert oldest in uids and len(uids) <= SIZE
            waiting = generator._unprocessed_sequences
        assert {0, 1}.isdisjoint(entry[0] for entry in waiting)


def test_rows_join_those_that_are_decoded_plainly():
    generator = make([row(5), plain_row(6), row(7)], decoding=[1])
    assert admit(generator) == ([5, 6, 7], False)
    assert generator.undrafted_rows == {5, 6, 7}


def test_where_the_plain_rows_end_in_this_step_drafting_goes_on():
    generator = make([row(5)], decoding=[1])
    with core.rows_of_one_kind(generator):
        generator._generation_batch.clear()
        core.choose_drafting(generator, generator._unprocessed_sequences)
        assert generator.draft_model is DRAFTER


def test_speculative_rows_do_not_make_others_plain():
    generator = make([row(5), plain_row(4)], Batch([1], speculative=True))
    with core.rows_of_one_kind(generator):
        assert [entry[0] for entry in generator._unprocessed_sequences] == [4, 5]
        assert generator.prefill_batch_size == 1


@pytest.mark.parametrize(
    "budget, drafted",
    [
        (None, True),
        (SimpleNamespace(enable_thinking=False), True),
        (SimpleNamespace(enable_thinking=True), False),
        (object(), False),
    ],
)
def test_a_budget_counts_where_the_request_thinks(budget, drafted):
    assert admit(make([row(1, budget=budget)])) == ([1], drafted)


def sampled(**rows):
    """A generator's sampler that tells its rows apart: u1=(key, seeded)."""
    known = {
        int(name[1:]): SimpleNamespace(key=key, seeded=seeded)
        for name, (key, seeded) in rows.items()
    }
    return SimpleNamespace(rows=known)


def test_rows_that_are_sampled_alike_are_drafted_together():
    sampler = sampled(u1=((1,), False), u2=(None, False), u3=((1,), False))
    generator = make([row(2), plain_row(4), row(3), row(1)], sampler=sampler)
    assert admit(generator) == ([1, 3], True)
    assert admit(generator) == ([2], True)
    assert admit(generator) == ([4], False)


def test_rows_that_joined_none_are_not_drafted_if_they_are_sampled_differently():
    """The plain rows that they were to join have ended in this very step."""
    sampler = sampled(u1=((1,), False), u2=(None, False))
    generator = make([row(1), row(2)], decoding=[0], sampler=sampler)
    with core.rows_of_one_kind(generator):
        generator._generation_batch.clear()
        core.choose_drafting(generator, generator._unprocessed_sequences)
        assert generator.draft_model is None


@pytest.mark.parametrize("kind, drafted", [("mtp", True), ("eagle3", False)])
def test_rounds_that_know_no_seed_are_not_for_rows_that_have_one(kind, drafted):
    sampler = sampled(u1=((1,), True), u2=((1,), False))
    generator = make([row(1), row(2)], sampler=sampler, draft_kind=kind)
    with core.rows_of_one_kind(generator):
        size = generator.prefill_batch_size
        core.choose_drafting(generator, generator._unprocessed_sequences[:size])
        assert (generator.draft_model is DRAFTER) is drafted


def test_settings_come_back_after_an_error():
    generator = make([plain_row(1)])
    with pytest.raises(ValueError), core.rows_of_one_kind(generator):
        core.choose_drafting(generator, generator._unprocessed_sequences)
        raise ValueError("prefill")
    assert generator.draft_model is DRAFTER and generator.draft_kind == "mtp"


def test_without_a_draft_model_nothing_changes():
    generator = make([row(2), plain_row(1)], draft_model=None, draft_kind=None)
    before = dict(vars(generator))
    with core.rows_of_one_kind(generator):
        core.choose_drafting(generator, generator._unprocessed_sequences)
        core.note_rows(None, generator, {})
        assert vars(generator) == before


def test_a_step_that_admits_nobody_touches_nothing():
    """The decode path: no settings are read or written, no table is built."""
    generator = make([], Batch([1, 2], speculative=True))
    before = dict(vars(generator))
    with core.rows_of_one_kind(generator):
        core.note_rows(None, generator, {1: {"logprobs": True}})
        assert vars(generator) == before
    assert vars(generator) == before


class TestLogprobs:
    """Who asks for them, and who gets them."""

    server = SimpleNamespace(top_logprobs_k=3)

    def settings(self, generator):
        return generator.compute_logprobs, generator.top_logprobs_k

    def test_a_row_that_asks_is_not_drafted(self):
        generator = make([row(1), row(2)])
        active = {1: {"logprobs": False}, 2: {"logprobs": True}}
        core.note_rows(self.server, generator, active)
        assert admit(generator) == ([1], True)
        with core.rows_of_one_kind(generator):
            core.choose_drafting(generator, generator._unprocessed_sequences)
            assert self.settings(generator) == (True, 3)

    def test_rows_beside_those_that_ask_get_them_too(self):
        decoding = Batch([1], logprobs=True, k=3)
        generator = make([], decoding, _prompt_batch=SimpleNamespace(uids=[2]))
        core.note_rows(self.server, generator, {})
        with core.rows_of_one_kind(generator):
            assert self.settings(generator) == (True, 3)

    def test_nobody_else_pays_for_them(self):
        generator = make([plain_row(1)])
        core.note_rows(self.server, generator, {1: {"logprobs": False}})
        with core.rows_of_one_kind(generator):
            core.choose_drafting(generator, generator._unprocessed_sequences)
            assert self.settings(generator) == (False, 0)

    def test_statistics_of_undrafted_rows_are_dropped(self):
        generator = make([plain_row(1)])
        admit(generator)
        active = {
            1: {"logprobs": False, "spec_snapshot": (1, 2, 3)},
            2: {"logprobs": False, "spec_snapshot": (1, 2, 3)},
        }
        core.note_rows(self.server, generator, active)
        assert [info["spec_snapshot"] for info in active.values()] == [None, (1, 2, 3)]
        core.note_rows(self.server, generator, {2: active[2]})
        assert generator.undrafted_rows == set()


class Decoding(list):
    """What joins of a decode batch, by rows."""

    def __init__(self, rows, k=None):
        super().__init__(range(rows))
        self.compute_logprobs, self.top_logprobs_k = k is not None, k or 0
        self._next_lps = None if k is None else mx.full((rows,), -1.0)
        self._next_top_idx = mx.full((rows, k), 7, dtype=mx.int32) if k else None
        self._next_top_lp = mx.full((rows, k), -1.0) if k else None


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("asks", [0, 1])
def test_batches_that_join_are_evened_out(k, asks):
    pair = [Decoding(2, k if asks == 0 else None), Decoding(1, k if asks else None)]
    core.even_out_logprobs(*pair)
    for batch, rows in zip(pair, (2, 1), strict=True):
        assert (batch.compute_logprobs, batch.top_logprobs_k) == (True, k)
        assert batch._next_lps.shape == (rows,)
        if k:
            assert batch._next_top_idx.shape == (rows, k)
            assert batch._next_top_idx.dtype == mx.int32
            assert batch._next_top_lp.shape == (rows, k)
    assert pair[asks]._next_lps.tolist()[0] == -1.0
    assert pair[1 - asks]._next_lps.tolist()[0] == 0.0


@pytest.mark.parametrize("k", [None, 3])
def test_batches_that_agree_are_left_alone(k):
    one, two = Decoding(2, k), Decoding(1, k)
    before = [dict(vars(one)), dict(vars(two))]
    core.even_out_logprobs(one, two)
    assert [vars(one), vars(two)] == before


def test_processors_see_the_whole_prompt():
    batch = SimpleNamespace(
        _token_context=[[3], [8, 9]],
        _apc_meta=[{"full_input_ids": [1, 2, 3]}, {"full_input_ids": [8, 9]}],
    )
    core.give_whole_context(batch)
    assert batch._token_context == [[1, 2, 3], [8, 9]]
    batch._token_context = []
    core.give_whole_context(batch)
    assert batch._token_context == []
    core.give_whole_context(None)


@pytest.mark.parametrize("penalty, left", [(1.0, None), (1.1, 1.1), (None, None)])
def test_a_penalty_of_one_is_none(penalty, left):
    args = SimpleNamespace(repetition_penalty=penalty)
    core.drop_neutral_penalty(args)
    assert args.repetition_penalty == left
