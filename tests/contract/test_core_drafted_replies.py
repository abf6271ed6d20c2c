"""Where a drafted round is cut, and what is committed; batch, caches and coordinator are played by plain objects."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_vlm_cacheplus.core import drafted_replies as core
from mlx_vlm_cacheplus.core.output_tokens import OutputRow
from mlx_vlm_cacheplus.core.reply_ids import ReplyIds

STOP = 99
PROMPT = [1, 2, 3]


class Coordinator:
    """Writes down what it is asked to commit, and which replies are noted."""

    def __init__(self):
        self.commits = []
        self.noted = []
        self.manager = SimpleNamespace(reply_ids=ReplyIds())
        self.manager.reply_ids.note_reply = lambda ids, n: self.noted.append((ids, n))

    def commit(self, prompt_cache, ids, *, batch_idx=None, extra_hash=0):
        self.commits.append((list(ids), batch_idx))
        return True


class Layer:
    """A cache entry that knows the length of each row, as the batch's rounds leave it."""

    def __init__(self, rows):
        self.lengths = [len(PROMPT)] * rows

    @property
    def offset(self):
        return mx.array(self.lengths) if len(self.lengths) > 1 else self.lengths[0]


class Batch:
    """A speculative batch whose walks and emissions a test plays by hand."""

    is_speculative = True

    def __init__(self, budgets, first=None, uniform=False):
        rows = len(budgets)
        self._all_uids = [10 + row for row in range(rows)]
        self.uids = list(self._all_uids)
        self.max_tokens = list(budgets)
        self._num_tokens = [1] * rows
        self._finished = [False] * rows
        self.first_tokens = mx.array(first or [5 + row for row in range(rows)])
        self.layer = Layer(rows)
        self.prompt_cache = [self.layer]
        self._rounds_iter = SimpleNamespace(gi_frame=object())
        self.model = SimpleNamespace(requires_uniform_batch_acceptance=uniform)
        self.draft_model = SimpleNamespace()
        self.coordinator = Coordinator()
        self.ledgers = {
            uid: OutputRow(self.coordinator, list(PROMPT), len(PROMPT), 0)
            for uid in self._all_uids
        }
        core.attach_drafted_rows(self, dict(self.ledgers))

    def stop_criteria(self, token):
        return token == STOP

    def stop_check(self, row, token):
        return (
            self._finished[row]
            or token == STOP
            or self._num_tokens[row] >= self.max_tokens[row]
        )

    def walk(self, accepted, new_tokens):
        """One round up to its commit: what was cut, and the caches that long."""
        with core.recorded_round(self):
            accepted, new_tokens = core.cut_at_row_ends(accepted, new_tokens)
        for place, count in enumerate(accepted):
            self.layer.lengths[place] += count + 1
        return accepted, new_tokens

    def emit(self, tokens_of):
        """Emit one position: {row: token}; rows that end are told to the loop, as in stock."""
        with core.recorded_round(self):
            check = core.watched_stop_check(self.stop_check)
        told = [row for row, token in tokens_of.items() if check(row, token)]
        for row, token in tokens_of.items():
            self._num_tokens[row] += 1
            if token == STOP or self._num_tokens[row] >= self.max_tokens[row]:
                self._finished[row] = True
        core.commit_drafted_rows(self)
        return told

    def drop(self, row):
        """The round loop takes a row out of the caches."""
        del self.layer.lengths[row]


def test_outside_a_recorded_round_nothing_is_cut():
    assert core.cut_at_row_ends([2], [[7, STOP, 8]]) == ([2], [[7, STOP, 8]])
    check = object()
    assert core.watched_stop_check(check) is check


def test_a_batch_that_keeps_no_ledger_is_left_alone():
    batch = SimpleNamespace()
    with core.recorded_round(batch):
        assert core.cut_at_row_ends([1], [[STOP, 7]]) == ([1], [[STOP, 7]])
    core.attach_drafted_rows(batch, {1: None})
    assert not hasattr(batch, "drafted")
    core.commit_drafted_rows(batch)


