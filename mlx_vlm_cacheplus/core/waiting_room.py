"""Room to wait: who waits for tokens takes no thread from anybody else.

A handler waits for its row, and for each of its tokens, in a thread.  asyncio has
min(32, cpus + 4) of them for everything.  With as many replies waiting, the next request
is not even queued, a token that is there is not fetched, and whatever else the server
does in threads stands still.  Here replies wait in threads of their own.

Invariants:

1. Nobody waits for a thread, up to :data:`MOST` of them.
2. A thread without work stays only while there are no more threads than requests in
   flight; so the last one ends with the last request.
3. A wait whose task is cancelled goes on until its reply says something.  That is
   needed: it may be the one that is given the row, and lets it go.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

T = TypeVar("T")

# Threads of one process; what a system allows is a few thousand.
MOST = 1024


class WaitingRoom(Executor):
    """Threads to wait in, as many as there are requests in flight."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._called = threading.Condition()
        # Idle are those that look for work, or are about to.
        self._threads = self._idle = self._requests = 0

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """A request is in flight while this is open."""
        with self._called:
            self._requests += 1
        try:
            yield
        finally:
            with self._called:
                self._requests -= 1
                self._called.notify()  # one thread too many may be idle

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call a function in a thread of the room.

        Raises:
            RuntimeError: the system has no thread for it; nothing is called.
        """
        future: Future[T] = Future()
        with self._called:
            if self._idle > len(self._work):
                self._called.notify()
            elif self._threads < self._most:
                # A daemon: a server that ends does not wait for who waits here.
                # First: where the system has no more threads nothing has changed.
                threading.Thread(target=self._run, name="waiting", daemon=True).start()
                self._threads += 1
                self._idle += 1
            self._work.append((future, functools.partial(fn, *args, **kwargs)))
        return future

    def _run(self) -> None:
        while (work := self._next()) is not None:
            future, call = work
            tell: Callable[[], object] = future.done
            if future.set_running_or_notify_cancel():
                try:
                    tell = functools.partial(future.set_result, call())
                except BaseException as problem:
                    tell = functools.partial(future.set_exception, problem)
            # First: who is told may call again before this thread is back.
            with self._called:
                self._idle += 1
            tell()
            # What nobody has waited for is let go now, not with the next work.
            del work, future, call, tell

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """The next call, or None where the thread is to end."""
        with self._called:
            while not self._work and self._threads <= self._requests:
                self._called.wait()
            self._idle -= 1
            if self._work:
                return self._work.popleft()
            self._threads -= 1
            return None


ROOM = WaitingRoom()


async def wait_in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """As ``asyncio.to_thread``, for a function that waits for a reply."""
    context = contextvars.copy_context()
    call = functools.partial(context.run, function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(ROOM, call)


class RequestsHaveRoom:
    """ASGI middleware: the room grows and shrinks with the requests in flight."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        with ROOM.request():
            await self.app(scope, receive, send)
