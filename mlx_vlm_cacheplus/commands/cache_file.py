"""A conversation as one file: what `cache export` writes and `cache import` reads."""

from __future__ import annotations

import argparse
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

from ..core.disk_index import SPAN, Entry, New
from ..core.disk_safetensors import head_of
from ..core.disk_sections import Changed, check
from ..core.disk_store import DiskStore
from ..settings import UsageError
from .arguments import unwritable

MANIFEST = "manifest.json"
# What a file of another kind raises where it is read as one of these.
FOREIGN = (tarfile.TarError, KeyError, TypeError, ValueError, EOFError)


class Failed(Exception):
    """It was not done; the text says why."""


def check_file(options: argparse.Namespace) -> None:
    """Raise UsageError for a file that an export cannot write or an import cannot read, before the store is opened."""
    if options.action == "export":
        _check_target(options.file, options.format)
    elif options.format == "mlx-lm":
        raise UsageError(
            "a file in the format mlx-lm does not say which tokens it stands for: import one in the format tar"
        )
    else:
        _check_source(options.what)


def _check_target(file: Path, form: str) -> None:
    if form == "mlx-lm":
        from .cache_mlx_lm import Unsuitable, check_target

        try:
            check_target(file)
        except Unsuitable as why:
            raise UsageError(str(why)) from None
    problem = unwritable(str(file))
    if not problem and os.path.lexists(file):
        problem = f"{file} is there already: name another file"
    if problem:
        raise UsageError(problem)


def _check_source(name: str) -> None:
    try:
        with tarfile.open(name, "r:") as source:
            _read_manifest(source)
    except OSError as fault:
        raise UsageError(
            f"{name} cannot be read ({fault.strerror or fault}): name a file that `cache export` wrote"
        ) from None
    except (*FOREIGN, Failed) as problem:
        raise UsageError(
            f"{name} is not a whole file of `cache export` ({_reason(problem)}): name one that is"
        ) from None


def _read_manifest(source: tarfile.TarFile) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_get(source, MANIFEST))
    for name in ROOT:
        found["root"][name]
    members = set(source.getnames())
    for row in found["entries"]:
        for name in (*COPIED, "ids", "checksum"):
            row[name]
        if str(row["number"]) not in members:
            raise Failed(f"entry {row['number']} is not in it")
    return found


def _reason(problem: Exception) -> str:
    if isinstance(problem, KeyError):
        return f"{problem.args[0]} is not in it"
    return str(problem)


def export_to(store: DiskStore, options: argparse.Namespace) -> dict[str, Any]:
    """A conversation, from its first token to its last, as one file."""
    entries = {entry.number: entry for entry in store.all_entries()}
    last = _last_of(options.what, entries)
    spans = _path_to(last, entries)
    below = {span.number for span in spans}
    extra = [e for e in entries.values() if e.kind and e.parent in below]
    if options.format == "mlx-lm":
        from .cache_mlx_lm import write

        tokens = write(store, spans, extra, options.file)
        return {"file": str(options.file), "tokens": tokens}
    chosen = [*spans, *extra]
    manifest = _manifest(store, last.root, chosen)
    with tarfile.open(options.file, "x") as out:
        try:
            _put(out, MANIFEST, json.dumps(manifest).encode())
            for entry in chosen:
                _put(out, str(entry.number), bytes(store.read(entry)))
        except BaseException:
            options.file.unlink()
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
    if what and what.isdecimal() and int(what) in entries:
        found = entries[int(what)]
        if found.kind == SPAN:
            return found
    spans = [e for e in entries.values() if e.session == what and e.kind == SPAN]
    if not what or not spans:
        raise Failed(f"there is no entry or session {what!r}: see `cache show ROOT`")
    return max(spans, key=lambda entry: (entry.last_use, entry.stop))


def import_from(store: DiskStore, options: argparse.Namespace) -> dict[str, Any]:
    """What ``export`` wrote; what is there already stays as it is."""
    must_write(store)
    with tarfile.open(options.what, "r:") as source:
        try:
            return _take_all(store, source)
        except FOREIGN as problem:
            raise Failed(
                f"{options.what} is damaged ({_reason(problem)}): export the conversation again"
            ) from None


def _take_all(store: DiskStore, source: tarfile.TarFile) -> dict[str, Any]:
    manifest = _read_manifest(source)
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
    try:
        found = source.extractfile(name)
    except KeyError:
        found = None
    if found is None:
        raise Failed(f"{name} is not in it")
    return found.read()


def must_write(store: DiskStore) -> None:
    """Raise Failed where a server has the folder's lock."""
    if not store.is_writer:
        raise Failed(f"a server uses {store.folder.path}: end it, or ask it")
