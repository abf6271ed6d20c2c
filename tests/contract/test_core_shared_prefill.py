"""Who waits for whom: admission to the server, and to one batch of the generator."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from mlx_vlm_cacheplus.core import shared_prefill as core
from mlx_vlm_cacheplus.core import shared_prefixes as shared
from tests.contract.prefill_queue import (
    IMAGE,
    SHARED,
    WORTH,
    Server,
    ask_all,
    prompt,
    server,
)

__all__ = ["server"]


def test_one_reads_and_the_others_wait_until_it_has(server):
    ask_all(server)
    assert server.turn() == ["r1"]
    assert server.waiting == ["r2", "r3", "r4"]
    server.generator.begin()
    assert server.turn() == []
    server.generator.finish()
    assert server.turn() == ["r2", "r3", "r4"] and server.waiting == []


def test_the_shortest_of_those_that_come_together_leads(server):
    for number, length in ((1, 30), (2, 10), (3, 20)):
        server.ask(f"r{number}", prompt(number, length))
    assert server.turn() == ["r2"]
    assert server.waiting == ["r1", "r3"]


def test_requests_keep_their_order(server):
    for name, ids in (("a", prompt(1, 40)), ("b", [7, 8, 9]), ("c", [4, 5])):
        server.ask(name, ids)
    assert server.turn() == ["a", "b", "c"]


def test_a_request_that_comes_alone_is_not_looked_at(server):
    server.ask("r1", prompt(1))
    server.requests.queue[0].raw_inputs = None
    requests, _ = core.admit(server, server.receive, active=False, capacity=None)
    assert [request.request_id for request in requests] == ["r1"]


@pytest.mark.parametrize("at", ["queue", "prefill"])
def test_another_takes_over_from_one_that_is_cancelled(server, at):
    ask_all(server)
    server.turn()
    if at == "prefill":
        server.generator.begin()
    server.cancel("r1")
    assert server.turn() == ["r2"]
    assert server.waiting == ["r3", "r4"]


def test_what_a_cancelled_one_has_read_is_not_waited_for(server):
    ask_all(server)
    server.turn()
    server.generator.begin()
    server.apc_manager.segments.keep(SHARED[:-10])
    server.cancel("r1")
    assert server.turn() == ["r2", "r3", "r4"]


def test_nothing_kept_ends_with_everybody_read(server):
    """A cache without room: each waits for those before it, and no longer."""
    ask_all(server)
    for name in ("r1", "r2", "r3", "r4"):
        assert server.turn() == [name]
        server.generator.begin()
        assert server.turn() == []
        server.generator._prompt_batch = None


def test_a_step_that_fails_everybody_leaves_nobody_waiting(server):
    ask_all(server)
    server.turn()
    server.active.clear()
    assert server.turn() == ["r2"]


@pytest.mark.parametrize("shared, waits", [(WORTH - 1, False), (WORTH, True)])
def test_how_much_is_worth_it(server, shared, waits):
    for number in (1, 2):
        server.ask(f"r{number}", prompt(number, start=range(1, shared + 1)))
    assert server.turn() == (["r1"] if waits else ["r1", "r2"])


def test_what_is_known_already_is_not_waited_for(server):
    server.apc_manager.segments.keep(SHARED[:100])
    ask_all(server, 2)
    assert server.turn() == ["r1", "r2"]


def test_salts_do_not_meet(server):
    server.ask("r1", prompt(1), salt=1)
    server.ask("r2", prompt(2), salt=2)
    server.ask("r3", prompt(3), salt=None)
    server.ask("r4", prompt(4), salt=None)
    assert server.turn() == ["r1", "r2", "r3", "r4"]


def test_a_prefix_that_leaves_pictures_behind_it_is_not_shared():
    """It could not be restored: pictures are embedded with all of the prompt."""
    server = Server(SimpleNamespace(image_token_id=IMAGE))
    for number in (1, 2):
        server.ask(f"r{number}", [*prompt(number), IMAGE, 5])
    server.ask("r3", [*SHARED[:9], IMAGE, *SHARED, 3])
    server.ask("r4", [*SHARED[:9], IMAGE, *SHARED, 4])
    assert server.turn() == ["r1", "r2", "r3"]
    assert server.waiting == ["r4"]


@pytest.mark.parametrize("capacity", [None, 3])
def test_while_nobody_comes_and_nobody_waits_no_row_is_looked_at(
    server, monkeypatch, capacity
):
    """It is asked at every step."""
    server.ask("r1", prompt(1))
    server.turn()
    monkeypatch.setattr(core, "_rows_at_work", None)
    assert server.turn(capacity) == []


def test_a_prompt_is_looked_through_once_however_many_rows_it_meets(
    server, monkeypatch
):
    """Every row that decodes waits meanwhile."""
    server.generator.prefill_batch_size = 1
    for number in range(1, 7):
        server.generator.insert(server.uids, prompt(number, 9 - number))
        server.active[server.uids] = {"request_id": f"old{number}"}
        server.uids += 1
    core.note_rows_at_work(server, server.generator, server.active)
    apc = importlib.import_module("mlx_vlm.apc")
    looked, compared = [], []

    def counted(log, original):
        return lambda ids, other: log.append(len(ids)) or original(ids, other)

    for owner, name, log in (
        (apc, "media_safe_prefix_min", looked),
        (shared, "common_prefix", compared),
    ):
        monkeypatch.setattr(owner, name, counted(log, getattr(owner, name)))
    ask_all(server, 3)
    assert server.turn(capacity=9) == [] and server.waiting == ["r1", "r2", "r3"]
    assert len(looked) == 3 and len(compared) == 3 * 6


def test_followers_take_no_place(server):
    ask_all(server)
    server.ask("stranger", [5, 5, 5])
    assert server.turn(capacity=2) == ["r1", "stranger"]
    server.ask("late", [6, 6])
    assert server.turn(capacity=0) == []
    server.generator.begin()
    server.generator.finish()
    # Those that waited go before what came later.
    assert server.turn(capacity=1) == ["r2"]
    assert server.turn(capacity=3) == ["r3", "r4", "late"]


def test_a_shorter_one_that_comes_in_the_next_look_leads(server):
    """With few places the queue is read in parts, and decided as a whole."""
    for number, length in ((1, 30), (2, 20), (3, 10)):
        server.ask(f"r{number}", prompt(number, length))
    assert server.turn(capacity=2) == ["r3"]
    assert server.waiting == ["r1", "r2"]


def test_one_that_arrives_during_the_prefill_waits(server):
    server.ask("r1", prompt(1, 500))
    server.turn()
    server.ask("r2", prompt(2))
    # Not begun, and longer: the newcomer is read first, or beside it.
    assert server.turn() == ["r2"]
    server.generator.begin()
    server.ask("r3", prompt(3))
    assert server.turn() == []


def test_two_followers_may_share_more(server):
    longer = [*SHARED, *range(5000, 5000 + WORTH)]
    server.ask("r1", prompt(1))
    server.ask("r2", prompt(2, start=longer))
    server.ask("r3", prompt(3, start=longer))
    assert server.turn() == ["r1"]
    server.generator.begin()
    server.generator.finish()
    assert server.turn() == ["r2"]
    assert server.waiting == ["r3"]


class TestStopping:
    """Nobody is left behind by a server that ends."""

    def test_all_are_admitted(self, server):
        ask_all(server)
        server.turn()
        server._stop = True
        server.requests.put(None)
        assert server.turn() == ["r2", "r3", "r4"] and not server.stopped

    def test_it_goes_on_while_there_is_no_room(self, server):
        ask_all(server)
        server.turn()
        server._stop = True
        server.requests.put(None)
        assert server.turn(capacity=1) == ["r2"]
        assert not server.requests.empty() and not server.stopped

    def test_it_stops_when_nobody_waits(self, server):
        server._stop = True
        server.requests.put(None)
        assert server.turn() == [] and server.stopped


@pytest.mark.parametrize("missing", ["mode", "segments"])
def test_without_a_tree_requests_pass(server, missing):
    if missing == "mode":
        server.apc_mode = None
    else:
        server.apc_manager.segments = None
    ask_all(server)
    assert len(server.turn()) == 4


def test_a_fault_holds_nobody_up(server, monkeypatch):
    def raising(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr(server.apc_manager.segments, "peek", raising)
    ask_all(server)
    assert len(server.turn()) == 4


class TestOneBatch:
    """Rows that have been embedded already do not follow one another in one batch."""

    def admit(self, generator):
        with core.rows_that_share_nothing(generator):
            size = min(
                generator.prefill_batch_size, len(generator._unprocessed_sequences)
            )
            rows = generator._unprocessed_sequences[:size]
            generator._unprocessed_sequences = generator._unprocessed_sequences[size:]
        assert generator.prefill_batch_size == 8
        return [row[0] for row in rows]

    @pytest.fixture
    def generator(self, server):
        return server.generator

    def test_those_that_share_go_one_after_the_other(self, generator):
        for uid, ids in enumerate((prompt(1, 30), prompt(2, 20), [3, 4, 5])):
            generator.insert(uid, ids)
        assert self.admit(generator) == [2, 1]
        generator.apc_manager.segments.keep(prompt(2, 20))
        generator.insert(3, prompt(3, 40))
        assert self.admit(generator) == [0, 3]

    def test_nothing_is_compared_while_nobody_can_be_admitted(self, generator):
        for uid in (1, 2):
            generator.insert(uid, prompt(uid))
        generator._prompt_batch = object()
        with core.rows_that_share_nothing(generator):
            assert generator.prefill_batch_size == 8
        assert not hasattr(generator, "followers_among")

    def test_rows_that_wait_are_compared_once(self, generator, monkeypatch):
        calls = []
        monkeypatch.setattr(
            core, "best_leader", lambda *args: calls.append(args) or None
        )
        for uid in (1, 2):
            generator.insert(uid, prompt(uid))
        for _ in range(5):
            with core.rows_that_share_nothing(generator):
                assert generator.prefill_batch_size == 8
        assert len(calls) == 2
        generator.apc_manager.segments.keep([1, 2])
        with core.rows_that_share_nothing(generator):
            assert generator.prefill_batch_size == 8
        assert len(calls) == 4

    def test_a_step_without_a_queue_touches_nothing(self, generator):
        before = dict(vars(generator))
        with core.rows_that_share_nothing(generator):
            assert vars(generator) == before
        assert vars(generator) == before
