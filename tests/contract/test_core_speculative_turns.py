"""Whose turn it is, what a turn is, and what a step of the generator finds changed."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_vlm_cacheplus.core import speculative_turns as core
from mlx_vlm_cacheplus.core.draft_priming import DraftPrimer

STEP = 2048


class Batch:
    """A speculative batch that notes its turns."""

    is_speculative = True

    def __init__(self, log, *uids, ends_after=99, error=None):
        self.log, self.uids, self.left, self.error = log, list(uids), ends_after, error
        self.settled = []

    def __len__(self):
        return len(self.uids)

    def next(self):
        self.log.append(tuple(self.uids))
        if self.error is not None:
            raise self.error
        responses = [(uid, "token") for uid in self.uids]
        self.left -= 1
        if not self.left:
            self.uids = []
        return responses

    def cache_states(self):
        self.settled.append(len(self.log))
        return []

    def filter(self, keep):
        self.uids = [self.uids[index] for index in keep]


def make(*batches, plain=(), **fields):
    generator = SimpleNamespace(
        draft_model=SimpleNamespace(),
        _prompt_batch=None,
        completion_batch_size=32,
        prefill_step_size=STEP,
        _generation_batch=list(plain),
        _gen_tokens_counter=0,
        _cache_eval_interval=3,
        _stream=mx.default_stream(mx.default_device()),
        **fields,
    )
    core.open_turns(generator)
    for batch in batches:
        assert core.seat_beside(generator, batch)
    return generator


def test_each_batch_has_one_turn_and_then_the_others_theirs():
    log = []
    generator = make(Batch(log, 1), Batch(log, 2, 3))

    def advance():
        log.append("plain")
        return ["progress"], [(4, "token")]

    progress, responses = core.take_turns(generator, advance)
    assert log == [(1,), (2, 3), "plain"] and progress == ["progress"]
    assert [uid for uid, _ in responses] == [1, 2, 3, 4]
    assert generator._gen_tokens_counter == 3


def test_a_newcomer_emits_in_the_step_in_which_its_prefill_ends():
    log = []
    generator = make(Batch(log, 1))

    def advance():
        core.seat_beside(generator, Batch(log, 2, ends_after=1))
        return [], []

    responses = core.take_turns(generator, advance)[1]
    assert [uid for uid, _ in responses] == [1, 2]
    assert [batch.uids for batch in generator.speculative_batches] == [[1]]


def test_a_batch_that_has_ended_is_let_go():
    generator = make(Batch([], 1, ends_after=2))
    for left in (1, 0):
        core.take_turns(generator, lambda: ([], []))
        assert len(generator.speculative_batches) == left


def test_a_plain_batch_is_not_seated():
    generator = make()
    assert not core.seat_beside(generator, SimpleNamespace(uids=[1]))
    assert generator.speculative_batches == []


def test_without_a_draft_model_nothing_changes():
    generator = SimpleNamespace(draft_model=None)
    assert core.take_turns(generator, lambda: "as it was") == "as it was"


def test_an_error_fails_the_rows_of_its_batch():
    log, error = [], RuntimeError("planted")
    broken = Batch(log, 1, 2, error=error)
    generator = make(broken, Batch(log, 3), row_faults=[])
    responses = core.take_turns(generator, lambda: ([], []))[1]
    assert [uid for uid, _ in responses] == [3]
    assert generator.row_faults == [(1, error), (2, error)]
    assert not broken.uids, "it still has its rows, and so its caches"
    assert [batch.uids for batch in generator.speculative_batches] == [[3]]


def test_caches_are_settled_as_often_as_those_of_the_plain_batch():
    log = []
    batch = Batch(log, 1, ends_after=9)
    generator = make(batch)
    for _ in range(9):
        core.take_turns(generator, lambda: ([], []))
    assert batch.settled == [3, 6] and generator.speculative_batches == []


def test_where_nobody_collects_errors_it_is_raised():
    generator = make(Batch([], 1, error=RuntimeError("planted")))
    with pytest.raises(RuntimeError, match="planted"):
        core.take_turns(generator, lambda: ([], []))
    assert generator.speculative_batches == []


@pytest.mark.parametrize(
    ("batches", "plain", "step", "chunk"),
    [
        ((), (), STEP, STEP),
        ((), (9,), STEP, core.CHUNK_BESIDE_ROWS),
        (((1, 2), (3,)), (), STEP, core.CHUNK_BESIDE_ROWS),
        (((1,),), (), 64, 64),
        (((1,),), (), None, None),
    ],
)
def test_places_and_chunks_beside_running_rows(batches, plain, step, chunk):
    generator = make(*(Batch([], *uids) for uids in batches), plain=plain)
    generator.prefill_step_size = step
    rows = sum(map(len, batches))

    def advance():
        assert generator.completion_batch_size == 32 - rows
        assert generator.prefill_step_size == chunk
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError):
        core.take_turns(generator, advance)
    assert (generator.completion_batch_size, generator.prefill_step_size) == (32, step)


def test_a_chunk_grows_where_the_rows_gaps_stay_short(monkeypatch):
    """A chunk that takes a tenth of a second, whatever its length."""
    clock = iter(0.1 * number for number in range(99))
    monkeypatch.setattr(core.time, "perf_counter", lambda: next(clock))
    generator = make(Batch([], 1))
    chunks = []

    def advance():
        batch = generator._prompt_batch
        if batch is None or batch._processed_prompt_columns > 4000:
            batch = SimpleNamespace(_processed_prompt_columns=0)
            generator._prompt_batch = batch
        chunks.append(generator.prefill_step_size)
        batch._processed_prompt_columns += chunks[-1]
        return [], []

    for _ in range(9):
        core.take_turns(generator, advance)
    assert chunks == [512] * 2 + [1024] * 2 + [2048] * 5


def test_a_row_is_removed_from_its_batch():
    generator = make(Batch([], 1, 2), Batch([], 3))
    assert core.remove_row(generator, 2) and core.remove_row(generator, 3)
    assert [batch.uids for batch in generator.speculative_batches] == [[1]]
    assert not core.remove_row(generator, 3)


# -- a turn ----------------------------------------------------------------------


class Rounds:
    """A batch whose rounds are given: a list of (row, accepted, new tokens) each."""

    def __init__(self, kind, rounds, uids=(7,), deltas=None):
        self.draft_kind = kind
        self.uids, self._all_uids = list(uids), list(uids)
        self.rounds, self.emitted = list(rounds), []
        self.drafted = SimpleNamespace(newest=[], active=[*range(len(uids))], gone=[])
        self.draft_figures = {uid: core.DraftFigures() for uid in uids}
        self.draft_model = SimpleNamespace(draft_lens=[])
        self._rope_deltas = deltas

    def advance(self):
        if not self.emitted:
            if not self.rounds:
                return ["first"]
            self.drafted.newest = self.rounds.pop(0)
            self.draft_model.draft_lens.append(3)
            longest = max(len(new) for _, _, new in self.drafted.newest)
            self.emitted = list(range(longest))
        if self.draft_kind == "mtp":
            out, self.emitted = self.emitted, []
            return out
        return [self.emitted.pop(0)]


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "dflash"])
def test_a_turn_is_a_whole_round(kind):
    batch = Rounds(kind, [[(0, 2, [5, 6, 7])], [(0, 0, [8])]])
    assert core.whole_round(batch, batch.advance) == [0, 1, 2]
    assert core.whole_round(batch, batch.advance) == [0]
    assert batch.draft_figures == {7: core.DraftFigures(2, 2, 6)}


def test_the_first_token_is_no_round():
    batch = Rounds("eagle3", [])
    assert core.whole_round(batch, batch.advance) == ["first"]
    assert batch.draft_figures == {7: core.DraftFigures()}


def test_a_batch_that_is_built_by_hand_emits_as_before():
    assert core.whole_round(SimpleNamespace(), lambda: ["one"]) == ["one"]


def test_a_turn_ends_with_its_last_row():
    batch = Rounds("dflash", [[(0, 2, [5, 6, 7])]])

    def advance():
        batch.uids = []
        return batch.advance()

    assert core.whole_round(batch, advance) == [0]


def test_each_row_counts_its_own():
    batch = Rounds("mtp", [[(0, 2, [5, 6, 7]), (1, 0, [4])], [(1, 1, [9])]], (7, 8))
    for _ in range(2):
        core.whole_round(batch, batch.advance)
    assert batch.draft_figures == {
        7: core.DraftFigures(1, 2, 3),
        8: core.DraftFigures(2, 1, 6),
    }


def test_positions_are_those_of_the_rows_in_the_caches():
    deltas = mx.array([[3], [0], [-4]])
    batch = Rounds("mtp", [[(0, 0, [5])]] * 3, (7, 8, 9), deltas)
    seated = []
    for gone in ([], [0], [0, 1]):
        batch.drafted.gone = gone
        core.whole_round(batch, batch.advance)
        seated.append(batch._rope_deltas.tolist())
    assert seated == [[[3], [0], [-4]], [[0], [-4]], [[-4]]]


# -- figures of a request ----------------------------------------------------------


def test_a_request_gets_the_figures_of_its_row():
    active = {1: {"spec_snapshot": (5, 5.0, 5)}, 3: {"spec_snapshot": None}}
    batch = Batch([], 1, 2)
    make(batch, requests_in_flight=active)
    own = active[1]["spec_snapshot"]
    assert own is batch.draft_figures[1] and active[3]["spec_snapshot"] is None
    assert core.drafts_since(None, own) == (None, None, None)
    own.rounds, own.accepted, own.drafted = 3, 4, 9
    assert core.drafts_since(None, own) == (3, 4, 9)


def test_a_request_without_a_row_of_its_own_is_counted_as_before():
    drafter = SimpleNamespace(
        speculative_total_rounds=4,
        speculative_total_accepted=6.0,
        speculative_total_drafted=12,
    )
    assert core.drafts_since(drafter, (1, 2.0, 3)) == (3, 4, 9)


# -- a prompt batch ------------------------------------------------------------------


def test_each_batch_drafts_with_a_copy():
    shared = SimpleNamespace(weights=object(), accept_lens=[1])
    prompt_batch = SimpleNamespace(draft_model=shared)
    core.own_drafter(prompt_batch)
    own = prompt_batch.draft_model
    assert own is not shared and prompt_batch.shared_drafter is shared
    assert own.weights is shared.weights and own.accept_lens == []
    core.own_drafter(prompt_batch)
    assert prompt_batch.draft_model is own


def test_without_a_drafter_there_is_no_copy():
    prompt_batch = SimpleNamespace(draft_model=None)
    core.own_drafter(prompt_batch)
    assert vars(prompt_batch) == {"draft_model": None}


@pytest.mark.parametrize(
    ("primed", "model_can", "before", "asked", "after"),
    [
        (True, True, None, 64, 64),
        (False, True, None, 64, None),
        (True, False, None, 64, None),
        (True, True, 32, 64, 32),
        (True, True, None, None, None),
    ],
)
def test_a_primed_prompt_is_read_in_chunks(primed, model_can, before, asked, after):
    prepared = []
    batch = SimpleNamespace(
        prefill_step_size=before,
        model=SimpleNamespace(
            chunked_prefill_policy=lambda draft_model=None, **_: (
                model_can and draft_model is None
            )
        ),
        uids=[1],
        _input_ids=None,
        _inputs_embeds=None,
        prompt_cache=[],
        _prompt_kwargs={},
        _prompt_tokens_per_row=[100],
        _cached_tokens_per_row=[0],
        _apc_coordinator=SimpleNamespace(
            prepare_prefill=lambda lengths, **kw: prepared.append(kw)
        ),
    )
    primer = object.__new__(DraftPrimer) if primed else SimpleNamespace()
    batch._speculative_prefill = primer
    core.chunk_primed(batch, asked)
    assert batch.prefill_step_size == after
    assert [kw["prefill_step_size"] for kw in prepared] == ([64] if after == 64 else [])
