"""Rows of a speculative batch keep each what it accepts, where their caches can hold it."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_vlm.models.cache import ArraysCache, BatchKVCache, BatchRotatingKVCache
from mlx_vlm.speculative.cache_state import start_speculative_cache

from mlx_vlm_cacheplus.core import drafted_replies, row_acceptance, segments
from mlx_vlm_cacheplus.core import speculative_merge as merge
from mlx_vlm_cacheplus.core.drafted_replies import DraftedRows, rows_accept_alike
from mlx_vlm_cacheplus.core.output_tokens import length_fault
from mlx_vlm_cacheplus.core.ragged_cache import HoledKVCache
from mlx_vlm_cacheplus.core.row_acceptance import (
    commit_round,
    hold_holes,
    rows_keep_their_own,
    without_holes,
)

PROMPTS, BLOCK = (3, 5), 4


class Target:
    """Clamps its batches, and has a rollback of its own that moves all rows alike."""

    requires_uniform_batch_acceptance = True

    def __init__(self):
        self.rolled_back = []

    def rollback_speculative_cache(self, caches, state, accepted, block_size):
        self.rolled_back.append(accepted.tolist())


def tokens_of(row):
    """What a row has read: its prompt and the block that is verified."""
    return [100 * row + number for number in range(PROMPTS[row] + BLOCK)]


def verified():
    """Keys and values, [2, 1, tokens, 1], of two left-padded prompts and a block."""
    padding = [max(PROMPTS) - length for length in PROMPTS]
    cache = BatchKVCache(padding)
    rows = [[-1] * pad + tokens_of(row) for row, pad in enumerate(padding)]
    content = mx.array(rows, dtype=mx.float32)[:, None, :, None]
    cache.update_and_fetch(content, -content)
    return cache


def row_content(cache, row):
    return cache.extract(row).keys[0, 0, :, 0].tolist()


def batch_of(*entries, drafter=None, apart=True):
    batch = SimpleNamespace(
        prompt_cache=list(entries),
        draft_model=drafter or SimpleNamespace(supports_ragged_batch_acceptance=True),
        draft_kind="mtp",
        drafted=DraftedRows([7, 8], {}),
        model=Target(),
    )
    if apart:
        batch.drafted.apart = rows_keep_their_own
    return batch


def recording(entry):
    start_speculative_cache([entry], BLOCK)
    return entry


def recurrent():
    entry = ArraysCache(2)
    entry.cache = [mx.zeros((2, 3)), mx.zeros((2, 3))]
    return entry


@pytest.mark.parametrize(
    ("entry", "keeps"),
    [
        (verified, True),
        (lambda: recording(recurrent()), True),
        (recurrent, False),
        (lambda: BatchRotatingKVCache(8, [0, 0]), False),
    ],
    ids=["keys and values", "recorded state", "state alone", "window"],
)
def test_which_caches_hold_rows_of_unequal_age(entry, keeps):
    assert rows_keep_their_own(batch_of(verified(), entry())) == keeps


def test_a_drafter_that_asks_for_the_clamp_has_it():
    drafter = SimpleNamespace(requires_uniform_batch_acceptance=True)
    assert not rows_keep_their_own(batch_of(verified(), drafter=drafter))


@pytest.mark.parametrize("apart", [False, True])
def test_a_round_is_clamped_unless_its_rows_can_keep_their_own(apart):
    batch, drafter = batch_of(verified(), apart=apart), SimpleNamespace()
    assert rows_accept_alike(drafter, batch.model), "outside of a round"
    with drafted_replies.recorded_round(batch):
        assert rows_accept_alike(drafter, batch.model) != apart
        assert not rows_accept_alike(drafter, SimpleNamespace())


@pytest.mark.parametrize("entry", [verified, lambda: HoledKVCache.of(verified())])
@pytest.mark.parametrize("accepted", [[0, 3], [2, 1], [3, 3], [0, 0]])
def test_each_row_keeps_exactly_what_it_accepted(accepted, entry):
    cache = entry()
    batch = batch_of(cache)
    with drafted_replies.recorded_round(batch):
        commit_round(batch.model, [cache], None, mx.array(accepted), BLOCK)
    for row, count in enumerate(accepted):
        kept = tokens_of(row)[: PROMPTS[row] + count + 1]
        assert row_content(cache, row) == kept
        assert cache.offset[row].item() == len(kept), "the next position"
    assert batch.model.rolled_back == []


def test_what_could_not_hold_rows_of_unequal_age_stays_as_it_is():
    one_row = BatchKVCache.merge([verified().extract(0)])
    for entries in ([verified(), BatchRotatingKVCache(8, [0, 0])], [one_row]):
        kept = list(entries)
        hold_holes(entries)
        assert all(a is b for a, b in zip(entries, kept, strict=True))
    entries = [verified(), recurrent()]
    hold_holes(entries)
    assert [type(entry) for entry in entries] == [HoledKVCache, ArraysCache]


def test_rows_are_taken_from_entries_that_others_know():
    entries = [verified(), recording(recurrent())]
    hold_holes(entries)
    batch = batch_of(*entries)
    with drafted_replies.recorded_round(batch):
        commit_round(batch.model, entries[:1], None, mx.array([2, 0]), BLOCK)
    assert entries[0].has_holes
    shown, state = without_holes(entries)
    assert type(shown) is BatchKVCache and state is entries[1]
    assert not entries[0].has_holes, "a filter that follows has nothing to move"
    for row, count in enumerate([2, 0]):
        kept = tokens_of(row)[: PROMPTS[row] + count + 1]
        assert row_content(shown, row) == row_content(entries[0], row) == kept
        start = int(shown.left_padding[row].item())
        assert shown.keys[row, 0, start : shown._idx, 0].tolist() == kept


def test_a_clamped_round_is_the_target_s_to_roll_back():
    cache = verified()
    batch = batch_of(cache, apart=False)
    with drafted_replies.recorded_round(batch):
        commit_round(batch.model, [cache], None, mx.array([1, 1]), BLOCK)
    assert batch.model.rolled_back == [[1, 1]]


def test_a_recorded_step_is_committed_as_stock_does():
    cache = verified()
    cache.trim(BLOCK)
    transaction = start_speculative_cache([cache], BLOCK)
    block = mx.array([tokens_of(row)[-BLOCK:] for row in (0, 1)], dtype=mx.float32)
    cache.update_and_fetch(block[:, None, :, None], block[:, None, :, None])
    batch = batch_of(cache)
    with drafted_replies.recorded_round(batch):
        commit_round(batch.model, [cache], transaction, mx.array([2, 0]), BLOCK)
    assert not transaction.active
    assert row_content(cache, 0) == tokens_of(0)[: PROMPTS[0] + 3]
    assert row_content(cache, 1) == tokens_of(1)[: PROMPTS[1] + 1]


@pytest.mark.parametrize(
    ("mode", "drafter", "apart"),
    [
        ("never", SimpleNamespace(supports_ragged_batch_acceptance=True), False),
        ("always", SimpleNamespace(supports_ragged_batch_acceptance=True), True),
        ("auto", SimpleNamespace(), False),
    ],
)
def test_only_where_batches_may_join(monkeypatch, mode, drafter, apart):
    monkeypatch.setenv(merge.MODE, mode)
    batch = batch_of(verified(), drafter=drafter, apart=False)
    merge.keep_rows_apart(batch)
    assert (batch.drafted.apart is row_acceptance.rows_keep_their_own) == apart
    assert (type(batch.prompt_cache[0]) is HoledKVCache) == apart


def test_a_row_that_leaves_waits_for_no_layer_by_itself(monkeypatch):
    """Each wait for a figure of one layer is a stall of all rows, as many as layers."""
    layers = [verified() for _ in range(6)]
    hold_holes(layers)
    for layer in layers:
        layer.prepare(right_padding=[2, 0])
        layer.finalize()
    waits = []
    evaluate, item = mx.eval, mx.array.item
    monkeypatch.setattr(mx, "eval", lambda *a: waits.append("eval") or evaluate(*a))
    monkeypatch.setattr(mx.array, "item", lambda a: waits.append("item") or item(a))
    for layer in layers:
        layer.filter(mx.array([1]))
    assert waits == [], "it is known on the host which rows begin where"
    assert length_fault(layers, 0, len(tokens_of(1))) is None
    assert length_fault(layers, 0, 3) is not None
    segments.capture_span(layers, 0, 1, 4)
    assert waits == ["eval"] * 3
    assert [row_content(layer, 0) for layer in layers] == [tokens_of(1)] * 6
