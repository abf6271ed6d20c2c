"""A cache with its disk tier, as one process has them, for the tests of the tier."""

from __future__ import annotations

import os
import random
import threading

import pytest

from mlx_vlm_cacheplus.core import disk_writer
from mlx_vlm_cacheplus.core.disk_store import DiskStore
from mlx_vlm_cacheplus.core.disk_tier import DiskTier
from mlx_vlm_cacheplus.core.segment_cache import SegmentCache
from mlx_vlm_cacheplus.core.session_table import Request, Salt, Sessions
from tests.fakes.token_caches import LAYOUTS

ROOM = 1 << 40
SECONDS = 20.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nobody waits long for a try."""
    monkeypatch.setattr(disk_writer, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(disk_writer, "LONGEST_PAUSE", 0.02)


class Server:
    """A cache with its tier, as one process has them; ``stop`` and make a new one."""

    def __init__(self, folder, layout="hybrid", identity="weights", room=ROOM, **more):
        self.layout = LAYOUTS[layout]
        self.cache = SegmentCache(room)
        if more.pop("sessions", False):
            self.cache.policy = Sessions()
        self.store = DiskStore(folder, more.pop("max_bytes", None))
        try:
            self.store.open()
        except disk_writer.FAULTS:
            pass  # the tier tries again
        self.tier = DiskTier(self.cache, self.store, identity, **more)

    def ask(self, ids, salt=0):
        """Look a prompt up as the server does; returns (restored, its cache)."""
        load = self.tier.ask(ids, salt)
        if load is not None:
            assert self.tier.wait(load, SECONDS)
            self.tier.adopt(load)
        hit = self.cache.find(ids, salt, lambda length: True)
        if hit is None:
            return 0, self.layout.fresh()
        row = self.cache.restore(hit, self.layout.fresh(), len(ids))
        self.layout.check(row, ids[: hit.length])
        hit.release()
        return hit.length, row

    def turn(self, prompt, reply, salt=0):
        """Read a prompt, write a reply; returns how many tokens were restored."""
        if isinstance(self.cache.policy, Sessions):
            salt = Salt.of(salt, Request(answered_at=len(prompt)))
        restored, row = self.ask(prompt, salt)
        self.tier.reading = True
        rest = prompt[restored:]
        if len(rest) > 1:
            self.layout.feed(row, [rest[:-1]])
            self.cache.commit(prompt[:-1], salt, row, 0)
        self.layout.feed(row, [rest[-1:]])
        self.cache.commit(prompt, salt, row, 0)
        self.tier.reading = False
        self.tier.tick()
        if reply:
            self.layout.feed(row, [reply])
            self.cache.commit([*prompt, *reply], salt, row, 0)
        self.tier.tick()
        self.cache.check_invariants()
        return restored

    def end(self, prompt, reply):
        """Write the reply of a prompt that ``turn`` has read without one."""
        ids = [*prompt, *reply]
        restored, row = self.ask(ids)
        self.layout.feed(row, [ids[restored:]])
        self.cache.commit(ids, 0, row, 0)
        self.tier.tick()

    def flush(self):
        self.tier.tick()
        assert self.tier.writer.flush(SECONDS)

    def stop(self):
        self.tier.close(SECONDS)

    @property
    def written(self):
        return self.tier.writer.counts.written_bytes


@pytest.fixture
def start(tmp_path):
    """start(layout, ...) -> Server; all that were started are stopped at the end."""
    running = []

    def make(*args, **more):
        server = Server(more.pop("folder", tmp_path / "disk"), *args, **more)
        running.append(server)
        return server

    yield make
    for server in running:
        server.stop()


def session(turns=6, seed=1, question=9, reply=7):
    """(prompt, reply) of each turn of a conversation."""
    rng = random.Random(seed)
    ids, out = [rng.randrange(40) for _ in range(12)], []
    for _ in range(turns):
        prompt = [*ids, *(rng.randrange(40) for _ in range(question))]
        answer = [rng.randrange(40) for _ in range(reply)]
        out.append((prompt, answer))
        ids = [*prompt, *answer]
    return out


class Gate:
    """Stands in for ``os.fsync``: holds who calls it until it is opened."""

    def __init__(self, monkeypatch):
        self.open, self.entered = threading.Event(), threading.Event()
        self.real = os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, handle):
        self.entered.set()
        assert self.open.wait(SECONDS)
        self.real(handle)


def server_entries(server):
    server.store.open()
    entries = server.store.all_entries()
    server.store.close()
    return entries
