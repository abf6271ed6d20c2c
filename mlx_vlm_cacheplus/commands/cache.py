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

from ..core.disk_settings import size_text
from ..settings import UsageError
from .arguments import check_key, server_address
from .tables import show

PATH = "/v1/cacheplus/sessions"
DEFAULT_URL = "http://127.0.0.1:8080"
KEY_VARIABLE = "MLX_VLM_SERVER_API_KEY"
SECONDS = 30
SERVER_ACTIONS = ("sessions", "pin", "unpin", "forget", "reset")
DISK_ACTIONS = ("ls", "show", "verify", "rm", "gc", "export", "import")
# What has to be named, and where it is found.
SESSION = ("the id of a session",), "cache sessions"
NEEDS = {
    "pin": SESSION,
    "unpin": SESSION,
    "forget": SESSION,
    "show": (("the number of a root",), "cache ls"),
    "rm": (("the number of a root, or all",), "cache ls"),
    "export": (
        ("a session or the number of an entry", "a file to write"),
        "cache show ROOT",
    ),
    "import": (("a file that `cache export` wrote",), "cache --help"),
}


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
    parser.add_argument(
        "--gb", help="its limit in GB of 2**30 bytes, for gc and import; 0 is none"
    )
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        type=server_address,
        help="server (%(default)s)",
    )
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
    try:
        check_words(options)
        if options.action in DISK_ACTIONS:
            from .cache_disk import run as run_on_disk

            return run_on_disk(options)
        check_key(options.key, "--key", KEY_VARIABLE)
        answer = _ask(options)
    except UsageError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
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


def check_words(options: argparse.Namespace) -> None:
    """Raise UsageError for a word that is missing or that would have no meaning."""
    needed, where = NEEDS.get(options.action, ((), ""))
    given = [str(word) for word in (options.what, options.file) if word is not None]
    given = given if all(given) else given[: given.index("")]
    if len(given) < len(needed):
        need = " and ".join(needed[len(given) :])
        raise UsageError(f"{options.action} needs {need}: see `{where}`")
    if len(given) > len(needed):
        extra = " ".join(given[len(needed) :])
        raise UsageError(f"{options.action} takes no {extra!r}: leave it out")


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
    )
    for row in answer["sessions"]:
        state = row["state"] + (", pinned" if row["pinned"] else "")
        table.add_row(
            row["id"],
            *([row.get("tenant") or ""] if with_tenants else []),
            state,
            str(row["tokens"]),
            size_text(row["bytes"]),
            f"{100 * row['share']:.1f} %",
            str(row["requests"]),
            str(row["hits"]),
            f"{max(0, time.time() - row['last_use']):.0f} s ago",
        )
    show(
        table,
        f"{size_text(answer['bytes'])} of {size_text(answer['budget_bytes'])} in use; "
        f"fair share {size_text(answer['fair_share_bytes'])}",
    )