@pytest.mark.parametrize("place", range(4))
def test_a_round_is_cut_at_a_stop_token(place):
    tokens = [7, 7, 7, 7]
    tokens[place] = STOP
    cut = Batch([50]).walk([3], [tokens])
    assert cut == ([place], [tokens[: place + 1]])


@pytest.mark.parametrize("room", range(1, 6))
def test_a_round_is_cut_at_the_budget(room):
    accepted, tokens = Batch([1 + room]).walk([3], [[7, 8, 9, 10]])
    assert tokens == [[7, 8, 9, 10][:room]]
    assert accepted == [min(3, room - 1)]


def test_the_targets_own_token_at_the_end_takes_no_accepted_one_away():
    assert Batch([50]).walk([2], [[7, 8, STOP]]) == ([2], [[7, 8, STOP]])


def test_cutting_twice_is_cutting_once():
    batch = Batch([50, 3])
    once = batch.walk([3, 2], [[7, STOP, 8, 9], [7, 8, 9]])
    with core.recorded_round(batch):
        assert core.cut_at_row_ends(*once) == once
    assert once == ([1, 1], [[7, STOP], [7, 8]])


@pytest.mark.parametrize("who", ["model", "draft_model", "language_model"])
def test_one_end_cuts_all_where_rows_must_accept_alike(who):
    batch = Batch([50, 50, 50])
    asks = SimpleNamespace(requires_uniform_batch_acceptance=True)
    if who == "language_model":
        batch.model = SimpleNamespace(language_model=asks)
    else:
        setattr(batch, who, asks)
    cut = batch.walk([3, 2, 3], [[7, 8, 9, 6], [7, STOP, 8], [5, 6, 7, 8]])
    assert cut == ([1, 1, 1], [[7, 8], [7, STOP], [5, 6]])


def test_rows_that_have_ended_are_not_cut():
    batch = Batch([50, 50])
    batch._finished[0] = True
    tokens = [[STOP, 8, 9], [7, STOP, 9]]
    assert batch.walk([2, 2], tokens) == ([2, 1], [[STOP, 8, 9], [7, STOP]])


def test_the_ledger_grows_by_what_was_fed_not_by_the_newest_token():
    batch = Batch([50])
    batch.walk([2], [[7, 8, 9]])
    batch.emit({0: 7})
    assert batch.ledgers[10].ids == [*PROMPT, 5, 7, 8]
    batch.walk([0], [[6]])
    batch.emit({0: 6})
    assert batch.ledgers[10].ids == [*PROMPT, 5, 7, 8, 9]
    assert batch.coordinator.commits == []


def test_a_row_that_ends_is_committed_up_to_its_newest_token():
    batch = Batch([50])
    batch.walk([2], [[7, 8, STOP]])
    for token in (7, 8, STOP):
        batch.emit({0: token})
    ids = [*PROMPT, 5, 7, 8]
    assert batch.coordinator.commits == [(ids, 0)]
    assert batch.coordinator.noted == [([*ids, STOP], 3)]
    assert batch.ledgers[10].committed == 6 and batch.ledgers[10].reason is None


def test_a_client_that_goes_between_two_positions():
    """The caches hold the whole round; the reply is what came out."""
    batch = Batch([50])
    batch.walk([2], [[7, 8, 9]])
    batch.emit({0: 7})
    batch._finished[0] = True
    core.commit_drafted_rows(batch)
    assert batch.coordinator.commits == [([*PROMPT, 5, 7, 8], 0)]
    assert batch.coordinator.noted == [([*PROMPT, 5, 7], 3)]
    core.commit_drafted_rows(batch)
    assert len(batch.coordinator.commits) == 1


