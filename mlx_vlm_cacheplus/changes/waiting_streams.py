"""A reply that waits for its tokens takes no thread from anybody else."""

from __future__ import annotations

import importlib
from typing import Any

from ..change import Change, Target

APP = "mlx_vlm.server.app"
# Where handlers wait for replies.
HANDLERS = (
    "mlx_vlm.server.openai",
    "mlx_vlm.server.anthropic",
    "mlx_vlm.server.compaction",
)


class WithRoom:
    """asyncio, as handlers see it: what they call in a thread has room to wait."""

    def __init__(self, asyncio: Any, to_thread: Any):
        self._asyncio = asyncio
        self.to_thread = to_thread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._asyncio, name)


class WaitingStreams(Change):
    name = "waiting-streams"
    summary = "Replies that wait for tokens do not keep other requests from being queued or answered"
    targets = (
        *(Target(module, "asyncio") for module in HANDLERS),
        Target(APP, "app"),
    )
    why = (
        "Each reply that waits, streamed or not, holds one of asyncio's min(32, cpus + 4) threads. With 12 of them on an "
        "8-core machine the 13th request is not queued, and no token is fetched, until another reply says something."
    )
    upstream = "no issue yet"
    remove_when = (
        "handlers wait for tokens on the event loop, or in threads of their own"
    )
    marks = ("mlx_vlm.server.waiting_room:wait_in_thread",)

    def apply(self, patcher: Any) -> None:
        import asyncio

        from starlette.middleware import Middleware

        from ..core import waiting_room as core

        for module in HANDLERS:
            patcher.set(module, "asyncio", WithRoom(asyncio, core.wait_in_thread))
        app = importlib.import_module(APP).app
        counting = Middleware(core.RequestsHaveRoom)
        patcher.set_within(
            APP, "app", "user_middleware", [counting, *app.user_middleware]
        )


CHANGE = WaitingStreams()
