"""Entries on disk are whole or not there: after writes that fail, bytes that change, writers that die."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_vlm_cacheplus.core import disk_folder
from mlx_vlm_cacheplus.core.disk_folder import ENTRIES, SPOILED, TEMPORARY
from mlx_vlm_cacheplus.core.disk_index import INDEX, STATE
from mlx_vlm_cacheplus.core.disk_sections import digest
from mlx_vlm_cacheplus.core.disk_store import DiskStore, Spoiled
from tests.contract.disk_entries import body_of, content, file_of, folder, put, store

__all__ = ["folder", "store"]

ROOT = Path(__file__).resolve().parents[2]
# Removes nothing from the path that another checkout could have put first.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def test_what_dead_writers_left_goes_and_nothing_else(folder, store):
    root = store.root("weights", 0, "layout")
    entry = put(store, root, [1, 2])
    (folder / ENTRIES / ("dead" + TEMPORARY)).write_bytes(b"half")
    (folder / ENTRIES / "unknown").write_bytes(b"whole, and in no index")
    nameless = file_of(b"its checksum is right")
    name = digest(nameless[:1]).hex()
    (folder / ENTRIES / name).write_bytes(b"".join(nameless))
    assert store.sweep() == 3
    assert body_of(store, entry) == content([1, 2])
    assert list(store.folder.names()) == [entry.name]


def failing(call, at, error):
    """``call``, which fails at its ``at``-th use."""
    uses = iter(range(1, 1_000_000))

    def stand_in(*args, **kwargs):
        if next(uses) == at:
            raise error
        return call(*args, **kwargs)

    return stand_in


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("step", ["write", "fsync", "rename"])
def test_a_write_that_fails_leaves_nothing(store, monkeypatch, code, step):
    root = store.root("weights", 0, "layout")
    with monkeypatch.context() as patch:
        patch.setattr(
            os, step, failing(getattr(os, step), 1, OSError(code, "injected"))
        )
        with pytest.raises(OSError, match="injected"):
            put(store, root, [1, 2])
    assert os.listdir(store.folder.path / ENTRIES) == []
    assert store.walk(root, [1, 2]) == [] and store.nbytes == 0
    entry = put(store, root, [1, 2])
    assert store.walk(root, [1, 2]) == [(entry, 2)]


def test_a_file_is_on_the_medium_before_its_row(store, monkeypatch):
    """In this order: content, name, folder, row."""
    steps = []
    real_force, real_rename = disk_folder.force, os.rename

    def force(handle):
        is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        steps.append("force folder" if is_folder else "force file")
        real_force(handle)

    def rename(*names):
        steps.append("rename")
        real_rename(*names)

    root = store.root("weights", 0, "layout")
    monkeypatch.setattr(disk_folder, "force", force)
    monkeypatch.setattr(os, "rename", rename)
    store._writing.set_trace_callback(
        lambda text: steps.append("row") if text.startswith("INSERT INTO ent") else None
    )
    put(store, root, [1])
    assert steps == ["force file", "rename", "force folder", "row"]


def test_every_changed_byte_is_found(store):
    root = store.root("weights", 0, "layout")
    entry = put(store, root, [1, 2, 3], body=random.Random(5).randbytes(4096))
    path = store.folder.path / ENTRIES / entry.name
    whole = path.read_bytes()
    rng = random.Random(1)
    for _ in range(1000):
        place, bit = rng.randrange(len(whole)), 1 << rng.randrange(8)
        changed = bytearray(whole)
        changed[place] ^= bit
        path.write_bytes(changed)
        with pytest.raises(Spoiled):
            store.read(entry)
    assert store.spoiled == 1000
    for damaged in (b"", whole[:-1], whole + b"x", bytes(len(whole))):
        path.write_bytes(damaged)
        with pytest.raises(Spoiled):
            store.read(entry)
    path.write_bytes(whole)
    assert store.read(entry) == whole


def test_a_spoiled_entry_goes_with_all_that_stands_on_it(store):
    root = store.root("weights", 0, "layout")
    kept = put(store, root, [8])
    bad = put(store, root, [1, 2])
    child = put(store, root, [3], bad.number, 2)
    state = put(store, root, [], child.number, 3, STATE)
    gone = store.drop_spoiled(bad)
    assert {e.number for e in gone} == {bad.number, child.number, state.number}
    assert os.listdir(store.folder.path / SPOILED) == [bad.name]
    assert list(store.folder.names()) == [kept.name]
    assert (store.entries, store.nbytes) == (1, kept.nbytes)


def test_spoiled_files_do_not_pile_up(store):
    root = store.root("weights", 0, "layout")
    for token in range(20):
        store.drop_spoiled(put(store, root, [token]))
    assert len(os.listdir(store.folder.path / SPOILED)) == disk_folder.MOST_SPOILED


def test_a_deleted_folder_is_noticed(folder, store):
    assert store.is_there()
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    assert not store.is_there()
    store.open()
    assert store.is_there() and store.is_writer
    put(store, store.root("weights", 0, "layout"), [1])


def test_an_index_that_cannot_be_read_is_begun_anew(folder):
    store = DiskStore(folder)
    store.open()
    put(store, store.root("weights", 0, "layout"), [1])
    store.close()
    (folder / INDEX).write_bytes(b"no database, but long enough to look at" * 200)
    store.open()
    assert store.entries == 0 and store.sweep() == 1
    assert store.all_roots() == []
    store.close()


WRITER = """
import sys
from pathlib import Path
from mlx_vlm_cacheplus.core.disk_index import New
from mlx_vlm_cacheplus.core.disk_store import DiskStore
from tests.contract.disk_entries import file_of
store = DiskStore(Path(sys.argv[1]))
store.open()
assert store.is_writer
store.sweep()
root = store.root("weights", 0, "layout")
begin = store.entries
for n in range(begin, begin + 10_000):
    body = file_of(bytes([n % 251]) * 50_000, state=bytes([n % 251]) * 150_000)
    new = New(store.reserve(), root, 0, 0, 0, 1, [n], body, sum(map(len, body)))
    store.add([new])
    print(n, flush=True)
"""


@pytest.mark.parametrize(
    "kills", [6, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_killed_at_random_points(folder, kills):
    """What was reported is there and whole; what is there is whole."""
    rng = random.Random(kills)
    reported = 0
    for _ in range(kills):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)],
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        assert writer.stdout is not None
        for _ in range(rng.randrange(1, 12)):
            reported = int(writer.stdout.readline()) + 1
        # In the middle of the next one, at a place that differs from time to time.
        time.sleep(rng.uniform(0, 0.002))
        writer.send_signal(signal.SIGKILL)
        reported = max([reported, *(int(n) + 1 for n in writer.stdout.read().split())])
        writer.wait()
        store = DiskStore(folder)
        store.open()
        assert store.is_writer, "the lock went with the process"
        root = store.root("weights", 0, "layout")
        assert store.entries >= reported
        for n in range(store.entries):
            ((entry, _),) = store.walk(root, [n])
            assert body_of(store, entry) == bytes([n % 251]) * 200_000
        store.sweep()
        assert len(list(store.folder.names())) == store.entries
        store.close()
