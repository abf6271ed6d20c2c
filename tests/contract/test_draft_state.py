"""A drafter's part in the tree: the right entries come back, at every place a prompt can leave it."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_vlm.models.cache import CacheList, KVCache, RotatingKVCache

from mlx_vlm_cacheplus.core.draft_priming import DraftPrimer, PrimedRow
from mlx_vlm_cacheplus.core.draft_state import (
    DraftRow,
    DraftView,
    offered_while_read,
    view_of,
)
from mlx_vlm_cacheplus.core.segment_cache import SegmentCache
from tests.fakes.token_caches import LAYOUTS
from tests.fakes.token_layers import fold

ROOM = 1 << 40
TOKENS = st.integers(0, 2)
# How much of an earlier prompt is kept (None: all of it), and what follows.
TURNS = st.lists(
    st.tuples(
        st.integers(0, 99),
        st.one_of(st.none(), st.integers(0, 99)),
        st.lists(TOKENS, min_size=1, max_size=9),
    ),
    min_size=1,
    max_size=8,
)


def always(length):
    return True


def entry(ids, place, lookahead):
    """What entry number ``place`` of a drafter has consumed."""
    seen, value = fold(ids[: place + 1])
    return (value % 997) * 3 + ids[place + 1] if lookahead else value % 997


def hidden(ids):
    return mx.array([[[float(fold(ids)[1] % 997)]]])


class Session:
    """A server with one drafter, played on integers."""

    def __init__(self, layout, lookahead):
        self.layout, self.cache = layout, SegmentCache(ROOM)
        self.view = DraftView(("kind", 1), lookahead)
        self.prompts: list[tuple[int, ...]] = []

    def feed(self, row, ids, stop):
        """Consume what is known of the entries up to ``stop``."""
        values = [
            entry(ids, place, self.view.lookahead) for place in range(row.entries, stop)
        ]
        if values:
            block = mx.array(values, dtype=mx.float32).reshape(1, 1, -1, 1)
            row.cache[0].update_and_fetch(block, -block)
        row.entries = stop

    def check(self, row, ids):
        """The row holds the entries of these tokens, and no others."""
        assert row.cache[0].offset == row.entries
        if row.entries:
            keys = np.array(row.cache[0].keys)[0, 0, : row.entries, 0]
            wanted = [
                entry(ids, place, self.view.lookahead) for place in range(row.entries)
            ]
            assert keys.tolist() == wanted

    def turn(self, ids):
        """One request; returns how many tokens were restored."""
        hit = self.cache.find(ids, 0, always, self.view)
        row, length = PrimedRow([KVCache()]), 0
        if hit is not None:
            row, length = self.view.restore(hit, len(ids)), hit.length
            lacking = int(row.pending is not None)
            assert row.entries == length - lacking
            if row.pending is not None:
                assert row.pending.item() == hidden(ids[:length]).item()
            self.check(row, ids)
        live = self.layout.row(ids)
        self.feed(row, ids, len(ids) - self.view.lookahead)
        source = DraftRow(self.view, row.cache, 0, len(ids), hidden(ids))
        assert self.cache.commit(ids, 0, live, 0, companion=source)
        self.cache.check_invariants()
        if hit is not None:
            hit.release()
        self.prompts.append(tuple(ids))
        return length


@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("name", ["dense", "hybrid"])
@settings(max_examples=60, deadline=None)
@given(turns=TURNS)
def test_every_restored_entry_is_the_right_one(name, lookahead, turns):
    session = Session(LAYOUTS[name], lookahead)
    for base, cut, more in turns:
        known = session.prompts[base % len(session.prompts)] if session.prompts else ()
        kept = len(known) if cut is None else cut % (len(known) + 1)
        session.turn([*known[:kept], *more])
    total = sum(node.nbytes for tree in session.cache._trees.values() for node in tree)
    assert total == session.cache.nbytes


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_the_next_turn_starts_where_the_last_one_ended(name):
    session = Session(LAYOUTS[name], True)
    session.turn([1, 2, 0, 1])
    assert session.turn([1, 2, 0, 1, 2, 2]) == 4


def test_a_prompt_that_leaves_a_span_reads_one_token_again():
    session = Session(LAYOUTS["dense"], True)
    session.turn([1, 2, 0, 1, 1])
    assert session.turn([1, 2, 0, 2, 2]) == 2  # three are known, the third is read
    assert Session(LAYOUTS["dense"], False).turn([1]) == 0


def test_what_was_written_without_a_drafter_is_read_again_once():
    session = Session(LAYOUTS["dense"], True)
    live = session.layout.row([1, 2, 0, 1])
    assert session.cache.commit([1, 2, 0, 1], 0, live, 0)
    assert session.cache.find([1, 2, 0, 1, 2], 0, always).length == 4
    assert session.turn([1, 2, 0, 1, 2]) == 0
    assert session.turn([1, 2, 0, 1, 2, 2]) == 5


def test_prompts_that_share_one_token_are_filled_in_as_well():
    session = Session(LAYOUTS["dense"], True)
    prompts = [[1, 2, 0, 1], [1, 0, 0, 2]]
    for ids in prompts:
        assert session.cache.commit(ids, 0, session.layout.row(ids), 0)
    for ids in prompts:
        assert session.turn([*ids, 2]) == 0
    for ids in prompts:
        assert session.turn([*ids, 2, 0]) == 5


def test_a_part_that_is_too_short_is_no_silent_zero():
    session = Session(LAYOUTS["dense"], True)
    session.turn([1, 2, 0, 1])
    hit = session.cache.find([1, 2, 0, 1, 2], 0, always, session.view)
    hit.node.payload.companion.pending = None
    with pytest.raises(ValueError, match="of 4 entries"):
        session.view.restore(hit, 8)
    hit.release()


def test_another_drafter_does_not_take_the_part_of_the_first():
    session = Session(LAYOUTS["dense"], True)
    session.turn([1, 2, 0, 1])
    session.view = DraftView(("kind", 2), True)
    assert session.turn([1, 2, 0, 1, 2]) == 0
    assert session.turn([1, 2, 0, 1, 2, 0]) == 5


def test_the_budget_counts_the_drafter():
    session = Session(LAYOUTS["dense"], True)
    live = session.layout.row([1, 2, 0, 1])
    session.cache.commit([1, 2, 0, 1], 0, live, 0)
    without = session.cache.nbytes
    session.turn([1, 2, 0, 1])
    # One column a token, two sides of four bytes, and the pending state.
    assert session.cache.nbytes == without + 4 * 2 * 4 + 4


class Drafter:
    supports_ragged_batch_acceptance = True

    def __init__(self, *cache):
        self._made = cache

    def make_cache(self):
        return list(self._made)

    def prefill_from_target_hidden(self):
        raise AssertionError


def test_a_drafter_of_one_position_for_all_rows_is_not_kept_and_says_so():
    drafter = Drafter(KVCache())
    drafter.supports_ragged_batch_acceptance = False
    view, reason = view_of(drafter, "mtp")
    assert view is None and "one position for all rows" in reason


@pytest.mark.parametrize("entry", [RotatingKVCache(8), CacheList(KVCache(), KVCache())])
def test_what_cannot_be_cut_is_not_kept_and_says_so(entry):
    view, reason = view_of(Drafter(entry), "mtp")
    assert view is None and "keeps more than keys and values" in reason


def test_a_drafter_of_keys_and_values_is_kept():
    view, reason = view_of(Drafter(KVCache()), "mtp")
    assert view.lookahead and reason is None
    assert view_of(Drafter(KVCache()), "dflash")[0].lookahead is False


def test_an_assistant_without_state_says_so():
    class Assistant:
        def make_cache(self):
            return []

    view, reason = view_of(Assistant(), "mtp")
    assert view is None and "no state" in reason


@pytest.mark.parametrize("uid, offers", [(None, True), (7, True), (3, False)])
def test_a_row_of_another_batch_gets_nothing_of_the_drafters(uid, offers):
    """It leaves while a drafted prompt is read, and is no row of that batch."""
    coordinator = SimpleNamespace(companion="a view", companion_source=None)
    batch = SimpleNamespace(
        uids=[7],
        _speculative_prefill=DraftPrimer.__new__(DraftPrimer),
        _apc_coordinator=coordinator,
    )
    with offered_while_read(batch, uid):
        assert (coordinator.companion_source is not None) is offers
    assert coordinator.companion_source is None


def test_where_no_prompt_is_read_nothing_is_offered():
    removed = []
    with offered_while_read(None, 3):
        removed.append(3)
    assert removed == [3]
