"""However many replies wait for their tokens, the server queues and answers what else comes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time

import httpx
import pytest

from tests.behaviour.stored import leases
from tests.fakes import replies
from tests.fakes.server import ENDPOINTS, RequestFailed, user

pytestmark = pytest.mark.change("waiting-streams")

MANY = 64
BUDGET, LONG = 3, 30
# Threads that are not the waiting replies': the two pools of asyncio and of the framework,
# which are full where many requests arrive at once.
POOLS = min(32, (os.cpu_count() or 1) + 4) + 40 + 2
# What stands still for so long, as on stock, is given up; nothing is measured in it.
PATIENCE = 6.0

# One is enough to see that a leg is as it must be; a tree must have all.
each_endpoint = pytest.mark.parametrize(
    "endpoint",
    [
        "chat",
        *(pytest.param(e, marks=pytest.mark.slow) for e in ENDPOINTS if e != "chat"),
    ],
)


class Crowd:
    """Requests that are sent at once from one thread, and what became of them."""

    def __init__(self, server, endpoint="chat", stream=True, budget=BUDGET):
        self.server, self.stream = server, stream
        self.path, field, length = ENDPOINTS[endpoint]
        self.read = getattr(replies, f"{endpoint}_{'stream' if stream else 'reply'}")
        script = server.encode(" fox") * budget
        self.records = [server._expect(script, "stop") for _ in range(MANY)]
        more = {length: budget}
        if endpoint == "chat" and stream:
            more["stream_options"] = {"include_usage": True}
        self.bodies = [
            server._body({field: [user(f"{n} fox")]}, record, stream, more)
            for n, record in enumerate(self.records)
        ]
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self):
        self.thread.start()
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.AsyncClient(
            base_url=self.server.host.client.base_url, timeout=None, limits=limits
        )
        self.jobs = [
            asyncio.run_coroutine_threadsafe(self._ask(body), self.loop)
            for body in self.bodies
        ]
        return self

    async def _ask(self, body):
        if not self.stream:
            answer = await self.client.post(self.path, json=body)
            return self.read(answer.raise_for_status().json())
        async with self.client.stream("POST", self.path, json=body) as answer:
            answer.raise_for_status()
            lines = [line async for line in answer.aiter_lines()]
            return self.read(list(replies.sse_events(lines)))

    def replies(self):
        return [job.result(60) for job in self.jobs]

    def hang_up(self):
        for job in self.jobs:
            job.cancel()
        asyncio.run_coroutine_threadsafe(self.client.aclose(), self.loop).result(30)

    def __exit__(self, *_):
        self.hang_up()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)
        self.loop.close()


@contextlib.contextmanager
def blocked(server, rows=0):
    """The generation thread stands still, once so many rows are in flight, until ``go_on``.

    Gives (standing, go_on): an event, and a function.
    """
    standing, go_on = threading.Event(), threading.Event()
    inner = server.generator._drain_cancellations

    def stand():
        if len(server.recorder.active or ()) >= rows:
            standing.set()
            go_on.wait()
        return inner()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.generator, "_drain_cancellations", stand)
        try:
            assert rows or standing.wait(PATIENCE)
            yield standing, go_on.set
        finally:
            go_on.set()


def until(count, wanted):
    """Whether a count comes to be what is wanted; given up when it stands still."""
    seen, deadline = count(), time.monotonic() + PATIENCE
    while not wanted(seen) and time.monotonic() < deadline:
        time.sleep(0.01)
        if count() != seen:
            seen, deadline = count(), time.monotonic() + PATIENCE
    return wanted(seen)


def queued(server):
    return server.generator.requests.qsize()


def all_queued(server):
    return until(lambda: queued(server), lambda count: count == MANY)


def look_around(server):
    """What an operator asks for meanwhile, and a client that counts tokens."""
    ask = {"model": server.settings.model, "messages": [user("fox fox")]}
    try:
        for path in ("/health", "/metrics", "/v1/models", "/v1/cache/stats"):
            assert server.get(path, timeout=PATIENCE)
        count = server.post("/v1/messages/count_tokens", ask, timeout=PATIENCE)
    except httpx.TimeoutException as late:
        raise RequestFailed(0, f"no answer: {late!r}") from None
    assert count["input_tokens"] > 0


@pytest.fixture
def server(make_server):
    server = make_server("dense")
    server.chat([user("fox")], max_tokens=2)
    server.wait_idle()
    return server


def is_as_before(server, threads):
    """Nothing is left of the crowd: no row, no lease, no thread."""
    server.wait_idle()
    assert queued(server) == 0 and leases(server.manager) == 0
    assert until(threading.active_count, lambda count: count <= threads + POOLS)


@pytest.mark.parametrize("stream", [True, False])
@each_endpoint
def test_all_are_queued_and_all_else_is_answered(server, endpoint, stream):
    before = threading.active_count()
    with blocked(server) as (_, go_on), Crowd(server, endpoint, stream) as crowd:
        assert all_queued(server), f"{queued(server)} are queued"
        look_around(server)
        assert queued(server) == MANY and not any(job.done() for job in crowd.jobs)
        assert threading.active_count() <= before + MANY + POOLS
        go_on()
        got = crowd.replies()
    assert all(reply.completion_tokens == BUDGET for reply in got)
    is_as_before(server, before)


@pytest.mark.parametrize("stream", [True, False])
def test_all_wait_for_the_next_token(server, stream):
    before = threading.active_count()
    with blocked(server) as (_, admit), Crowd(server, "chat", stream, LONG) as crowd:
        assert all_queued(server), f"{queued(server)} are queued"
        with blocked(server, MANY) as (standing, go_on):
            admit()
            rows = server.recorder.active
            assert until(lambda: len(rows), lambda count: count == MANY)
            assert standing.wait(PATIENCE)
            look_around(server)
            assert not any(job.done() for job in crowd.jobs)
            assert threading.active_count() <= before + MANY + POOLS
            go_on()
        got = crowd.replies()
    assert all(reply.completion_tokens == LONG for reply in got)
    is_as_before(server, before)


@each_endpoint
def test_who_hangs_up_while_it_waits_is_gone(server, endpoint):
    """Also where the row comes after its client has gone."""
    from mlx_vlm.generate.ar import PromptProcessingBatch

    if not hasattr(PromptProcessingBatch, "remove"):
        pytest.skip("before 0.7.8 stock takes no row out of a prompt batch of several")
    before = threading.active_count()
    with blocked(server) as (_, go_on), Crowd(server, endpoint, budget=LONG) as crowd:
        assert all_queued(server), f"{queued(server)} are queued"
        crowd.hang_up()
        look_around(server)
        go_on()
        is_as_before(server, before)
    said = [len(record.ids) for record in crowd.records]
    assert max(said) < LONG, "no reply was written to its end for nobody"
    assert server.chat([user("fox")], max_tokens=2).ids
