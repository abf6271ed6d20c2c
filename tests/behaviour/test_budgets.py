"""The cache stays within its bytes, and keeps what a live session read last."""

from __future__ import annotations

import importlib
import threading
import time

import pytest

from tests.behaviour.sessions import new_tokens
from tests.behaviour.stored import leases, stored
from tests.behaviour.test_rejoin import records
from tests.fakes.server import system, user

change = pytest.mark.change("segment-tree")
guard = pytest.mark.guard
MODELS = ["dense", "hybrid"]
GB = 2**30
ENOUGH = 8 * GB
CHUNK = 16
REPLY = "fox yak sun elk owl fox yak sun elk owl"


@pytest.fixture(autouse=True)
def memory_is_free(monkeypatch):
    """Where nothing is known of the machine's memory, stock takes the budget for all
    there is, and room for the next prefill would be taken from it."""
    apc = importlib.import_module("mlx_vlm.apc")
    monkeypatch.setattr(apc, "_free_ram_bytes", lambda: ENOUGH)


def side(number, lines=40):
    """A prompt with a system text of its own."""
    text = records(lines)["content"]
    return [system(f"{number} side\n{text}"), user("get: amber3")]


def resident(server):
    stats = server.get("/v1/cache/stats")
    assert stats["resident_bytes"] <= stats["memory_max_bytes"]
    return stats["resident_bytes"]


def with_room_for(make_server, model, prompts):
    """A server whose budget holds so many side prompts."""
    server = make_server(model)
    server.chat(side(0), max_tokens=8)
    return make_server(model, apc_memory_max_gb=prompts * resident(server) / GB)


@change
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.given_by_others("segment-tree", "hybrid")
def test_the_session_that_goes_on_is_kept(make_server, model):
    """C09, C24.  Stock keeps the oldest blocks and stores no more of a session."""
    server = with_room_for(make_server, model, 2.2)
    for number in range(6):
        server.chat(side(number), max_tokens=8)
        resident(server)
    asked, replies = side("mine", 20), []
    for turn in range(10):
        reply = server.chat(asked, script=REPLY, max_tokens=30)
        resident(server)
        if replies:
            assert reply.prefilled <= new_tokens(reply, replies) + 1
        replies.append(reply)
        asked += [reply.message(), user("again " * 6 + str(turn))]
    server.assert_cold(server.chat(asked, max_tokens=8))


@change
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("prompts", [3, 12])
def test_side_prompts_do_not_push_a_session_out(make_server, model, prompts):
    """C09: title and topic requests between two turns."""
    server = with_room_for(make_server, model, 4)
    asked, replies = side("mine"), []
    replies.append(server.chat(asked, script=REPLY, max_tokens=30))
    for number in range(prompts):
        server.chat(side(number, lines=4), max_tokens=4)
        resident(server)
    asked += [replies[0].message(), user("go on")]
    reply = server.chat(asked, max_tokens=8)
    assert reply.prefilled <= new_tokens(reply, replies) + 1
    server.assert_cold(reply)


@guard
@pytest.mark.parametrize("model", MODELS)
def test_twenty_prompts_stay_within_the_budget(make_server, model):
    """C24."""
    server = with_room_for(make_server, model, 2.5)
    for number in range(20):
        server.chat(side(number, lines=10 + 3 * (number % 5)), max_tokens=4)
        resident(server)
    assert resident(server) > 0


@change
@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_that_does_not_fit_evicts_nobody(make_server, model):
    server = with_room_for(make_server, model, 1.6)
    one = server.chat(side("mine"), script=REPLY, max_tokens=30)
    before = resident(server)
    large = server.chat(side("large", lines=120), max_tokens=4)
    assert len(large.prompt_ids) > 2 * len(one.prompt_ids)
    assert resident(server) == before
    two = server.chat([*side("mine"), one.message(), user("on")], max_tokens=8)
    assert two.prefilled <= new_tokens(two, [one]) + 1
    server.assert_cold(two)


@guard
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("budget", [0.0, 1e-7])
def test_no_budget_still_serves(make_server, model, budget):
    server = make_server(model, apc_memory_max_gb=budget)
    asked = side("mine", 10)
    for _ in range(2):
        reply = server.chat(asked, max_tokens=8)
        assert reply.cached_tokens == resident(server) == 0
        server.assert_cold(reply)
        asked += [reply.message(), user("on")]


@guard
def test_reset_and_unload_give_everything_back(make_server):
    server = make_server("hybrid")
    server.chat(side("mine"), max_tokens=8)
    assert resident(server) > 0
    server.post("/v1/cache/reset", {})
    assert resident(server) == leases(server.manager) == 0
    assert server.chat(side("mine"), max_tokens=8).cached_tokens == 0
    before = server.manager
    server.reload()
    assert before.stats_snapshot()["resident_bytes"] == 0
    assert resident(server) == 0
    assert server.chat(side("mine"), max_tokens=8).cached_tokens == 0


# -- a client that hangs up while its prompt is read -------------------------------------
def hang_up_in_prefill(server, monkeypatch, messages, chunks):
    """Stream, and hang up once so many chunks of the prompt have been read.

    The generation thread stands there until the server has noticed; no wait is longer
    than ten seconds.
    """
    batch = importlib.import_module("mlx_vlm.generate.ar").PromptProcessingBatch
    step, read, there = batch.prompt_step, [], threading.Event()

    def counted(self):
        out = step(self)
        read.append(out)
        if len(read) == chunks:
            there.set()
            deadline = time.monotonic() + 10
            while not server.generator._cancelled and time.monotonic() < deadline:
                time.sleep(0.002)
        return out

    body = {"model": server.settings.model, "messages": messages, "stream": True}
    with monkeypatch.context() as patch:
        patch.setattr(batch, "prompt_step", counted)
        with server.host.client.stream(
            "POST", "/v1/chat/completions", json={**body, "temperature": 0}
        ):
            assert there.wait(10), "the prompt was not read in so many chunks"
        server.wait_idle()
    assert len(read) <= chunks + 1, "abandoned work went on"


@change
@pytest.mark.parametrize("model", MODELS)
def test_a_retry_goes_on_where_the_prefill_was_left(make_server, monkeypatch, model):
    """C12: each attempt gets further, and the last one is a cold run's."""
    server = make_server(model, env={"PREFILL_STEP_SIZE": str(CHUNK)})
    for attempt in range(1, 4):
        hang_up_in_prefill(server, monkeypatch, side("mine"), chunks=5)
        assert leases(server.manager) == 0
        held = max((len(key) for key, _ in stored(server.manager)), default=0)
        assert held >= attempt * 4 * CHUNK
    reply = server.chat(side("mine"), max_tokens=12)
    assert reply.cached_tokens >= 3 * 4 * CHUNK
    assert reply.cached_tokens + reply.prefilled == len(reply.prompt_ids)
    server.assert_cold(reply)
