"""`mlx-vlm-cacheplus cache ls|show|verify|rm|gc|export|import`: the folder on disk, with or without a server."""

from __future__ import annotations

import argparse
import io
import json
import os
import sqlite3
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..changes.durable_disk import FOLDER, LIMIT
from ..core.disk_folder import Refused
from ..core.disk_index import SPAN, Entry, New
from ..core.disk_safetensors import head_of
from ..core.disk_sections import Changed, check
from ..core.disk_settings import settings_of
from ..core.disk_store import DiskStore, Spoiled
from ..core.disk_summary import summary
from ..settings import UsageError

MANIFEST = "manifest.json"
FAULTS = (OSError, sqlite3.Error, tarfile.TarError, Refused, ValueError, KeyError)


class Failed(Exception):
    """It was not done; the text says why."""


def run(options: argparse.Namespace) -> int:
    """0 where all is well; 1 where something is not; 2 for a mistake."""
    folder = _folder(options)
    wanted = options.action == "import" or (folder is not None and folder.is_dir())
    if folder is None or not wanted:
        print(f"error: there is no disk cache at {folder}", file=sys.stderr)
        return 1
    store = DiskStore(folder, _limit(options))
    try:
        store.open()
        answer = ACTIONS[options.action](store, options)
    except (*FAULTS, Spoiled, Failed, UsageError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2 if isinstance(problem, UsageError) else 1
    finally:
        store.close()
    if options.json:
        print(json.dumps(answer, indent=2))
    else:
        _print(options.action, answer)
    return 1 if answer.get("spoiled") and options.action == "verify" else 0


def _folder(options: argparse.Namespace) -> Path | None:
    found = settings_of(None, folder=options.disk or os.environ.get(FOLDER))
    return None if found is None else found.folder


def _limit(options: argparse.Namespace) -> int | None:
    found = settings_of(None, folder=".", max_gb=options.gb or os.environ.get(LIMIT))
    return None if found is None else found.max_bytes


def _ls(store: DiskStore, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "folder": str(store.folder.path),
        "bytes": store.nbytes,
        "max_bytes": store.max_bytes,
        "in_use_by_a_server": not store.is_writer,
        "roots": summary(store),
    }


def _show(store: DiskStore, options: argparse.Namespace) -> dict[str, Any]:
    root = _number(options)
    entries = [e for e in store.all_entries() if e.root == root]
    if not entries:
        raise Failed(f"there is no root {root}: see `cache ls`")
    return {"root": root, "entries": [_row(entry) for entry in entries]}


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
    _must_write(store)
    entries = store.all_entries()
    if options.what != "all":
        root = _number(options)
        entries = [entry for entry in entries if entry.root == root]
    else:
        store.forget_replies()
    if not entries and options.what != "all":
        raise Failed(f"there is no root {options.what}: see `cache ls`")
    before = store.nbytes
    store.drop(entries)
    return {"removed_entries": len(entries), "freed_bytes": before - store.nbytes}


def _gc(store: DiskStore, options: argparse.Namespace) -> dict[str, Any]:
    """Left-overs, spoiled entries, and what is beyond the limit."""
    _must_write(store)
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


def _export(store: DiskStore, options: argparse.Namespace) -> dict[str, Any]:
    """A conversation, from its first token to its last, as one file."""
    entries = {entry.number: entry for entry in store.all_entries()}
    last = _last_of(options.what, entries)
    spans = _path_to(last, entries)
    below = {span.number for span in spans}
    extra = [e for e in entries.values() if e.kind and e.parent in below]
    if options.format == "mlx-lm":
        from .cache_mlx_lm import write

        tokens = write(store, spans, extra, _file(options))
        return {"file": str(options.file), "tokens": tokens}
    chosen = [*spans, *extra]
    manifest = _manifest(store, last.root, chosen)
    with tarfile.open(_file(options), "x") as out:
        try:
            _put(out, MANIFEST, json.dumps(manifest).encode())
            for entry in chosen:
                _put(out, str(entry.number), bytes(store.read(entry)))
        except BaseException:
            _file(options).unlink()
            raise
    return {"file": str(options.file), "entries": len(chosen), "tokens": last.stop}


def _path_to(last: Entry, entries: dict[int, Entry]) -> list[Entry]:
    path, place = [], last.number
    while place:
        path.append(entries[place])
        place = entries[place].parent
    return path[::-1]


def _manifest(store: DiskStore, root: int, chosen: list[Entry]) -> dict[str, Any]:
    roots = {number: rest for number, *rest in store.all_roots()}
    identity, salt, layout, note = roots[root]
    return {
        "root": {"identity": identity, "salt": salt, "layout": layout, "note": note},
        "entries": [
            {
                **{name: getattr(entry, name) for name in COPIED},
                "ids": store.ids_of(entry) if entry.kind == SPAN else [],
                "checksum": entry.checksum.hex(),
            }
            for entry in chosen
        ],
    }


COPIED = (
    *("number", "parent", "kind", "start", "stop", "has_state", "companion"),
    *("turns", "session", "nbytes"),
)


def _last_of(what: str | None, entries: dict[int, Entry]) -> Entry:
    """The span that is named by number, or the longest one of a session."""
    if what and what.isdigit() and int(what) in entries:
        found = entries[int(what)]
        if found.kind == SPAN:
            return found
    spans = [e for e in entries.values() if e.session == what and e.kind == SPAN]
    if not what or not spans:
        raise Failed(f"there is no entry or session {what!r}: see `cache show ROOT`")
    return max(spans, key=lambda entry: (entry.last_use, entry.stop))


def _import(store: DiskStore, options: argparse.Namespace) -> dict[str, Any]:
    """What ``export`` wrote; what is there already stays as it is."""
    _must_write(store)
    if options.format == "mlx-lm":
        raise UsageError("such a file does not say which tokens it stands for")
    with tarfile.open(options.what or "", "r:") as source:
        manifest = json.loads(_get(source, MANIFEST))
        root = store.root(*(manifest["root"][key] for key in ROOT))
        numbers: dict[int, int] = {0: 0}
        taken = 0
        for row in manifest["entries"]:
            content = _get(source, str(row["number"]))
            try:
                check(content, bytes.fromhex(row["checksum"]))
            except Changed as fault:
                raise Failed(
                    f"entry {row['number']} of the file is spoiled: {fault}"
                ) from None
            there = _same(store, root, numbers[row["parent"]], row)
            if there is None:
                here = set(numbers.values())
                if store.make_room(len(content), keep=here, root=root) is None:
                    raise Failed("it does not fit: see --gb")
                (there,) = store.add(
                    [_new(store.reserve(), root, numbers[row["parent"]], row, content)]
                )
                taken += 1
            numbers[row["number"]] = there.number
    return {"entries": len(manifest["entries"]), "added_entries": taken}


ROOT = ("identity", "salt", "layout", "note")


def _same(store: DiskStore, root: int, parent: int, row: Any) -> Entry | None:
    checksum = bytes.fromhex(row["checksum"])
    for entry in store.all_entries():
        same = (entry.root, entry.parent, entry.kind) == (root, parent, row["kind"])
        if same and (entry.checksum == checksum or _begin_alike(store, entry, row)):
            return entry
    return None


def _begin_alike(store: DiskStore, entry: Entry, row: Any) -> bool:
    """Two spans of one parent may not begin alike; what is there stays."""
    if row["kind"] != SPAN or entry.start != row["start"]:
        return False
    known = store.ids_of(entry)
    if known[:1] != row["ids"][:1]:
        return False
    if known != row["ids"]:
        raise Failed("the folder has another version of this conversation")
    return True


def _new(number: int, root: int, parent: int, row: Any, content: bytes) -> New:
    head = head_of(content)
    return New(
        *(number, root, parent, row["kind"], row["start"], row["stop"]),
        ids=row["ids"],
        chunks=[head, memoryview(content)[len(head) :]],
        nbytes=len(content),
        has_state=bool(row["has_state"]),
        companion=row["companion"],
        turns=row["turns"],
        session=row["session"],
    )


def _put(out: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o600
    out.addfile(info, io.BytesIO(content))


def _get(source: tarfile.TarFile, name: str) -> bytes:
    found = source.extractfile(name)
    if found is None:
        raise Failed(f"{name} is not in the file")
    return found.read()


def _must_write(store: DiskStore) -> None:
    if not store.is_writer:
        raise Failed(f"a server uses {store.folder.path}: end it, or ask it")


def _number(options: argparse.Namespace) -> int:
    if not options.what or not options.what.isdigit():
        raise UsageError(f"{options.action} needs the number of a root: see `cache ls`")
    return int(options.what)


def _file(options: argparse.Namespace) -> Path:
    if options.file is None:
        raise UsageError(f"{options.action} needs a file")
    path: Path = options.file
    return path


Action = Callable[[DiskStore, argparse.Namespace], "dict[str, Any]"]
ACTIONS: dict[str, Action] = {
    "ls": _ls,
    "show": _show,
    "verify": _verify,
    "rm": _rm,
    "gc": _gc,
    "export": _export,
    "import": _import,
}


def _print(action: str, answer: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = answer.get("roots") if action == "ls" else answer.get("entries")
    if not isinstance(rows, list):
        print(f"{action}: " + ", ".join(f"{k} {v}" for k, v in answer.items()))
        return
    title = None
    if action == "ls":
        limit = answer["max_bytes"]
        of = f" of {limit / (1 << 30):g} GiB" if limit else ""
        title = f"{answer['folder']}: {answer['bytes'] / 1e6:.1f} MB{of}"
    table = Table(*(rows[0] if rows else ["nothing"]), title=title)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
