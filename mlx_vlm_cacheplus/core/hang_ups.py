"""A client that hangs up cancels its own row: always, and no other.

Three things can go wrong between a client and its row.

- The cancel does not come.  A stream that is cancelled while it writes, and not while
  it waits for a token, is left where it stands: its ``finally``, which would close the
  reply, runs when a garbage collection finds the stream.  Until then the row decodes
  for nobody.  It is the rule where a client stops reading before it goes.  Here each
  HTTP request knows its replies, and cancels the unfinished ones when it ends.
- Nobody looks.  A reply that is sent as a whole has nothing to send until it is there,
  so that a client that gave up is found out when its row has ended.  Here the request
  is told of it while its handler works.
- The cancel comes late.  Uids start again with each batch generator, so that the
  cancel of an ended reply names a stranger's row.  Here a cancel says by its reply's
  queue whose it is, and the thread that owns the rows compares.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class RowUid(int):
    """A row's uid that knows whose it is: the queue of a reply does not come again.

    Equal to the plain uid, but not to the same uid of another reply, so that a set
    of cancels keeps both.
    """

    rqueue: Any

    @classmethod
    def of(cls, uid: Any, rqueue: Any) -> Any:
        """The uid of the row that answers on ``rqueue``; what is no number, as it is."""
        if not isinstance(uid, int):
            return uid
        own = cls(uid)
        own.rqueue = rqueue
        return own

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowUid) and other.rqueue is not self.rqueue:
            return False
        return int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def own_cancels(server: Any, uids: Iterable[int]) -> set[int]:
    """The cancels that name a row of their own reply, or of no row in flight.

    A client that lets go of a finished reply late would otherwise cancel a stranger.
    Call on the thread that owns the rows.
    """
    active = server.__dict__.get("rows_in_flight", {})

    def is_own(uid: int) -> bool:
        rqueue = getattr(uid, "rqueue", None)
        return rqueue is None or uid not in active or active[uid]["rqueue"] is rqueue

    return {uid for uid in uids if is_own(uid)}


class Replies:
    """The replies that one HTTP request has asked for; used by any thread."""

    def __init__(self) -> None:
        self._replies: WeakSet[Any] = WeakSet()
        self._ended = False
        self._lock = threading.Lock()

    def add(self, reply: Any) -> None:
        """Take note of a reply; of a request that has ended, it is closed at once."""
        with self._lock:
            if not self._ended:
                self._replies.add(reply)
                return
        reply.close()

    def end(self) -> None:
        """Close every reply; closing one that is finished does nothing."""
        with self._lock:
            self._ended = True
            replies = list(self._replies)
        for reply in replies:
            reply.close()


# The request that the current task serves; ``asyncio.to_thread`` carries it along.
_replies: ContextVar[Replies | None] = ContextVar("replies", default=None)


def belongs_to_request(reply: Any) -> None:
    """Note that the HTTP request being served here, if any, waits for this reply."""
    replies = _replies.get()
    if replies is not None:
        replies.add(reply)


class RepliesEndWithTheirRequest:
    """ASGI middleware: no reply goes on after the HTTP request that asked for it."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        replies = Replies()
        watchers: list[asyncio.Task[None]] = []

        async def receive_and_watch() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not (
                message.get("more_body") or watchers
            ):
                watch = _end_with_client(receive, replies)
                watchers.append(asyncio.create_task(watch))
            return message

        token = _replies.set(replies)
        try:
            await self.app(scope, receive_and_watch, send)
        finally:
            _replies.reset(token)
            for watcher in watchers:
                watcher.cancel()
            replies.end()


async def _end_with_client(receive: Receive, replies: Replies) -> None:
    """Wait until a client has gone, whose request has been read, and end its replies."""
    while (await receive())["type"] != "http.disconnect":
        pass
    replies.end()
