"""A disk that is slow, full, broken, foreign or gone, and what requests notice of it: a miss."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time

import pytest

from mlx_vlm_cacheplus.core import disk_tier
from mlx_vlm_cacheplus.core.disk_folder import ENTRIES, SPOILED
from mlx_vlm_cacheplus.core.disk_index import INDEX, pack
from mlx_vlm_cacheplus.core.disk_store import DiskStore
from tests.contract.disk_server import (
    SECONDS,
    Gate,
    quick,
    server_entries,
    session,
    start,
)

__all__ = ["quick", "start"]


def test_a_slow_disk_holds_nobody_up(start, monkeypatch):
    """The queue is bounded; what does not fit waits in RAM, and gets there."""
    limit = 20_000
    server = start("hybrid", queue_bytes=limit)
    server.flush()
    gate = Gate(monkeypatch)
    talks = [session(4, seed) for seed in range(4)]
    before = 0
    for talk in talks:
        before = 0
        for prompt, reply in talk:
            assert server.turn(prompt, reply) == before
            before = len(prompt) + len(reply)
            assert server.tier.writer.pending_bytes <= limit
    assert gate.entered.wait(SECONDS)
    assert server.tier.spill.notes and server.tier.writer.counts.parcels == 0
    gate.open.set()
    server.stop()
    server = start("hybrid")
    for talk in talks:
        prompt, reply = talk[-1]
        assert server.ask([*prompt, *reply, 0])[0] == before


def test_a_reply_is_spelled_as_it_was_however_early_the_kill(start, monkeypatch):
    """Its tokens are there once its path is written, before anything is forced."""
    server = start("hybrid")
    server.turn([1, 2, 3, 4, 5], [])
    server.flush()
    gate = Gate(monkeypatch)
    server.tier.keep_reply("owner", b"key", b"tokens")
    server.end([1, 2, 3, 4, 5], [6, 7])
    assert gate.entered.wait(SECONDS)
    other = DiskStore(server.store.folder.path)
    other.open()
    assert other.replies("owner") == [b"tokens"]
    other.close()
    gate.open.set()


def test_a_reply_alone_is_kept(start):
    """Its path may be on disk already."""
    server = start("dense")
    server.tier.keep_reply("owner", b"key", b"tokens")
    server.stop()
    server = start("dense")
    assert server.store.replies("owner") == [b"tokens"]


# Longer than a test may take.
FOR_EVER = 3600.0


@pytest.mark.parametrize("end", ["flush", "close"])
def test_nobody_waits_for_a_folder_that_is_refused(start, tmp_path, caplog, end):
    (tmp_path / "file").write_text("")
    server = start("dense", folder=tmp_path / "file")
    server.turn([1, 2, 3], [4])
    getattr(server.tier, end)(FOR_EVER)
    assert "file is not a folder: name another one" in caplog.text
    if end == "close":
        assert "which will be read anew: Refused" in caplog.text


def test_what_waits_for_a_folder_is_written_when_it_is_mended(start, tmp_path):
    (tmp_path / "file").write_text("")
    server = start("dense", folder=tmp_path / "file")
    server.turn([1, 2, 3], [4])
    assert server.tier.flush(SECONDS) > 0
    (tmp_path / "file").unlink()
    assert server.tier.flush(SECONDS) == 0


def test_what_is_left_at_the_end_is_said(start, monkeypatch, caplog):
    server = start("hybrid")
    server.turn([1, 2, 3], [4])
    server.flush()
    gate = Gate(monkeypatch)
    server.turn([1, 2, 3, 4, 5], [6])
    assert gate.entered.wait(SECONDS)
    server.tier.close(0.0)
    assert "Not written to disk: 2 paths" in caplog.text, "prompt and reply"
    gate.open.set()
    server.tier.writer._thread.join(SECONDS)
    server = start("hybrid")
    assert server.ask([1, 2, 3, 4, 5, 6, 7])[0] in (4, 6)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS])
def test_a_fault_is_said_once_and_ends_with_its_cause(start, monkeypatch, caplog, code):
    server = start("hybrid")
    server.flush()
    talk = session(5)
    tried = threading.Semaphore(0)

    def refuse(*args):
        tried.release()
        raise OSError(code, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        before = 0
        for prompt, reply in talk[:-1]:
            assert server.turn(prompt, reply) == before
            before = len(prompt) + len(reply)
        for _ in range(3):
            assert tried.acquire(timeout=SECONDS)
        assert list(server.store.folder.names()) == []
        assert caplog.text.count("Nothing is written to disk") == 1
        assert "injected" in server.tier.statistics()["disk_trouble"]
    server.turn(*talk[-1])
    server.flush()
    assert server.tier.statistics()["disk_trouble"] is None
    assert caplog.text.count("Disk is written again") == 1
    server.stop()
    prompt, reply = talk[-1]
    assert start("hybrid").ask([*prompt, *reply, 0])[0] == len(prompt) + len(reply)


def test_a_deleted_folder_comes_back(start, tmp_path):
    server = start("dense")
    server.turn([1, 2, 3], [4])
    server.flush()
    (tmp_path / "disk").rename(tmp_path / "gone")
    server.turn([1, 2, 3, 4, 5], [6])
    server.flush()
    server.turn([1, 2, 3, 4, 5, 6, 7], [8])
    server.stop()
    assert start("dense").ask([1, 2, 3, 4, 5, 6, 7, 8, 9])[0] == 8


def test_a_folder_that_cannot_be_used_turns_the_tier_off(start, tmp_path, caplog):
    (tmp_path / "file").write_text("x")
    server = start("dense", folder=tmp_path / "file" / "disk")
    server.turn([1, 2, 3], [4])
    server.tier.writer.flush(0.2)
    assert server.turn([1, 2, 3, 4, 5], [6]) == 4
    assert "is not a folder" in server.tier.statistics()["disk_trouble"]
    assert caplog.text.count("Nothing is written to disk") == 1
    (tmp_path / "file").unlink()
    server.flush()
    server.stop()
    again = start("dense", folder=tmp_path / "file" / "disk")
    assert again.ask([1, 2, 3, 4, 5, 6, 7])[0] == 6


def test_spoiled_files_are_read_anew(start, caplog):
    """One byte in the middle of a path: what stands before it is used."""
    talk = session(5)
    server = start("hybrid")
    for prompt, reply in talk:
        server.turn(prompt, reply)
    server.stop()
    spans = sorted(server_entries(server), key=lambda e: e.start)
    victim = spans[len(spans) // 2]
    path = server.store.folder.path / ENTRIES / victim.name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)
    server = start("hybrid")
    prompt, reply = talk[-1]
    restored = server.turn([*prompt, *reply, 1], [2])
    assert restored == victim.start and "Set aside" in caplog.text
    server.flush()
    assert os.listdir(server.store.folder.path / SPOILED) == [victim.name]
    server.stop()
    server = start("hybrid")
    assert server.ask([*prompt, *reply, 1, 2, 3])[0] == len(prompt) + len(reply) + 2


def test_what_is_spoiled_goes_before_what_waits_is_written(start, monkeypatch):
    """What waits would stand on it, and go with it."""
    talk = session(3)
    server = start("hybrid")
    for prompt, reply in talk:
        server.turn(prompt, reply)
    server.stop()
    victim = max(server_entries(server), key=lambda e: e.start)
    path = server.store.folder.path / ENTRIES / victim.name
    path.write_bytes(path.read_bytes()[::-1])
    server = start("hybrid")
    gate = Gate(monkeypatch)
    server.turn([39, 39, 39], [39])
    assert gate.entered.wait(SECONDS)
    ids = [*talk[-1][0], *talk[-1][1], 1]
    assert 0 < server.turn(ids, [2]) <= victim.start
    gate.open.set()
    server.flush()
    server.stop()
    assert start("hybrid").ask([*ids, 2, 3])[0] == len(ids) + 1


def test_an_index_that_lies_is_found_out(start):
    """The file knows its path: other tokens in the index do not get its content."""
    server = start("dense")
    server.turn([1, 2, 3], [4])
    server.flush()
    with server.store._writing as writer:
        writer.execute("UPDATE entries SET ids = ? WHERE start = 0", (pack([1, 2, 7]),))
    server.stop()
    server = start("dense")
    assert server.ask([1, 2, 7, 4, 9])[0] == 0


def test_an_index_that_breaks_while_it_is_used_costs_one_miss(start, caplog):
    """It is made anew from the files, which say what their rows were."""
    server = start("hybrid")
    for prompt, reply in session(8):
        server.turn(prompt, reply)
    server.stop()
    server = start("hybrid")
    server.flush()
    index = server.store.folder.path / INDEX
    content = bytearray(index.read_bytes())
    # All pages but the first, which holds the schema.
    content[4096:] = bytes(len(content) - 4096)
    index.write_bytes(content)
    ids = [*prompt, *reply, 1]
    server.turn(ids, [2])
    assert server.tier.writer.flush(SECONDS)
    assert "made anew from its files" in caplog.text
    server.cache.clear()
    assert server.ask([*ids, 2, 3])[0] == len(ids) + 1
    server.turn([*ids, 2, 3], [4])
    server.stop()
    assert start("hybrid").ask([*ids, 2, 3, 4, 5])[0] == len(ids) + 3


def test_two_servers(start, caplog):
    first = start("dense")
    first.turn([1, 2, 3], [4])
    first.flush()
    second = start("dense")
    assert second.turn([1, 2, 3, 4, 5], [6]) == 4, "it reads"
    second.tier.writer.flush(SECONDS)
    assert caplog.text.count("this one reads only") == 1
    assert first.store.read(first.store.all_entries()[0])
    assert second.turn([1, 2, 3, 4, 5, 6, 7], [8]) == 6
    first.stop()
    second.tier.tick()
    second.tier.writer.flush(SECONDS)
    second.turn([1, 2, 3, 4, 5, 6, 7, 8, 9], [10])
    second.stop()
    assert start("dense").ask([*range(1, 11), 0])[0] == 10


def test_who_is_slow_to_become_the_writer_writes_at_its_end(start, monkeypatch):
    first = start("dense")
    first.turn([1, 2, 3], [4])
    first.flush()
    second = start("dense")
    second.turn([1, 2, 3, 4, 5], [6])
    second.tier.writer.flush(SECONDS)
    second.turn([1, 2, 3, 4, 5, 6, 7], [8])
    assert second.tier.spill.notes, "it reads only"
    second.tier.writer.flush(SECONDS)
    real = second.store.try_to_write
    monkeypatch.setattr(second.store, "try_to_write", lambda: time.sleep(1.5) or real())
    first.stop()
    second.stop()
    assert start("dense").ask([1, 2, 3, 4, 5, 6, 7, 8, 0])[0] == 8


def test_a_hanging_disk_is_a_miss(start, monkeypatch, caplog):
    server = start("dense")
    server.turn([1, 2, 3], [4])
    server.stop()
    server = start("dense")
    monkeypatch.setattr(disk_tier, "READ_SECONDS", 0.05)
    hold = threading.Event()
    real = server.store.read_sections
    monkeypatch.setattr(
        server.store,
        "read_sections",
        lambda *which: hold.wait(SECONDS) and real(*which),
    )
    assert server.ask([1, 2, 3, 4, 5])[0] == 0
    assert server.tier.intake.timeouts == 1 and "does not answer" in caplog.text
    assert server.tier.ask([1, 2, 3, 4, 6], 0) is None, "nobody else waits"
    hold.set()


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_whole_file_without_a_row_is_taken_in(start, monkeypatch, tmp_path, step):
    """Killed between the last byte of a file and its row: nothing is lost."""
    server = start("hybrid")
    server.turn([1, 2, 3], [4])
    server.turn([1, 2, 3, 4, 5], [])
    server.flush()
    stopped, copied = threading.Event(), threading.Event()

    def stop_here(*args):
        stopped.set()
        assert copied.wait(SECONDS)
        raise OSError("too late")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, stop_here)
        server.end([1, 2, 3, 4, 5], [6, 7])
        assert stopped.wait(SECONDS)
        shutil.copytree(tmp_path / "disk", tmp_path / "killed")
        copied.set()
    after = start("hybrid", folder=tmp_path / "killed")
    assert after.store.sweep() == 0
    assert after.ask([1, 2, 3, 4, 5, 6, 7, 8])[0] == 7
