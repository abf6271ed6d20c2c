"""`mlx-vlm-cacheplus cache`: the sessions of a running server, and what is kept on disk."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx

PATH = "/v1/cacheplus/sessions"
DEFAULT_URL = "http://127.0.0.1:8080"
KEY_VARIABLE = "MLX_VLM_SERVER_API_KEY"
SECONDS = 30
SERVER_ACTIONS = ("sessions", "pin", "unpin", "forget", "reset")
DISK_ACTIONS = ("ls", "show", "verify", "rm", "gc", "export", "import")


class Unanswered(Exception):
    """The server did not do it; the text says why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=(*SERVER_ACTIONS, *DISK_ACTIONS),
        help="sessions, pin, unpin, forget and reset ask a running server; the others look into the folder on disk",
    )
    parser.add_argument(
        "what",
        nargs="?",
        help="id of a session for pin, unpin and forget; root for show and rm (or all); entry or session for export; "
        "file for import",
    )
    parser.add_argument("file", nargs="?", type=Path, help="file for export")
    parser.add_argument(
        "--format",
        choices=("tar", "mlx-lm"),
        default="tar",
        help="of an exported file (%(default)s); mlx-lm: a file for mlx_lm.generate --prompt-cache-file, which needs the extra interop",
    )
    parser.add_argument("--disk", metavar="DIR", help="the folder on disk")
    parser.add_argument("--gb", help="its limit, for gc and import")
    parser.add_argument("--url", default=DEFAULT_URL, help="server (%(default)s)")
    parser.add_argument(
        "--scope",
        choices=("ram", "disk", "all"),
        default="ram",
        help="of a reset (%(default)s); all leaves nothing behind",
    )
    parser.add_argument(
        "--key",
        default=os.environ.get(KEY_VARIABLE),
        help=f"the server's API key; default: ${KEY_VARIABLE}",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(options: argparse.Namespace) -> int:
    """0 where it was done; 1 where the server refused or is not there; 2 for a mistake."""
    if options.action in DISK_ACTIONS:
        from .cache_disk import run as run_on_disk

        return run_on_disk(options)
    needs_session = options.action in ("pin", "unpin", "forget")
    if needs_session != bool(options.what):
        need = "needs" if needs_session else "takes no"
        print(f"error: {options.action} {need} session id", file=sys.stderr)
        return 2
    try:
        answer = _ask(options)
    except Unanswered as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(answer, indent=2))
    elif options.action == "sessions":
        _print_sessions(answer)
    else:
        done = ", ".join(f"{k} {v}" for k, v in answer.items() if k != "enabled")
        print(f"{options.action}: {done}")
    return 0


def _ask(options: argparse.Namespace) -> dict[str, Any]:
    url, headers = options.url.rstrip("/") + PATH, {}
    if options.key:
        headers["Authorization"] = f"Bearer {options.key}"
    try:
        with httpx.Client(headers=headers, timeout=SECONDS) as http:
            if options.action == "sessions":
                answer = http.get(url)
            elif options.action == "reset":
                answer = http.post(f"{url}/reset", json={"scope": options.scope})
            else:
                answer = http.post(
                    f"{url}/{options.action}", json={"session": options.what}
                )
    except (httpx.HTTPError, httpx.InvalidURL) as problem:
        raise Unanswered(f"no answer from {options.url}: {problem}") from None
    try:
        found: dict[str, Any] = answer.json()
        if answer.is_error:
            raise Unanswered(f"{answer.status_code}: {found['detail']}")
        enabled = found.get("enabled")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Unanswered(
            f"{answer.status_code}: is it a server with session-partitions?"
        ) from None
    if not enabled:
        raise Unanswered("the server keeps no sessions: its prefix cache is off")
    return found


def _print_sessions(answer: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    # Sessions of several tenants may have one name.
    with_tenants = any(row.get("tenant") for row in answer["sessions"])
    table = Table(
        "session",
        *(["tenant"] if with_tenants else []),
        "state",
        "tokens",
        "in RAM",
        "share",
        "requests",
        "hits",
        "last use",
        title=f"{_size(answer['bytes'])} of {_size(answer['budget_bytes'])} in use; "
        f"fair share {_size(answer['fair_share_bytes'])}",
    )
    for row in answer["sessions"]:
        state = row["state"] + (", pinned" if row["pinned"] else "")
        table.add_row(
            row["id"],
            *([row.get("tenant") or ""] if with_tenants else []),
            state,
            str(row["tokens"]),
            _size(row["bytes"]),
            f"{100 * row['share']:.1f} %",
            str(row["requests"]),
            str(row["hits"]),
            f"{max(0, time.time() - row['last_use']):.0f} s ago",
        )
    Console().print(table)


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
