"""What joins at a round boundary: cache rows, drafters' states, ledgers, draws; and what does not."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_vlm.models.cache import ArraysCache, BatchKVCache, KVCache, RotatingKVCache

from mlx_vlm_cacheplus.core import joined_drafters
from mlx_vlm_cacheplus.core import speculative_merge as core
from mlx_vlm_cacheplus.core.draft_priming import DraftPrimer, PrimedRow
from mlx_vlm_cacheplus.core.drafted_replies import DraftedRows
from mlx_vlm_cacheplus.core.joined_drafters import (
    LiveRows,
    RowFeatures,
    join_drafters,
    joined_entries,
    reason_apart,
    shown_of_target,
)
from mlx_vlm_cacheplus.core.merge_pace import MODE
from mlx_vlm_cacheplus.core.ragged_cache import HoledKVCache
from mlx_vlm_cacheplus.core.row_samplers import Sampling
from mlx_vlm_cacheplus.core.speculative_turns import DraftFigures

DIM = 2


def content(row, length):
    """Keys of one row, [1, 1, length, dim]: the row's number and the place of a token."""
    places = mx.arange(length, dtype=mx.float32)
    return mx.stack([mx.full((length,), row, mx.float32), places], axis=-1)[None, None]


def single(row, length):
    cache = KVCache()
    cache.update_and_fetch(content(row, length), content(row, length))
    return cache


def batch_cache(*lengths, first=0):
    rows = [single(first + index, length) for index, length in enumerate(lengths)]
    return BatchKVCache.merge(rows)


def read(cache, place):
    """(row, length) that a place in a batch cache holds; every token is looked at."""
    held = cache.extract(place)
    row = int(held.keys[0, 0, 0, 0].item())
    assert mx.array_equal(held.keys, content(row, held.offset))
    assert mx.array_equal(held.values, held.keys)
    assert cache.offset[place].item() == held.offset
    return row, held.offset


def live(*places, rows=None):
    return LiveRows(SimpleNamespace(), list(rows or places), list(places))


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


class Lookahead:
    """A drafter with the state of one that looks ahead; notes what it is reset with."""

    supports_ragged_batch_acceptance = True

    def __init__(self, cache, position, first):
        rows = cache[0].keys.shape[0]
        self._cache, self._next_position = cache, position
        self._seed_token = mx.array([[first + row] for row in range(rows)])
        self._seed_hidden = self._seed_token[..., None].astype(mx.float32)
        # [rows, tokens of a round, features]: which row and token it is of.
        places = mx.arange(4, dtype=mx.float32)
        self.verified_hidden = mx.stack(
            [first + row + places / 10 for row in range(rows)]
        )[..., None]
        self.accept_lens, self.draft_lens = [3] * 40, [3] * 40

    def reset(self, target):
        self._cache, self._seed_token, self._next_position = [], None, 0
        self.accept_lens, self.draft_lens = [], []
        return self._cache


def primer(drafter, rows):
    own = DraftPrimer.__new__(DraftPrimer)
    own.family, own.rows = SimpleNamespace(drafter=drafter, lookahead=True), rows
    return own


def target_of(family):
    """A target of a family of models, as far as its class says."""
    module = f"mlx_vlm.models.{family}.language"
    return type("LanguageModel", (), {"__module__": module})()


class Batch:
    """A speculative batch between two rounds; its loop notes that it was closed."""

    draft_kind = "mtp"
    model = target_of("qwen3_5")
    greedy_sampling = True
    token_dtype = mx.int32
    is_speculative = True

    def __init__(self, first, lengths, accepted, ended=(), **fields):
        count = len(lengths)
        self._all_uids = list(range(first, first + count))
        self._finished = [row in ended for row in range(count)]
        self.uids = [
            u
            for u, done in zip(self._all_uids, self._finished, strict=True)
            if not done
        ]
        self.max_tokens, self._num_tokens = [20 + first] * count, [first + 4] * count
        self.prompt_cache = [batch_cache(*lengths, first=first)]
        drafter_cache = [batch_cache(*(n - 1 for n in lengths), first=first)]
        self.draft_model = Lookahead(drafter_cache, mx.array(list(lengths)), first)
        self.drafted = DraftedRows(self._all_uids, {})
        self.drafted.accepted = dict(enumerate(accepted))
        self.drafted.bonus = {row: 50 + first + row for row in range(count)}
        self.primer = primer(self.draft_model, [PrimedRow([], n) for n in lengths])
        self.coordinator = None
        self.draft_figures = {uid: DraftFigures() for uid in self.uids}
        self.sampler, self.closed = object(), False
        self._rounds_iter = SimpleNamespace(close=self.close)
        self.__dict__.update(fields)

    def close(self):
        self.closed = True

    def __len__(self):
        return len(self.uids)


