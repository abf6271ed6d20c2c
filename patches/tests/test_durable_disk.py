"""The prefix cache survives restarts, and is right about what it restores."""

import os
import stat
import threading

import mlx.core as mx
import pytest
from mlx_vlm import disk_tier, disk_writer
from mlx_vlm.disk_folder import ENTRIES, Refused
from mlx_vlm.disk_settings import settings_of
from mlx_vlm.disk_store import DiskStore
from mlx_vlm.disk_tier import DiskTier
from mlx_vlm.models.cache import ArraysCache, KVCache
from mlx_vlm.segment_cache import SegmentCache

SECONDS = 20.0


class Server:
    """A cache of one process: its key of each token is the id, its state their sum."""

    def __init__(self, folder, hybrid=True, identity="weights", **more):
        self.hybrid = hybrid
        self.cache = SegmentCache(1 << 40)
        self.store = DiskStore(folder, more.pop("max_bytes", None))
        try:
            self.store.open()
        except disk_writer.FAULTS:
            pass
        self.tier = DiskTier(self.cache, self.store, identity, **more)

    def fresh(self):
        return [KVCache(), ArraysCache(1)] if self.hybrid else [KVCache()]

    def read(self, layers, ids):
        keys = mx.array(ids, dtype=mx.bfloat16).reshape(1, 1, len(ids), 1)
        layers[0].update_and_fetch(keys, -keys)
        if self.hybrid:
            before = 0 if layers[1][0] is None else layers[1][0].item()
            layers[1][0] = mx.array([[before + sum(ids)]])

    def ask(self, ids):
        """Look a prompt up; returns (restored, its cache)."""
        load = self.tier.ask(ids, 0)
        if load is not None:
            assert self.tier.wait(load, SECONDS)
            self.tier.adopt(load)
        hit = self.cache.find(ids, 0, lambda length: True)
        if hit is None:
            return 0, self.fresh()
        layers = self.cache.restore(hit, self.fresh(), len(ids))
        hit.release()
        known = ids[: hit.length]
        assert layers[0].keys[0, 0, : hit.length, 0].tolist() == known
        if self.hybrid:
            assert layers[1][0].item() == sum(known)
        return hit.length, layers

    def turn(self, ids):
        """Read a prompt to its end; returns how many tokens were restored."""
        restored, layers = self.ask(ids)
        self.read(layers, ids[restored:])
        self.cache.commit(ids, 0, layers, 0)
        self.tier.tick()
        return restored

    def flush(self):
        self.tier.tick()
        assert self.tier.writer.flush(SECONDS)

    def stop(self):
        self.tier.close(SECONDS)


@pytest.fixture
def start(tmp_path):
    running = []

    def make(*args, **more):
        running.append(Server(tmp_path / "disk", *args, **more))
        return running[-1]

    yield make
    for server in running:
        server.stop()


@pytest.mark.parametrize("hybrid", [True, False])
def test_restart_between_turns(start, hybrid):
    ids, before = [1, 2, 3], 0
    for turn in range(5):
        server = start(hybrid)
        assert server.turn(ids) == before
        server.stop()
        before = len(ids)
        ids = [*ids, 10 + turn, 20 + turn]


def test_each_token_is_written_once(start):
    server = start()
    for end in range(4, 40, 4):
        server.turn(list(range(end)))
    server.flush()
    entries = server.store.all_entries()
    assert sum(e.stop - e.start for e in entries) == 36
    assert len(entries) == 9


def test_other_weights_get_nothing(start):
    server = start()
    server.turn([1, 2, 3])
    server.stop()
    assert start(identity="other").ask([1, 2, 3, 4])[0] == 0


def test_private(start, tmp_path):
    server = start()
    server.turn([1, 2, 3])
    server.flush()
    for path in [tmp_path / "disk", *(tmp_path / "disk").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(Refused):
        DiskStore(tmp_path / "open").open()


def test_one_changed_byte_is_a_miss(start, tmp_path):
    server = start()
    server.turn([1, 2, 3])
    server.stop()
    (path,) = (tmp_path / "disk" / ENTRIES).iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    server = start()
    assert server.turn([1, 2, 3, 4]) == 0
    server.stop()
    assert start().ask([1, 2, 3, 4, 5])[0] == 4


def test_nobody_waits_for_a_slow_disk(start, monkeypatch):
    server = start(queue_bytes=100)
    server.flush()
    gate, real = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: gate.wait(SECONDS) and real(handle))
    for end in range(4, 40, 4):
        assert server.turn(list(range(end))) == end - 4
        assert server.tier.writer.pending_bytes <= 100
    gate.set()
    server.stop()
    assert start().ask(list(range(40)))[0] == 36


def test_the_end_of_a_reply_waits_where_it_is_asked_to(start, monkeypatch):
    server = start()
    assert server.tier.promise() is None
    server.stop()
    server = start(sync=True)
    server.flush()
    gate, real = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: gate.wait(SECONDS) and real(handle))
    server.turn([1, 2, 3])
    receipt = server.tier.promise()
    assert not receipt.is_told
    server.tier.sync.seconds = 0.01
    receipt.hold()
    assert server.tier.statistics()["disk_unsynced_replies"] == 1
    gate.set()
    server.tier.sync.seconds = SECONDS
    receipt.hold()
    assert receipt.written


def test_a_full_disk_ends_with_its_cause(start, monkeypatch, caplog):
    monkeypatch.setattr(disk_writer, "FIRST_PAUSE", 0.01)
    server = start()
    server.flush()
    tried = threading.Semaphore(0)

    def refuse(*args):
        tried.release()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        assert server.turn([1, 2, 3]) == 0
        assert server.turn([1, 2, 3, 4]) == 3
        assert tried.acquire(timeout=SECONDS) and tried.acquire(timeout=SECONDS)
    server.stop()
    assert caplog.text.count("Nothing is written to disk") == 1
    assert start().ask([1, 2, 3, 4, 5])[0] == 4


def test_a_hanging_disk_is_a_miss(start, monkeypatch):
    server = start()
    server.turn([1, 2, 3])
    server.stop()
    server = start()
    monkeypatch.setattr(disk_tier, "READ_SECONDS", 0.05)
    hold = threading.Event()
    monkeypatch.setattr(server.store, "read_sections", lambda *_: hold.wait(SECONDS))
    assert server.ask([1, 2, 3, 4])[0] == 0
    hold.set()


def test_settings(tmp_path):
    environ = {"MLX_VLM_CACHE_HOME": str(tmp_path)}
    found = settings_of(None, environ)
    assert found.folder == tmp_path / "segments"
    assert found.max_bytes == 20 << 30
    assert settings_of({"disk_enabled": False}, environ) is None
    assert settings_of(None, {**environ, "APC_DISK_ENABLED": "0"}) is None
    assert settings_of({"disk_path": ""}, environ) is None
    assert not found.sync and settings_of({"disk_sync": "reply"}, environ).sync
    own = settings_of({"disk_path": str(tmp_path / "x"), "disk_max_gb": 0}, environ)
    assert own.folder == tmp_path / "x" / "segments" and own.max_bytes is None