def test_rows_keep_their_places_after_others_have_gone():
    batch = Batch([2, 50, 50])
    _, tokens = batch.walk([1, 0, 1], [[7, 8], [7], [7, 8]])
    assert tokens == [[7], [7], [7, 8]]
    # Its last token tells the loop that row 0 goes, before the token is counted.
    assert batch.emit({0: 7, 1: 7, 2: 7}) == [0]
    batch.emit({2: 8})
    batch.drop(0)
    batch.walk([0, 2], [[STOP], [7, 8, 6]])
    assert batch.emit({1: STOP, 2: 7}) == [1]
    batch.drop(0)
    batch.walk([1], [[9, STOP]])
    batch.emit({2: 9})
    batch.emit({2: STOP})
    assert batch.coordinator.commits == [
        ([*PROMPT, 5], 0),
        ([*PROMPT, 6, 7], 0),
        ([*PROMPT, 7, 7, 8, 7, 8, 6, 9], 0),
    ]


def test_rows_that_the_loop_still_holds_are_counted():
    """A cancelled row stays in the caches until the loop asks for it again."""
    batch = Batch([50, 50])
    batch.walk([0, 1], [[7], [8, 9]])
    batch.emit({0: 7, 1: 8})
    batch._finished[0] = True
    core.commit_drafted_rows(batch)
    batch.walk([1, 0], [[7, 8], [STOP]])
    batch.emit({0: 7, 1: STOP})
    assert batch.coordinator.commits == [
        ([*PROMPT, 5], 0),
        ([*PROMPT, 6, 8, 9], 1),
    ]


def test_a_loop_with_other_rows_keeps_nothing():
    batch = Batch([50, 50])
    assert batch.walk([1], [[STOP, 7]]) == ([1], [[STOP, 7]])
    assert batch.drafted.rows == {}
    assert "other rows" in batch.ledgers[10].reason
    batch._finished = [True, True]
    core.commit_drafted_rows(batch)
    assert batch.coordinator.commits == []


def test_a_row_that_has_left_the_caches_is_not_committed():
    batch = Batch([50, 50])
    batch.walk([0, 0], [[7], [8]])
    batch.emit({0: 7, 1: 8})
    batch.drafted.gone.add(0)
    batch._rounds_iter.gi_frame = None
    batch.drop(0)
    batch._finished = [True, True]
    core.commit_drafted_rows(batch)
    assert batch.coordinator.commits == [([*PROMPT, 6], 0)]
    assert batch.ledgers[10].reason == "its row has left the caches"


def test_a_round_that_raises_forgets_the_ledgers():
    batch = Batch([50])
    batch.walk([1], [[7, 8]])
    with pytest.raises(RuntimeError, match="torn"), core.recorded_round(batch):
        raise RuntimeError("torn")
    assert batch.drafted.rows == {} and batch.drafted.round is None
    assert "error" in batch.ledgers[10].reason
    batch._finished[0] = True
    core.commit_drafted_rows(batch)
    assert batch.coordinator.commits == []


def test_what_a_round_raises_does_not_reach_the_next_batch():
    with pytest.raises(RuntimeError), core.recorded_round(Batch([50])):
        raise RuntimeError
    assert core.cut_at_row_ends([1], [[STOP, 7]]) == ([1], [[STOP, 7]])


def test_a_reply_of_one_token_adds_nothing():
    batch = Batch([1])
    batch._finished[0] = True
    core.commit_drafted_rows(batch)
    assert batch.coordinator.commits == []
    assert "no token" in batch.ledgers[10].reason


def test_caches_that_do_not_hold_what_was_recorded_are_not_stored():
    batch = Batch([50])
    batch.walk([1], [[7, STOP]])
    batch.layer.lengths[0] += 1
    batch.emit({0: 7})
    batch.emit({0: STOP})
    assert batch.coordinator.commits == [] and "layer 0" in batch.ledgers[10].reason


def test_a_single_row_is_told_to_the_loop_only_when_its_end_was_counted():
    """Stock asks about a batch of one after a token was emitted."""
    batch = Batch([3])
    with core.recorded_round(batch):
        check = core.watched_stop_check(batch.stop_check)
    assert not check(0, 7)
    batch._num_tokens[0] = 3
    assert check(0, 7) and batch.drafted.gone == {0}


def test_a_commit_that_follows_the_release_finds_nothing():
    batch = Batch([50])
    batch.prompt_cache = []
    batch._finished[0] = True
    core.commit_drafted_rows(batch)
    assert batch.coordinator.commits == []