def generator_of(*batches):
    stream = mx.default_stream(mx.default_device())
    return SimpleNamespace(speculative_batches=list(batches), _stream=stream)


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setenv(MODE, "always")


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


def test_features_are_taken_row_by_row():
    features = RowFeatures([mx.zeros((1, 2, 3)), mx.ones((1, 5, 3))])
    assert features.shape == (2, 5, 3)
    assert mx.array_equal(features[1:2], mx.ones((1, 5, 3)))


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


def rotating(batch):
    batch.prompt_cache = [RotatingKVCache(8)]


def never_ran(batch):
    batch._rounds_iter = None


def other_rows(batch):
    batch.prompt_cache = [batch_cache(3, 4)]


def without_state(batch):
    batch.primer = None  # and no assistant
    batch.draft_model.prefill_from_target_hidden = None


def one_position(batch):
    batch.draft_model.supports_ragged_batch_acceptance = False


def composite(batch):
    batch.draft_model._cache = [ArraysCache(1)]


def no_proposal(batch):
    batch.draft_model._seed_token = None


def unknown_rounds(batch):
    batch.drafted = None


REASONS = {
    rotating: "RotatingKVCache takes no rows",
    never_ran: "one of the batches had no round of its own yet",
    other_rows: "its caches hold other rows than expected",
    without_state: "its drafter has no state of a known kind",
    one_position: "Lookahead keeps one position for all rows",
    composite: "Lookahead keeps more than keys and values",
    no_proposal: "Lookahead has no proposal ready",
    unknown_rounds: "its rounds are not known",
}


@pytest.mark.parametrize("change", REASONS)
@pytest.mark.parametrize("which", [0, 1])
def test_what_cannot_join_takes_turns(change, which):
    batches = Batch(0, (5,), (1,)), Batch(10, (7,), (3,))
    change(batches[which])
    generator = generator_of(*batches)
    core.join_batches(generator)
    assert generator.speculative_batches == list(batches)
    for batch in batches:
        for figures in batch.draft_figures.values():
            assert figures.batching == "turns"
            assert figures.batching_reason == REASONS[change]


def test_features_that_nobody_noted():
    batch = Batch(0, (5,), (1,), draft_kind="dflash")
    assert reason_apart(batch) == "its drafter's features are not known"


class Keyed:
    """A sampler that tells what keys each draw."""

    def __call__(self, logprobs):
        return "without a key"

    def sample_target(self, logprobs, *, row_ids, positions):
        return list(zip(row_ids, positions, strict=True))

    sample_proposal = sample_target


def sampled(*keys, sampler=None, **fields):
    """Two batches of one row each, whose rows are sampled with these keys."""
    batches = Batch(0, (5,), (1,)), Batch(10, (7,), (3,))
    for batch, key in zip(batches, keys, strict=True):
        (uid,) = batch.uids
        own = sampler or Keyed()
        row_sampling = {uid: Sampling(own, key=key)}
        row_fields = {"sampler": own, "row_sampling": row_sampling, **fields}
        batch.__dict__.update(greedy_sampling=key is None, **row_fields)
    return batches


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        (sampled(None, None), None),
        (sampled((1, 0.5), (1, 0.5)), None),
        (sampled((1, 0.5), (2, 0.5)), "the other rows are sampled differently"),
        (sampled((1, 0.5), None), "the other rows are sampled differently"),
        (
            sampled(None, (1, 0.5), sampler=lambda logprobs: logprobs),
            "the other rows are sampled differently",
        ),
        (
            sampled((1, 0.5), (1, 0.5), draft_kind="eagle3"),
            "its rows draw from one stream of random numbers",
        ),
        (
            sampled((1, 0.5), (1, 0.5), sampler=lambda logprobs: logprobs),
            "its rows draw from one stream of random numbers",
        ),
    ],
)
def test_rows_that_one_sampler_can_serve(batches, reason):
    generator = generator_of(*batches)
    core.join_batches(generator)
    assert len(generator.speculative_batches) == (1 if reason is None else 2)
    if reason is not None:
        assert batches[1].draft_figures[10].batching_reason == reason


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


def test_rows_know_whether_they_shared_their_rounds():
    a, b = Batch(0, (5,), (1,)), Batch(10, (7,), (3,))

    def a_round(batch):
        batch.drafted.newest = [(row, 1, [7, 8]) for row in range(len(batch.uids))]
        return ["token"]

    def figures():
        both = {**a.draft_figures, **b.draft_figures}
        return [(both[uid].batching, both[uid].batching_reason) for uid in (0, 10)]

    assert core.timed_round(a, lambda: a_round(a)) == ["token"]
    assert figures() == [("alone", None), (None, None)]
    never_ran(b)
    core.join_batches(generator_of(a, b))
    assert figures() == [("turns", REASONS[never_ran])] * 2
    b._rounds_iter = SimpleNamespace(close=b.close)
    core.join_batches(generator_of(a, b))
    core.timed_round(a, lambda: a_round(a))
    assert figures() == [("merged", None)] * 2


