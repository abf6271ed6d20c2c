"""Which speculative batches join, and what is said of those that take turns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from mlx_vlm.models.cache import ArraysCache, RotatingKVCache

from mlx_vlm_cacheplus.core import joined_drafters
from mlx_vlm_cacheplus.core import speculative_merge as core
from mlx_vlm_cacheplus.core.merge_pace import MODE
from tests.contract.speculative_batches import (
    Batch,
    always,
    batch_cache,
    generator_of,
    sampled,
    target_of,
)

__all__ = ["always"]


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
