"""`mlx-vlm-cacheplus cache ls|show|verify|rm|gc|export|import`: the folder on disk, with or without a server."""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import tarfile
from collections.abc import Callable
from typing import Any

from rich.table import Table

from ..core.disk_folder import Refused
from ..core.disk_index import Entry
from ..core.disk_settings import size_text
from ..core.disk_store import DiskStore, Spoiled
from ..core.disk_summary import summary
from ..settings import UsageError
from .cache_file import Failed, check_file, export_to, import_from, must_write
from .cache_folder import place_of, what_is_wrong
from .tables import show

FAULTS = (OSError, sqlite3.Error, tarfile.TarError, Refused, ValueError, KeyError)


def run(options: argparse.Namespace) -> int:
    """0 where all is well; 1 where something is not; UsageError for a mistake, before anything is opened."""
    place = place_of(options)
    if options.action in ("show", "rm"):
        _number(options)
    wrong = what_is_wrong(place.folder) if options.action != "import" else ""
    if wrong and options.disk is not None:
        raise UsageError(wrong)
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 1
    if options.action in ("export", "import"):
        check_file(options)
    store = DiskStore(place.folder, place.max_bytes)
    try:
        store.open()
        answer = ACTIONS[options.action](store, options)
    except Refused as problem:
        raise UsageError(str(problem)) from None
    except (*FAULTS, Spoiled, Failed) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    finally:
        store.close()
    if options.json:
        print(json.dumps(answer, indent=2))
    else:
        _print(options.action, answer)
    return 1 if answer.get("spoiled") and options.action == "verify" else 0


def _ls(store: DiskStore, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "folder": str(store.folder.path),
        "bytes": store.nbytes,
        "max_bytes": store.max_bytes,
        "clock": store.clock,
        "in_use_by_a_server": not store.is_writer,
        "roots": summary(store),
    }


def _show(store: DiskStore, options: argparse.Namespace) -> dict[str, Any]:
    root = _number(options)
    entries = [e for e in store.all_entries() if e.root == root]
    if not entries:
        raise Failed(f"there is no root {root}: see `cache ls`")
    rows = [_row(entry) for entry in entries]
    return {"root": root, "clock": store.clock, "entries": rows}


def _row(entry: Entry) -> dict[str, Any]:
    return {
        "entry": entry.number,
        "parent": entry.parent,
        "kind": ("span", "state", "drafter's part")[entry.kind],
        "tokens": f"{entry.start}-{entry.stop}",
        "bytes": entry.nbytes,
        "state": bool(entry.has_state),
        "drafter": bool(entry.companion),
        "session": entry.session,
        "last_use": entry.last_use,
    }


def _verify(store: DiskStore, options: argparse.Namespace) -> dict[str, Any]:
    spoiled, missing_parent = [], []
    entries = store.all_entries()
    numbers = {entry.number for entry in entries} | {0}
    for entry in entries:
        if entry.parent not in numbers:
            missing_parent.append(entry.number)
        try:
            store.read(entry)
        except Spoiled as fault:
            spoiled.append({"entry": entry.number, "why": str(fault)})
    return {
        "entries": len(entries),
        "bytes": store.nbytes,
        "spoiled": spoiled,
        "without_parent": missing_parent,
    }


def _rm(store: DiskStore, options: argparse.Namespace) -> dict[str, Any]:
    must_write(store)
    entries, root = store.all_entries(), _number(options)
    if root is None:
        store.forget_replies()
    else:
        entries = [entry for entry in entries if entry.root == root]
        if not entries:
            raise Failed(f"there is no root {root}: see `cache ls`")
    before = store.nbytes
    store.drop(entries)
    return {"removed_entries": len(entries), "freed_bytes": before - store.nbytes}


def _gc(store: DiskStore, options: argparse.Namespace) -> dict[str, Any]:
    """Left-overs, spoiled entries, and what is beyond the limit."""
    must_write(store)
    before, swept, spoiled = store.nbytes, store.sweep(), 0
    for entry in store.all_entries():
        try:
            store.read(entry)
        except Spoiled:
            spoiled += len(store.drop_spoiled(entry))
    evicted = store.make_room(0) or []
    return {
        "swept_files": swept,
        "spoiled_entries": spoiled,
        "evicted_entries": len(evicted),
        "freed_bytes": before - store.nbytes,
    }


def _number(options: argparse.Namespace) -> int | None:
    """The root that is named; None for all of them, which only rm takes."""
    if options.action == "rm" and options.what == "all":
        return None
    if not options.what.isdecimal():
        what = "the number of a root" + (", or all" if options.action == "rm" else "")
        raise UsageError(
            f"{options.action} needs {what}, not {options.what!r}: see `cache ls`"
        )
    return int(options.what)


Action = Callable[[DiskStore, argparse.Namespace], "dict[str, Any]"]
ACTIONS: dict[str, Action] = {
    "ls": _ls,
    "show": _show,
    "verify": _verify,
    "rm": _rm,
    "gc": _gc,
    "export": export_to,
    "import": import_from,
}


def _print(action: str, answer: dict[str, Any]) -> None:
    rows = answer.get("roots") if action == "ls" else answer.get("entries")
    if not isinstance(rows, list):
        print(f"{action}: " + ", ".join(f"{k} {v}" for k, v in answer.items()))
        return
    title = ""
    if action == "ls":
        limit = answer["max_bytes"]
        of = f" of {size_text(limit)}" if limit else ", no limit"
        title = f"{answer['folder']}: {size_text(answer['bytes'])}{of}"
    names = [name.replace("_", " ") for name in rows[0]] if rows else ["nothing"]
    table = Table(*names)
    for row in rows:
        steps = answer["clock"] - row["last_use"]
        ago = f"{steps} step{'' if steps == 1 else 's'} ago"
        table.add_row(*map(str, {**row, "last_use": ago}.values()))
    show(table, title)
    if rows:
        print("a step is a look-up or a write in this folder")
