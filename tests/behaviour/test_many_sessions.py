"""Four, eight and sixteen agents at once: each as if it were alone."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.behaviour.sessions import new_tokens
from tests.behaviour.test_rejoin import records
from tests.behaviour.test_session_partitions import (
    Agent,
    bytes_held,
    memory_is_free,
    with_room_for,
)
from tests.fakes.server import system, user

__all__ = ["memory_is_free"]

change = pytest.mark.change("segment-tree")
MODELS = ["dense", "hybrid"]
TURNS = 3
SHARED = f"shared system\n{records(12)['content']}"


def at_once(agents, work):
    """What ``work`` gives for each agent, all in step with each other."""
    start = threading.Barrier(len(agents))

    def run(agent):
        start.wait()
        return work(agent)

    with ThreadPoolExecutor(len(agents)) as pool:
        return list(pool.map(run, agents))


def talk(server, count):
    """Agents of whom every second one has the shared system prompt; all at once."""
    server.chat([system(SHARED), user("get: amber1")], max_tokens=1)
    agents = [
        Agent(server, f"agent {n}", shared=SHARED if n % 2 else None)
        for n in range(count)
    ]
    at_once(agents, lambda agent: [agent.turn() for _ in range(TURNS)])
    bytes_held(server)
    return agents


@change
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("count", [4, 8, pytest.param(16, marks=pytest.mark.slow)])
def test_each_reads_what_is_new_and_answers_as_if_alone(make_server, model, count):
    """C14, C30: with a budget of what all of them stand on."""
    server = with_room_for(make_server, model, lambda s: talk(s, count))
    agents = talk(server, count)
    for agent in agents:
        first, *later = agent.replies
        for n, reply in enumerate(later, 1):
            assert reply.prefilled <= new_tokens(reply, agent.replies[:n]) + 1
        if agent.asked[0] == system(SHARED):
            assert first.cached_tokens > 0.8 * len(server.encode(SHARED))
        assert all(reply.completion_tokens for reply in agent.replies)
    for agent in agents:
        server.assert_cold(agent.turn(script=None))


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("dense", marks=pytest.mark.guard),
        # Stock answers with HTTP 500 where rows decode while others are prefilled.
        pytest.param("hybrid", marks=pytest.mark.change("row-positions")),
    ],
)
@pytest.mark.given_by_others("row-positions", "hybrid")
def test_nobody_starves(make_server, model):
    """Of agents of equal size the slowest waits at most twice as long as the fastest."""
    server = make_server(model, env={"PREFILL_STEP_SIZE": "16"})
    agents = [Agent(server, f"agent {n}") for n in range(8)]
    asked = [{"messages": agent.asked, "max_tokens": 40} for agent in agents[:5]]
    for reply in server.two_groups(asked[:2], 3, asked[2:]):
        server.assert_cold(reply)

    def wait(agent):
        seconds = 0.0
        for _ in range(6):
            start = time.monotonic()
            reply = server.chat(agent.asked, max_tokens=1, headers=agent.headers)
            seconds += time.monotonic() - start
            agent.asked += [reply.message(), user("again")]
        return seconds

    waits = at_once(agents, wait)
    assert max(waits) <= 2 * min(waits)
