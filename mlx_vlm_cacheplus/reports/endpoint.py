"""GET /v1/cacheplus/report: the last records and the totals. The schema is docs/REPORT.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core import merge_pace
from .ledger import Ledger
from .tracker import Tracker

PATH = "/v1/cacheplus/report"
DEFAULT_LAST = 20


class BadCount(ValueError):
    """`last` is no number of records."""


def parse_last(text: str | None) -> int:
    """A whole number of at least 0. More than are kept gives all that are kept."""
    if text is None:
        return DEFAULT_LAST
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise BadCount(f"last={text[:40]!r} is not a whole number of at least 0")
    return int(text)


def build_report(
    tracker: Tracker, last: int, changes: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """changes: the activation report as a dict; settings: stock's prefix-cache settings in force."""
    ledger: Ledger = tracker.ledger
    return {
        **changes,
        "settings": settings,
        "history": tracker.history_size(),
        "totals": ledger.totals(),
        "records": ledger.last(last),
    }


def make_route(tracker: Tracker, server: Any) -> Any:
    """The route; server is stock's module `mlx_vlm.server.app`, whose key check stands before everything."""
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from .. import status

    async def cacheplus_report(request: Request) -> JSONResponse:
        server._require_management_api_key(request)
        try:
            last = parse_last(request.query_params.get("last"))
        except BadCount as problem:
            raise HTTPException(status_code=400, detail=str(problem)) from None
        report = status()
        changes = report.as_dict() if report is not None else {}
        settings = _or_empty(
            lambda: prefix_cache_settings(server.runtime.config.current())
        )
        if report is not None and "speculative-merge" in report.applied:
            settings["draft_merge"] = merge_pace.mode()
        return JSONResponse(build_report(tracker, last, changes, settings))

    return Route(PATH, cacheplus_report, methods=["GET"], include_in_schema=False)


def prefix_cache_settings(current: dict[str, Any]) -> dict[str, Any]:
    """Of stock's settings those that decide what is kept and reused."""
    kept = ("apc_", "kv_", "max_kv_size", "draft_", "prefill_")
    return {name: value for name, value in current.items() if name.startswith(kept)}


def _or_empty(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return read()
    except Exception:
        return {}
