"""Priming on integers: which hidden state meets which token, for every cut and padding."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_vlm.models.cache import BatchKVCache, KVCache
from mlx_vlm.speculative.drafters.mtp_base import AutoregressiveMTPDraftModel

from mlx_vlm_cacheplus.core import batch_drafter
from mlx_vlm_cacheplus.core import draft_priming as core

PAD = 99


class Recording:
    """Keys hold what an entry has consumed: the hidden state, and the token times 1,000."""

    def _remember(self, cache, values):
        block = values.astype(mx.float32)[:, None, :, None]
        cache[0].update_and_fetch(block, block)


class Mtp(Recording, AutoregressiveMTPDraftModel):
    """A drafter on stock's own MTP base, whose forward pass gives two hidden states."""

    supports_ragged_batch_acceptance = True

    def __init__(self):
        super().__init__(SimpleNamespace(block_size=3))

    def bind(self, target_model):
        self._input_embed = lambda tokens: tokens
        self._lm_head_fn = lambda hidden: hidden
        return self

    def make_cache(self):
        return [KVCache()]

    def _forward_hidden(self, token_embed, hidden, tokens, cache, **kwargs):
        values = hidden[..., 0] + 1000 * tokens
        self._remember(cache, values)
        return values[..., None], -values[..., None]


class Context(Recording):
    """A drafter that reads hidden states alone."""

    def __init__(self):
        self.accept_lens, self.draft_lens = [], []
        self.config = SimpleNamespace(target_layer_ids=[0])

    def bind(self, target_model):
        return self

    def make_cache(self):
        return [KVCache()]

    def reset(self, target_model):
        return self.make_cache()

    def _hidden(self, inputs, hidden, cache):
        self._remember(cache, hidden[..., 0])


class Assistant:
    """Reads the target's cache."""


class Batch(SimpleNamespace):
    """What a batch needs to have; can be referred to weakly, as stock's can."""


def prompt_batch(drafter, kind, rows, *, left=False, prefixes=None):
    """What stock's constructor leaves: padded ids of rows, on one side."""
    longest = max(map(len, rows))
    pads = [longest - len(row) for row in rows]
    ids = [
        [PAD] * pad + row if left else row + [PAD] * pad
        for row, pad in zip(rows, pads, strict=True)
    ]
    batch = Batch(
        model=object(),
        draft_model=drafter,
        draft_kind=kind,
        uids=list(range(len(rows))),
        _input_ids=mx.array(ids),
        _left_padding_per_row=pads if left else [0] * len(rows),
        _suffix_lens=[len(row) for row in rows],
        _processed_prompt_columns=0,
        _cached_tokens_per_row=prefixes or [0] * len(rows),
        _speculative_prefill=None,
    )
    core.prime(batch)
    return batch


def output(batch, columns):
    """The target's features: the hidden state of column c is c."""
    start, rows = batch._processed_prompt_columns, batch._input_ids.shape[0]
    hidden = mx.broadcast_to(
        mx.arange(start, start + columns, dtype=mx.float32)[None, :, None],
        (rows, columns, 1),
    )
    return SimpleNamespace(hidden_states=[hidden])


def read(batch, step):
    """Prefill as stock does: chunks, then the last column."""
    primer = batch._speculative_prefill
    while batch._input_ids.shape[1] > 1:
        columns = min(step, batch._input_ids.shape[1] - 1)
        primer.append(output(batch, columns))
        batch._processed_prompt_columns += columns
        batch._input_ids = batch._input_ids[:, columns:]
    return primer.finish(output(batch, batch._input_ids.shape[1]))


def entries(cache, row=0):
    keys = cache[0].keys
    last = cache[0].offset
    if isinstance(cache[0], BatchKVCache):
        first, last = int(cache[0].left_padding[row].item()), cache[0]._idx
        return keys[row, 0, first:last, 0].tolist()
    return keys[0, 0, :last, 0].tolist()


def pairs(row, first_column):
    """Hidden state of each token but the last, with the token behind it."""
    return [first_column + i + 1000 * row[i + 1] for i in range(len(row) - 1)]


@pytest.mark.parametrize("step", [1, 2, 3, 5, 99])
def test_look_ahead_entries_are_pairs(step):
    row = [11, 12, 13, 14, 15, 16]
    batch = prompt_batch(Mtp(), "mtp", [row])
    out = read(batch, step)
    drafter = batch.draft_model
    drafter.reset(None)
    assert entries(drafter._cache) == pairs(row, 0)
    assert drafter._next_position == 5
    assert out.hidden_states[-1].tolist() == [[[5]]]
    drafter.prefill_from_target_hidden(
        batch._input_ids, out.hidden_states[-1], mx.array([17]), None, greedy=True
    )
    assert entries(drafter._cache) == [*pairs(row, 0), 5 + 17000]
    # The base's forward pass gives one state for the head and one to go on from.
    assert drafter._seed_hidden.item() == -(5 + 17000)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("step", [1, 2, 3, 99])
