"""See the sessions of a server's cache, pin, unpin and forget them, and reset it.

    GET  /v1/cache/sessions
    POST /v1/cache/sessions/pin      {"session": ID}
    POST /v1/cache/sessions/unpin    {"session": ID}
    POST /v1/cache/sessions/forget   {"session": ID}
    POST /v1/cache/sessions/reset    {"scope": "ram", "disk" or "all"}

They ask for the same key as the server's other management endpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from .segment_cache import SegmentCache
from .segment_tree import Node, SegmentTree
from .session_policy import fair_level
from .session_table import Session, Sessions, standing

PATH = "/v1/cache/sessions"
SCOPES = ("ram", "disk", "all")
# How long a reset waits for the disk.
DISK_SECONDS = 20.0


class Refused(Exception):
    """What was asked for is not done; ``status`` is the answer's."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


def list_sessions(cache: SegmentCache, sessions: Sessions) -> dict[str, Any]:
    """All sessions, the one that was used last first."""
    with cache.lock:
        held = standing(list(cache._trees.values()), sessions.table)
        live = [
            held[number]["bytes"]
            for number, session in sessions.table.items()
            if sessions.is_live(session)
        ]
        level = min(fair_level(live, cache.max_bytes), cache.max_bytes)
        rows = [
            _row(s, held[n], cache.max_bytes, sessions.is_live(s))
            for n, s in sessions.table.items()
        ]
    rows.sort(key=lambda row: -row["last_use"])
    return {
        "budget_bytes": cache.max_bytes,
        "bytes": cache.nbytes,
        "fair_share_bytes": int(level),
        "sessions": rows,
    }


def _row(
    session: Session, held: dict[str, float], budget: int, live: bool
) -> dict[str, Any]:
    return {
        "id": session.id,
        "named": session.name is not None,
        "tenant": session.tenant,
        "state": "live" if live else "idle" if session.requests > 1 else "new",
        "pinned": session.pinned,
        "tokens": int(held["tokens"]),
        "bytes": int(held["bytes"]),
        "shared_bytes": int(held["shared"]),
        "share": round(held["bytes"] / budget, 4) if budget else 0.0,
        "requests": session.requests,
        "hits": session.hits,
        "restored_tokens": session.restored,
        "last_use": round(session.last_time, 3),
    }


def pin(cache: SegmentCache, sessions: Sessions, wanted: str, on: bool) -> dict:
    """Keep what a session stands on whatever is short, or no more.

    Raises:
        Refused: more than half of the budget would be pinned.
    """
    with cache.lock:
        found = _called(sessions, wanted)
        held = standing(list(cache._trees.values()), sessions.table)
        pinned = {n for n, s in sessions.table.items() if s.pinned}
        pinned |= {session.number for session in found}
        if on and 2 * sum(held[n]["bytes"] for n in pinned) > cache.max_bytes:
            raise Refused(409, "more than half of the budget would be pinned")
        for session in found:
            session.pinned = on
    return {"session": wanted, "pinned": on}


def forget(cache: SegmentCache, sessions: Sessions, wanted: str) -> dict:
    """Drop what only this session stands on, and its record.

    What a request of it stands on stays until that has ended, and is then nobody's.
    """
    with cache.lock:
        before = cache.nbytes
        found = _called(sessions, wanted)
        numbers = frozenset(session.number for session in found)
        for session in found:
            sessions.forget(session)
        own = []
        for (salt, _), tree in cache._trees.items():
            for node in reversed(list(tree)):
                if not node.sessions & numbers:
                    continue
                path = tuple(i for part in node.path() for i in part.ids)
                if _leave(tree, node, numbers, sessions):
                    own.append((int(salt), path, node.start))
        cache.drop_empty()
        if cache.tier is not None:
            cache.tier.forget(wanted, own)
        return {"session": wanted, "freed_bytes": before - cache.nbytes}


def _leave(
    tree: SegmentTree, node: Node, numbers: frozenset[int], sessions: Sessions
) -> bool:
    """Drop a node that is nobody else's; whether it has gone."""
    node.sessions -= numbers
    others = any(number in sessions.table for number in node.sessions)
    if others or node.children or node.leases:
        return False
    tree.remove(node)
    return True


def reset(
    manager: Any,
    sessions: Sessions,
    scope: str,
    clear: Sequence[Callable[[], None]] = (),
) -> dict:
    """Empty the cache.

    Args:
        scope: "ram" drops what is held there, and the records of sessions: what is on
            disk too comes back from there; "disk" drops that; "all" leaves nothing
            behind.
        clear: what else holds parts of prompts.
    """
    if scope not in SCOPES:
        raise Refused(400, f"scope must be one of {', '.join(SCOPES)}")
    tier = getattr(manager, "disk_tier", None)
    if scope == "disk":
        if tier is None:
            raise Refused(409, "nothing is kept on disk")
        return {"scope": scope, "removed_entries": _clear_disk(tier)}
    cache: SegmentCache = manager.segments
    with cache.lock:
        freed = cache.nbytes
        forgotten = len(sessions.table)
    manager.clear()
    done = {"scope": scope, "freed_bytes": freed, "forgotten_sessions": forgotten}
    if scope == "all":
        # Ids of prompts and replies.
        manager.__dict__.pop("reply_ids", None)
        for also in clear:
            also()
        if tier is not None:
            done["removed_entries"] = _clear_disk(tier)
    return done


def _clear_disk(tier: Any) -> int:
    try:
        return int(tier.clear(DISK_SECONDS))
    except OSError as fault:
        raise Refused(503, str(fault)) from None


def _called(sessions: Sessions, wanted: str) -> list[Session]:
    found = sessions.called(wanted)
    if not found:
        raise Refused(404, f"there is no session {wanted!r}")
    return found


def make_routes(
    server: Any, clear: Sequence[Callable[[], None]] = (), path: str = PATH
) -> Sequence[Route]:
    """The routes; ``server`` is the module whose key check stands before everything."""

    async def answer(request: Request) -> JSONResponse:
        server._require_management_api_key(request)
        manager = server.runtime.apc_manager
        policy = getattr(getattr(manager, "segments", None), "policy", None)
        if not isinstance(policy, Sessions):
            return JSONResponse({"enabled": False})
        verb = request.path_params.get("verb")
        fields = await _fields(request) if verb else {}
        try:
            done = await asyncio.to_thread(_do, manager, policy, verb, fields, clear)
        except Refused as refused:
            raise HTTPException(refused.status, str(refused)) from None
        return JSONResponse({"enabled": True, **done})

    return (
        Route(path, answer, methods=["GET"], include_in_schema=False),
        Route(path + "/{verb}", answer, methods=["POST"], include_in_schema=False),
    )


def _do(
    manager: Any,
    sessions: Sessions,
    verb: str | None,
    fields: dict[str, Any],
    clear: Sequence[Callable[[], None]],
) -> dict:
    cache: SegmentCache = manager.segments
    if verb is None:
        return list_sessions(cache, sessions)
    if verb == "reset":
        return reset(manager, sessions, str(fields.get("scope", "ram")), clear)
    if verb not in ("pin", "unpin", "forget"):
        raise Refused(404, "pin, unpin, forget or reset")
    wanted = fields.get("session")
    if not isinstance(wanted, str) or not wanted:
        raise Refused(400, "session must be the id of one")
    if verb == "forget":
        return forget(cache, sessions, wanted)
    return pin(cache, sessions, wanted, verb == "pin")


async def _fields(request: Request) -> dict[str, Any]:
    try:
        fields = await request.json()
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise HTTPException(400, "the body must be a JSON object")
    return fields
