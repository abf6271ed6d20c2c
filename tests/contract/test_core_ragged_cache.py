"""Rejected columns stay behind as holes; rows read as if they had caches of their own."""

from __future__ import annotations

import copy
import itertools

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from mlx_vlm.models import cache as caches
from mlx_vlm.models.cache import BatchKVCache, KVCache, create_causal_mask
from mlx_vlm.models.qwen3_5 import language as qwen
from mlx_vlm.speculative.cache_state import _trim_append_caches

from mlx_vlm_cacheplus.core.ragged_cache import HoledKVCache

HEADS, DIM = 2, 3


class Tokens:
    """Numbers no two of which are the same, so that a column says what it holds."""

    def __init__(self):
        self.next = itertools.count(1)

    def rows(self, rows, count):
        return [[next(self.next) for _ in range(count)] for _ in range(rows)]


def columns(rows):
    """Keys of rows of numbers, [rows, heads, tokens, dim]."""
    numbers = mx.array(rows, dtype=mx.float32)[:, None, :, None]
    return mx.broadcast_to(numbers, (*numbers.shape[:1], HEADS, numbers.shape[2], DIM))


def append(cache, rows):
    cache.update_and_fetch(columns(rows), -columns(rows))


def prefilled(rows):
    """A batch of rows of unequal length, as stock's prefill leaves it."""
    singles = []
    for row in rows:
        single = KVCache()
        append(single, [row])
        singles.append(single)
    return HoledKVCache.of(BatchKVCache.merge(singles))


def verify(cache, rows, block, accepted):
    """Append a block to each row and keep what it accepted, by stock's own rollback."""
    append(cache, block)
    _trim_append_caches([cache], [count + 1 for count in accepted], len(block[0]))
    for row, new, count in zip(rows, block, accepted, strict=True):
        row.extend(new[: count + 1])


def ragged(rows=((1, 2, 3), (4, 5)), rounds=((0, 2), (3, 1))):
    """A cache with holes, what its rows hold, and its source of tokens."""
    tokens = Tokens()
    rows = [[-number for number in row] for row in rows]
    cache = prefilled(rows)
    for accepted in rounds:
        verify(cache, rows, tokens.rows(len(rows), 4), accepted)
    assert cache.has_holes
    return cache, rows, tokens


def seen(cache, mask, row, query):
    """What a query of a row sees of what is in the cache."""
    shown = mask[row, 0, query, : cache._idx].tolist()
    held = cache.keys[row, 0, : cache._idx, 0].tolist()
    return [int(number) for number, show in zip(held, shown, strict=True) if show]


def assert_rows(cache, rows):
    """Rows read as caches of their own: extracted, masked, and in length."""
    assert cache.batch_size == len(rows)
    assert cache.offset.tolist() == [len(row) for row in rows]
    for count in (1, 3):
        mask = cache.make_mask(count)
        assert mask.shape == (len(rows), 1, count, cache._idx + count)
        causal = [[key <= query for key in range(count)] for query in range(count)]
        for place, row in enumerate(rows):
            assert [seen(cache, mask, place, q) for q in range(count)] == [row] * count
            assert mask[place, 0, :, cache._idx :].tolist() == causal
    for place, row in enumerate(rows):
        single = cache.extract(place)
        assert type(single) is KVCache and single.offset == len(row)
        assert mx.array_equal(single.keys, columns([row]))
        assert mx.array_equal(single.values, -columns([row]))


class History(RuleBasedStateMachine):
    """What a round loop, and batches that join, may do to a cache, in any order."""

    @initialize(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4))
    def prefill(self, lengths):
        self.tokens = Tokens()
        self.rows = [self.tokens.rows(1, length)[0] for length in lengths]
        self.cache = prefilled(self.rows)

    @rule(block=st.integers(1, 5), data=st.data())
    def round(self, block, data):
        accepted = [data.draw(st.integers(0, block - 1)) for _ in self.rows]
        new = self.tokens.rows(len(self.rows), block)
        verify(self.cache, self.rows, new, accepted)

    @rule(rounds=st.integers(20, 90))
    def rounds_that_accept_little(self, rounds):
        for _ in range(rounds):
            accepted = [0] * len(self.rows)
            accepted[_ % len(self.rows)] = 1
            verify(self.cache, self.rows, self.tokens.rows(len(self.rows), 4), accepted)

    @rule(block=st.integers(1, 3))
    def broken_off(self, block):
        append(self.cache, self.tokens.rows(len(self.rows), block))
        assert self.cache.trim(block) == block

    @rule(data=st.data())
    def some_leave(self, data):
        places = st.sampled_from(range(len(self.rows)))
        keep = sorted(data.draw(st.sets(places, min_size=1)))
        self.cache.filter(mx.array(keep))
        self.rows = [self.rows[place] for place in keep]

    @rule(
        lengths=st.lists(st.integers(1, 40), min_size=1, max_size=2),
        holes=st.booleans(),
    )
    def others_come(self, lengths, holes):
        rows = [self.tokens.rows(1, length)[0] for length in lengths]
        other = prefilled(rows)
        if holes:
            verify(other, rows, self.tokens.rows(len(rows), 3), [*range(len(rows))])
        else:
            other = other.plain()
        self.cache.extend(other)
        self.rows += rows
        if len(self.rows) > 5:
            self.cache.filter(mx.arange(5))
            self.rows = self.rows[:5]

    @rule()
    def read_by_others(self):
        """Copies share nothing that is written, and know what the cache knows."""
        other = copy.copy(self.cache)
        plain = copy.copy(self.cache).plain()
        assert type(plain) is BatchKVCache
        rows = [list(row) for row in self.rows]
        accepted = [place % 2 for place in range(len(rows))]
        verify(other, rows, self.tokens.rows(len(rows), 2), accepted)
        assert_rows(plain, self.rows)
        assert_rows(other, rows)

    @rule()
    def rebuilt_from_its_state(self):
        state, meta = self.cache.state, self.cache.meta_state
        self.cache = HoledKVCache.from_state(state, meta)

    @invariant()
    def rows_are_whole(self):
        assert_rows(self.cache, self.rows)