def test_padding_is_never_read(step, left):
    rows = [[11, 12], [21, 22, 23, 24, 25], [31]]
    batch = prompt_batch(Mtp(), "mtp", rows, left=left)
    out = read(batch, step)
    drafter = batch.draft_model
    drafter.reset(None, left_padding=[3, 0, 4])
    for index, row in enumerate(rows):
        begin = 5 - len(row) if left else 0
        assert entries(drafter._cache, index) == pairs(row, begin)
        # Each row's own last state, not the batch's last column.
        assert out.hidden_states[-1][index].item() == begin + len(row) - 1
    assert drafter._next_position.tolist() == [1, 4, 0]


def test_a_row_that_leaves_takes_its_state_along():
    batch = prompt_batch(Mtp(), "mtp", [[11, 12, 13], [21, 22, 23]])
    primer = batch._speculative_prefill
    primer.append(output(batch, 1))
    primer.filter([1])
    assert [entries(row.cache) for row in primer.rows] == [[22000]]


@pytest.mark.parametrize("step", [1, 2, 99])
def test_context_entries_are_states_and_the_last_waits(step):
    rows = [[11, 12, 13, 14], [21, 22]]
    batch = prompt_batch(Context(), "dflash", rows)
    out = read(batch, step)
    drafter = batch.draft_model
    drafter.reset(None)
    first, second = drafter.make_cache(), drafter.make_cache()
    assert (entries(first), entries(second)) == ([0, 1, 2], [0])
    assert out.hidden_states[-1][:, 0, 0].tolist() == [3, 1]
    assert drafter.make_cache()[0].empty(), "further caches are fresh"


def test_a_single_context_row_gets_its_cache_from_reset():
    batch = prompt_batch(Context(), "dflash", [[11, 12, 13]])
    read(batch, 2)
    assert entries(batch.draft_model.reset(None)) == [0, 1]


def test_the_loaded_drafter_is_left_alone():
    loaded = Mtp()
    batch = prompt_batch(loaded, "mtp", [[11, 12, 13]])
    read(batch, 2)
    own = batch.draft_model
    own.reset(None)
    own.accept_lens.append(2)
    assert own is not loaded and loaded._cache == [] and loaded.accept_lens == []


def test_counts_are_added_to_the_loaded_drafter():
    loaded = Mtp()
    loaded.speculative_total_drafted = 5
    batch = prompt_batch(loaded, "mtp", [[11, 12]])
    decoding = SimpleNamespace(is_speculative=True, draft_model=batch.draft_model)
    batch_drafter.attach(batch, decoding)
    for _ in range(2):
        batch.draft_model.speculative_total_drafted += 3
        batch_drafter.report_back(decoding)
    assert loaded.speculative_total_drafted == 11


@pytest.mark.parametrize(
    ("drafter", "kind", "why"),
    [
        (Assistant(), "mtp", "reads the target's own cache"),
        (Assistant(), "dflash", "no forward pass of a known kind"),
    ],
)
def test_a_drafter_that_cannot_be_primed_is_left_to_stock(drafter, kind, why):
    batch = prompt_batch(drafter, kind, [[11, 12]])
    assert batch.draft_model is drafter and batch._speculative_prefill is None
    assert why in batch.draft_reason


def test_rows_of_a_drafter_with_one_position_are_left_to_stock():
    drafter = Mtp()
    drafter.supports_ragged_batch_acceptance = False
    batch = prompt_batch(drafter, "mtp", [[11, 12], [21]])
    assert batch.draft_model is drafter
    assert "rows of different lengths" in batch.draft_reason


@pytest.mark.parametrize(("drafter", "kind"), [(Mtp(), "mtp"), (Context(), "dflash")])
def test_nothing_of_a_batch_outlives_it(drafter, kind):
    """Without the collection of cycles: arrays do not count for it."""
    gc.collect()
    gc.disable()
    try:
        batch = prompt_batch(drafter, kind, [[11, 12, 13], [21, 22]])
        read(batch, 2)
        batch.draft_model.reset(None)
        decoding = SimpleNamespace(
            is_speculative=True, draft_model=batch.draft_model, uids=[]
        )
        batch_drafter.attach(batch, decoding)
        own = weakref.ref(batch.draft_model)
        prompt = weakref.ref(batch._speculative_prefill)
        batch_drafter.let_go(decoding)
        del batch, decoding
        assert own() is None and prompt() is None
    finally:
        gc.enable()