def test_the_first_round_of_a_loop_is_not_measured(monkeypatch):
    monkeypatch.setenv(MODE, "auto")
    a = Batch(0, (5,), (1,))
    a.drafted.newest = [(0, 1, [7, 8])]
    loop, a._rounds_iter = a._rounds_iter, None
    core.timed_round(a, list)
    assert not core.pace_of(a).averages
    a._rounds_iter = loop
    core.timed_round(a, list)
    assert core.pace_of(a).averages.keys() == {1}
    ((width, average),) = core.pace_of(a).averages[1].items()
    assert width == 4 and average.rounds == 1 and average.tokens == 2
    monkeypatch.setenv(MODE, "never")
    core.timed_round(a, list)
    assert average.rounds == 1, "nobody asks"


@pytest.mark.parametrize(("mode", "left"), [("auto", 2), ("always", 1), ("never", 2)])
def test_measured_cost_decides(monkeypatch, mode, left):
    a, b = Batch(0, (5,), (1,)), Batch(10, (7,), (3,))
    monkeypatch.setenv(MODE, mode)
    for _ in range(20):
        core.pace_of(a).add(rows=1, width=4, seconds=0.01, tokens=3)
        core.pace_of(a).add(rows=2, width=4, seconds=0.03, tokens=3)
    generator = generator_of(a, b)
    core.join_batches(generator)
    assert len(generator.speculative_batches) == left
    if mode == "auto":
        assert "were slower together" in b.draft_figures[10].batching_reason


@pytest.mark.parametrize(
    ("mode", "family", "left"),
    [
        (None, "gemma4", 1),
        (None, "lfm2", 1),
        (None, "nemotron_h", 1),
        (None, "inkling", 2),
        ("always", "inkling", 1),
        ("auto", "inkling", 2),
    ],
)
def test_by_themselves_join_families_that_were_tried(monkeypatch, mode, family, left):
    monkeypatch.delenv(MODE, raising=False)
    if mode is not None:
        monkeypatch.setenv(MODE, mode)
    a, b = (Batch(n, (5,), (1,), model=target_of(family)) for n in (0, 10))
    for batch in (a, b):
        batch.drafted.apart = batch.drafted.shown = None
        core.keep_rows_apart(batch)
        assert (batch.drafted.apart is None) == (left == 2)
    generator = generator_of(a, b)
    core.join_batches(generator)
    assert len(generator.speculative_batches) == left
    if left == 2:
        assert "was not tried on" in b.draft_figures[10].batching_reason


@pytest.mark.parametrize(
    ("small", "lengths", "left"),
    [(0, (200, 20), 2), (0, (200, 120), 1), (1 << 20, (200, 20), 1), (0, (20, 200), 2)],
)
@pytest.mark.parametrize("mode", ["auto", "always"])
def test_a_short_row_is_not_padded_to_a_long_one(
    monkeypatch, mode, small, lengths, left
):
    """Padding takes memory, which no pace shows."""
    monkeypatch.setattr(joined_drafters, "SMALL", small)
    monkeypatch.setenv(MODE, mode)
    a, b = (Batch(10 * n, (length,), (1,)) for n, length in enumerate(lengths))
    generator = generator_of(a, b)
    core.join_batches(generator)
    assert len(generator.speculative_batches) == (1 if mode == "always" else left)
    if mode == "auto" and left == 2:
        assert "of unequal length" in b.draft_figures[10].batching_reason


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_families_that_cannot_keep_apart(monkeypatch, mode):
    monkeypatch.setenv(MODE, mode)
    a, b = (Batch(n, (5,), (1,), model=target_of("laguna")) for n in (0, 10))
    for batch in (a, b):
        batch.drafted.apart = None
        core.keep_rows_apart(batch)
        assert batch.drafted.apart is None
    generator = generator_of(a, b)
    core.join_batches(generator)
    assert len(generator.speculative_batches) == 2
    assert "accept unequally" in b.draft_figures[10].batching_reason


def test_a_batch_that_was_built_by_hand_is_left_alone(monkeypatch):
    """Its rounds run as they always have; nothing else of it is known."""
    monkeypatch.setenv(MODE, "always")
    batch = Batch(0, (5,), (1,), model=target_of("gemma4"))
    entries = list(batch.prompt_cache)
    del batch.drafted
    core.keep_rows_apart(batch)
    assert batch.prompt_cache == entries


def test_one_batch_is_left_alone():
    a = Batch(0, (5,), (1,))
    for generator in (generator_of(a), generator_of(), SimpleNamespace()):
        core.join_batches(generator)
    assert not a.closed and a.draft_figures[0].batching is None
