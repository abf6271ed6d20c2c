"""core/waiting_room.py by itself: nobody waits for a thread, and none stays behind."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time
import weakref
from concurrent.futures import wait

import pytest

from mlx_vlm_cacheplus.core import waiting_room as core

MANY = 64
SECONDS = 30


@pytest.fixture
def room(monkeypatch):
    made = core.WaitingRoom()
    monkeypatch.setattr(core, "ROOM", made)
    return made


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "waiting"]


def ended(room):
    """Whether all threads of a room come to their end."""
    for thread in threads():
        thread.join(SECONDS)
    return room._threads == room._idle == 0 and not threads()


class Waiters:
    """Calls that wait until they are let go; ``there`` once so many have come."""

    def __init__(self, room, count):
        self.there, self.go_on = threading.Barrier(count + 1), threading.Event()
        self.jobs = [room.submit(self._wait, n) for n in range(count)]
        self.there.wait(SECONDS)

    def _wait(self, n):
        self.there.wait(SECONDS)
        self.go_on.wait(SECONDS)
        return n

    def end(self):
        self.go_on.set()
        return [job.result(SECONDS) for job in self.jobs]


def test_nobody_waits_for_a_thread(room):
    waiting = Waiters(room, MANY)
    assert room.submit(lambda: "now").result(SECONDS) == "now"
    assert waiting.end() == list(range(MANY))
    assert ended(room)


def test_threads_are_used_again_while_requests_are_in_flight(room):
    with room.request(), room.request():
        seen = {room.submit(threading.get_ident).result(SECONDS) for _ in range(200)}
        assert len(seen) <= 2 and len(threads()) <= 2
    assert ended(room)


def test_threads_end_with_their_requests(room):
    requests = [room.request() for _ in range(8)]
    for request in requests:
        request.__enter__()
    Waiters(room, 8).end()
    assert room._threads == 8
    for left in reversed(range(8)):
        before = threads()
        requests[left].__exit__(None, None, None)
        # One of them ends; which one is the lock's choice.
        deadline = time.monotonic() + SECONDS
        while len(threads()) == len(before) and time.monotonic() < deadline:
            before[0].join(0.001)
        assert len(threads()) == left
    assert ended(room)


def test_beyond_the_most_calls_wait():
    room = core.WaitingRoom(most=2)
    with room.request(), room.request():
        waiting, order = Waiters(room, 2), []
        late = [room.submit(order.append, n) for n in range(5)]
        assert len(threads()) == 2 and not any(job.done() for job in late)
        late[3].cancel()
        waiting.end()
        wait(late, SECONDS)
        assert sorted(order) == [0, 1, 2, 4]
    assert ended(room)


def test_an_error_is_the_callers_and_the_thread_goes_on(room):
    def fail():
        raise ValueError("planted")

    with room.request():
        with pytest.raises(ValueError, match="planted"):
            room.submit(fail).result(SECONDS)
        with pytest.raises(KeyboardInterrupt):
            room.submit(exec, "raise KeyboardInterrupt").result(SECONDS)
        assert room.submit(lambda: 1).result(SECONDS) == 1
    assert ended(room)


def test_a_thread_that_cannot_be_had_fails_its_own_call_alone(room, monkeypatch):
    called = []

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with room.request():
        with monkeypatch.context() as no_more:
            no_more.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="start new thread"):
                room.submit(called.append, "refused")
        assert room._threads == room._idle == 0
        room.submit(called.append, "later").result(SECONDS)
    assert called == ["later"] and ended(room)


class Reply:
    """What a wait brings, and cancels its row when it is let go."""


def test_what_nobody_takes_is_let_go_at_once(room):
    """A row that comes after its client has gone: only the reply's end cancels it."""
    there, go_on, gone = threading.Event(), threading.Event(), threading.Event()

    def row():
        reply = Reply()
        weakref.finalize(reply, gone.set)
        there.set()
        go_on.wait(SECONDS)
        return reply

    async def client():
        job = asyncio.ensure_future(core.wait_in_thread(row))
        await asyncio.to_thread(there.wait, SECONDS)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    gc.disable()
    try:
        with room.request():
            asyncio.run(client())
            assert not gone.is_set()
            go_on.set()
            assert gone.wait(SECONDS), "kept until the thread's next work"
    finally:
        gc.enable()
    assert ended(room)


def test_a_wait_is_as_to_threads(room):
    variable = contextvars.ContextVar("variable", default=0)

    async def ask():
        variable.set(5)
        with pytest.raises(ZeroDivisionError):
            await core.wait_in_thread(divmod, 1, 0)
        return await core.wait_in_thread(lambda a, b: (variable.get(), a, b), 1, b=2)

    assert asyncio.run(ask()) == (5, 1, 2)
    assert ended(room)


def test_requests_are_counted_until_they_end(room):
    seen = []

    async def app(scope, receive, send):
        seen.append(room._requests)
        if scope.get("fails"):
            raise ValueError("planted")

    middleware = core.RequestsHaveRoom(app)
    asyncio.run(middleware({"type": "lifespan"}, None, None))
    asyncio.run(middleware({"type": "http"}, None, None))
    with pytest.raises(ValueError, match="planted"):
        asyncio.run(middleware({"type": "http", "fails": True}, None, None))
    assert seen == [0, 1, 1] and room._requests == 0


def test_the_rest_of_asyncio_is_asyncio():
    from mlx_vlm_cacheplus.changes.waiting_streams import WithRoom

    seen = WithRoom(asyncio, core.wait_in_thread)
    assert seen.CancelledError is asyncio.CancelledError and seen.sleep is asyncio.sleep
    assert seen.to_thread is core.wait_in_thread