def test_rows_of_any_history_are_those_of_caches_of_their_own():
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        History,
        settings=settings(
            max_examples=25,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=checks,
        ),
    )


def test_a_ragged_round_moves_no_column(monkeypatch):
    cache, rows, tokens = ragged()
    moved = []
    monkeypatch.setattr(caches, "dynamic_roll", lambda *a, **k: moved.append(a))
    monkeypatch.setattr(HoledKVCache, "compact", lambda self: moved.append(self))
    before = cache._idx
    verify(cache, rows, tokens.rows(2, 4), [3, 0])
    assert moved == [] and cache._idx == before + 4
    assert cache.keys[1, 0, before, 0].item() == rows[1][-1]


def peak_of_a_ragged_trim(cache):
    """Bytes that trimming takes at most, as a share of what the cache holds."""
    append(cache, Tokens().rows(2, 4))
    mx.eval(cache.keys, cache.values, cache.offset)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    _trim_append_caches([cache], [4, 1], 4)
    mx.eval(cache.keys, cache.values, cache.offset)
    return (mx.get_peak_memory() - before) / cache.nbytes


def test_a_ragged_round_takes_no_memory_of_the_size_of_the_cache():
    prompts = Tokens().rows(2, 20000)
    assert peak_of_a_ragged_trim(prefilled(prompts)) < 0.01
    assert peak_of_a_ragged_trim(prefilled(prompts).plain()) > 0.5, "stock's"


def test_holes_that_all_rows_have_are_taken_out_after_a_while():
    cache, rows, tokens = ragged()
    for number in range(200):
        accepted = [3, 0] if number % 2 else [0, 3]
        verify(cache, rows, tokens.rows(2, 4), accepted)
    longest = max(map(len, rows))
    assert longest > 500, "where 800 columns were appended"
    assert cache._idx < 1.4 * longest
    assert_rows(cache, rows)


def test_a_cache_without_holes_is_stock_s():
    cache = prefilled([[1, 2, 3], [4]])
    stock = cache.plain()
    for count, window in ((1, None), (4, None), (4, 2)):
        mask = cache.make_mask(count, window_size=window)
        assert mx.array_equal(mask, stock.make_mask(count, window_size=window))
    verify(cache, [[], []], [[5, 6], [7, 8]], [0, 0])
    assert cache.left_padding.tolist() == [0, 2] and not cache.has_holes


def test_a_window_counts_tokens_and_no_holes():
    cache, rows, _ = ragged()
    mask = cache.make_mask(3, window_size=4)
    for place, row in enumerate(rows):
        causal = create_causal_mask(3, offset=len(row), window_size=4)
        for query in range(3):
            whole = [*row, "a", "b", "c"]
            want = [t for t, s in zip(whole, causal[query].tolist(), strict=True) if s]
            new = zip("abc", mask[place, 0, query, cache._idx :].tolist(), strict=True)
            got = seen(cache, mask, place, query) + [t for t, s in new if s]
            assert got == want


def test_attention_is_that_of_caches_of_their_own():
    cache, _, _ = ragged()
    mx.random.seed(3)
    cache.keys = mx.random.normal(cache.keys.shape)
    cache.values = mx.random.normal(cache.values.shape)
    singles = [cache.extract(row) for row in range(2)]
    mask = cache.make_mask(3)
    queries, keys, values = mx.random.normal((3, 2, HEADS, 3, DIM))
    attend = mx.fast.scaled_dot_product_attention
    got = attend(queries, *cache.update_and_fetch(keys, values), scale=1.0, mask=mask)
    for row, single in enumerate(singles):
        of_row = slice(row, row + 1)
        held = single.update_and_fetch(keys[of_row], values[of_row])
        want = attend(queries[of_row], *held, scale=1.0, mask="causal")
        assert mx.allclose(got[of_row], want, atol=1e-5)


def test_trimming_into_holes_takes_only_the_row_s_own_tokens():
    cache, rows, _ = ragged(rounds=((0, 2),))
    assert cache.trim(2) == 2
    assert_rows(cache, [rows[0], rows[1][:-2]])
    assert not cache.has_holes and cache.left_padding.tolist() == [0, 1]


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_a_family_that_attends_by_left_padding_takes_the_mask(tokens):
    cache, _, _ = ragged()
    hidden = mx.zeros((2, tokens, 8))
    mask = qwen._create_qwen3_5_attention_mask(hidden, cache)
    assert mx.array_equal(mask, cache.make_mask(tokens))
    queries = mx.zeros((2, HEADS, tokens, DIM))
    by_padding = qwen._qwen3_5_left_padded_attention(
        queries, cache.keys, cache.values, cache=cache, scale=1.0, mask=mask
    )
    assert by_padding is None
