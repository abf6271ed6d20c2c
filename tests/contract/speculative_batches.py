"""Speculative batches between two rounds, as plain objects whose arrays tell which row they are of."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_vlm.models.cache import BatchKVCache, KVCache

from mlx_vlm_cacheplus.core.draft_priming import DraftPrimer, PrimedRow
from mlx_vlm_cacheplus.core.drafted_replies import DraftedRows
from mlx_vlm_cacheplus.core.joined_drafters import LiveRows
from mlx_vlm_cacheplus.core.merge_pace import MODE
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
    """Whatever the pace, batches that can join do."""
    monkeypatch.setenv(MODE, "always")


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
