"""core/hang_ups.py by itself: whose a cancel is, and that no reply outlives its request."""

from __future__ import annotations

import asyncio
import operator
import queue
from types import SimpleNamespace

import pytest

from mlx_vlm_cacheplus.core import hang_ups as core


class Reply:
    """Stock's iterator of a reply, as far as it is closed."""

    def __init__(self):
        self.closed = 0
        core.belongs_to_request(self)

    def close(self):
        self.closed += 1


def serve(app, kind="http"):
    """Run one request through the middleware; raises what the application raises."""
    asyncio.run(core.RepliesEndWithTheirRequest(app)({"type": kind}, None, None))


# -- whose a cancel is -------------------------------------------------------------------
def test_a_uid_is_the_plain_uid_and_no_other_replys():
    one, two = core.RowUid.of(0, queue.Queue()), core.RowUid.of(0, queue.Queue())
    plain = 0
    assert one == plain and plain == one and one in {plain: "row"}
    assert one != two and one != 1
    for equal, other in ((one, plain), (plain, one), (one, one)):
        assert not operator.ne(equal, other), "both operators must agree"
    assert not operator.eq(one, two)
    assert len({one, two}) == 2, "a set of cancels keeps both"


def test_a_late_cancel_is_dropped_and_the_rows_own_is_kept():
    ended, running = queue.Queue(), queue.Queue()
    late, own = core.RowUid.of(0, ended), core.RowUid.of(0, running)
    server = SimpleNamespace(rows_in_flight={0: {"rqueue": running}})
    for cancels in ([late, own], [own, late]):
        assert [c.rqueue for c in core.own_cancels(server, set(cancels))] == [running]
    assert core.own_cancels(server, {late}) == set()


def test_a_plain_uid_and_one_without_a_row_are_left_to_stock():
    server = SimpleNamespace(rows_in_flight={0: {"rqueue": queue.Queue()}})
    unknown = core.RowUid.of(7, queue.Queue())
    assert core.own_cancels(server, {0, unknown}) == {0, 7}
    assert core.own_cancels(SimpleNamespace(), {0, unknown}) == {0, 7}


# -- no reply outlives its request -------------------------------------------------------
def test_a_stream_that_stands_in_a_write_is_cancelled():
    """The generator is never closed here: somebody still holds it."""
    replies, streams = [], []

    async def stream():
        replies.append(await asyncio.to_thread(Reply))
        yield "a piece"

    async def app(scope, receive, send):
        streams.append(stream())
        await anext(streams[0])
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        serve(app)
    assert [reply.closed for reply in replies] == [1]


def test_a_reply_that_comes_after_its_request_is_closed_at_once():
    replies = []

    async def app(scope, receive, send):
        late = asyncio.get_running_loop().create_future()

        async def ask():
            await late
            replies.append(Reply())

        tasks.append(asyncio.create_task(ask()))
        waiting.append(late)

    async def main():
        await core.RepliesEndWithTheirRequest(app)({"type": "http"}, None, None)
        assert not replies
        waiting[0].set_result(None)
        await tasks[0]

    tasks, waiting = [], []
    asyncio.run(main())
    assert [reply.closed for reply in replies] == [1]


def test_a_client_that_goes_before_its_whole_reply_is_there():
    """The handler does not look, and would send nothing for a long time."""
    gone, closed = asyncio.Event(), []
    body = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.request", "body": b"}", "more_body": False},
    ]

    async def receive():
        if body:
            return body.pop(0)
        await gone.wait()
        return {"type": "http.disconnect"}

    class Ends(Reply):
        def close(self):
            super().close()
            row_ended.set()

    async def app(scope, receive, send):
        assert [(await receive())["more_body"] for _ in range(2)] == [True, False]
        reply = Ends()
        await asyncio.sleep(0)
        assert reply.closed == 0
        gone.set()
        await row_ended.wait()
        closed.append(reply.closed)

    row_ended = asyncio.Event()
    served = core.RepliesEndWithTheirRequest(app)
    asyncio.run(served({"type": "http"}, receive, None))
    assert closed == [1]


def test_nobody_watches_a_request_that_has_been_answered():
    async def receive():
        if asked:
            await asyncio.Event().wait()
        asked.append("body")
        return {"type": "http.request", "body": b""}

    async def app(scope, receive, send):
        await receive()

    async def main():
        await core.RepliesEndWithTheirRequest(app)({"type": "http"}, receive, None)
        await asyncio.sleep(0)
        return asyncio.all_tasks() - {asyncio.current_task()}

    asked = []
    assert asyncio.run(main()) == set()


def test_requests_at_once_end_their_own_replies():
    replies = {}

    async def app(scope, receive, send):
        replies[scope["path"]] = Reply()
        if scope["path"] == "long":
            await first_ended.wait()
            assert (replies["short"].closed, replies["long"].closed) == (1, 0)

    async def main():
        served = core.RepliesEndWithTheirRequest(app)
        scopes = {path: {"type": "http", "path": path} for path in ("long", "short")}
        long = asyncio.create_task(served(scopes["long"], None, None))
        await served(scopes["short"], None, None)
        first_ended.set()
        await long

    first_ended = asyncio.Event()
    asyncio.run(main())
    assert replies["long"].closed == 1


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
def test_what_is_no_request_has_no_replies_to_end(kind):
    replies = []

    async def app(scope, receive, send):
        replies.append(Reply())

    serve(app, kind)
    assert [reply.closed for reply in replies] == [0]


def test_a_reply_that_is_let_go_is_not_kept():
    replies = core.Replies()
    reply = Reply()
    replies.add(reply)
    del reply
    assert not list(replies._replies)
