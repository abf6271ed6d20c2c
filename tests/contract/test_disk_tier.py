"""What goes to disk and comes back is what a cold cache would hold, on every layout."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time

import mlx.core as mx
import pytest

from mlx_vlm_cacheplus.core import disk_tier, disk_writer
from mlx_vlm_cacheplus.core.disk_folder import ENTRIES, SPOILED
from mlx_vlm_cacheplus.core.disk_index import COMPANION, INDEX, SPAN, pack
from mlx_vlm_cacheplus.core.disk_store import DiskStore
from mlx_vlm_cacheplus.core.disk_tier import DiskTier
from mlx_vlm_cacheplus.core.draft_state import DraftPart
from mlx_vlm_cacheplus.core.segment_cache import SegmentCache
from mlx_vlm_cacheplus.core.session_table import Request, Salt, Sessions
from tests.fakes.token_caches import LAYOUTS, nodes_of

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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_restart_between_all_turns(start, layout):
    """What is restored is checked against a cold cache in ``ask``."""
    before = 0
    for prompt, reply in session():
        server = start(layout)
        assert server.turn(prompt, reply) == before
        server.stop()
        before = len(prompt) + len(reply)


@pytest.mark.parametrize("layout", ["dense", "hybrid", "recurrent"])
def test_each_token_is_written_once_and_one_state_a_turn(start, layout):
    server, created = start(layout), 0
    for prompt, reply in session(18):
        server.turn(prompt, reply)
        ids = [*prompt, *reply]
        (tree,) = server.cache._trees.values()
        (last,) = [n for n in tree.match(ids).nodes if n.end == len(ids)]
        states = sum(s.nbytes for s in last.payload.states or ())
        created += states
    kv = sum(
        a.nbytes for n in nodes_of(server.cache) for s in n.payload.spans for a in s
    )
    server.flush()
    arrays = 0
    for entry in server.store.all_entries():
        content = server.store.read(entry)
        arrays += len(content) - 8 - int.from_bytes(content[:8], "little")
    assert arrays <= 1.2 * (kv + created)
    tokens = sum(e.stop - e.start for e in server.store.all_entries())
    assert tokens == len(prompt) + len(reply)


@pytest.mark.parametrize("layout", ["dense", "hybrid", "recurrent"])
def test_a_prompt_is_written_while_its_reply_is(start, layout):
    """At the end the reply's tokens and its end state are left to write."""
    server = start(layout)
    for prompt, reply in session(5):
        server.turn(prompt, reply[:0])
        server.flush()
        before = server.store.all_entries()
        assert max(e.stop for e in before) == len(prompt)
        server.end(prompt, reply)
        server.flush()
        numbers = {e.number for e in before}
        (added,) = [e for e in server.store.all_entries() if e.number not in numbers]
        assert (added.start, added.stop) == (len(prompt), len(prompt) + len(reply))
        assert added.has_state == (layout != "dense")


def test_paths_that_part(start):
    """A chat that leaves another inside a span, and a state where they part."""
    server = start("hybrid")
    server.turn([1, 2, 3, 4, 5], [6, 7])
    server.turn([1, 2, 3, 9, 9], [8])
    server.turn([1, 2, 3, 4, 5, 6, 7, 1], [2])
    server.stop()
    server = start("hybrid")
    assert server.ask([1, 2, 3, 4, 5, 6, 7, 1, 2, 0])[0] == 9
    assert server.ask([1, 2, 3, 9, 9, 8, 0])[0] == 6
    server.turn([1, 2, 3, 9, 9, 8, 0], [0])
    server.stop()
    server = start("hybrid")
    assert server.ask([1, 2, 3, 9, 9, 8, 0, 0, 5])[0] == 8


def test_a_dense_prompt_is_restored_up_to_where_it_leaves(start):
    server = start("dense")
    server.turn(list(range(20)), [20, 21])
    server.stop()
    server = start("dense")
    assert server.ask([*range(7), 99, 98])[0] == 7
    # What was left on disk of that span comes when it is wanted.
    assert server.ask([*range(22), 5])[0] == 22


def test_salts_and_identities_meet_nowhere(start):
    server = start("dense")
    server.turn([1, 2, 3], [4], salt=5)
    server.stop()
    assert start("dense").ask([1, 2, 3, 4, 5], salt=6)[0] == 0
    other = start("dense", identity="other weights")
    assert other.ask([1, 2, 3, 4, 5], salt=5)[0] == 0
    other.stop()


@pytest.mark.parametrize("salt", [-(2**63), 2**256 - 1])
def test_a_salt_has_as_many_bits_as_it_likes(start, salt):
    server = start("dense")
    server.turn([1, 2, 3], [4], salt=salt)
    server.stop()
    server = start("dense")
    assert server.ask([1, 2, 3, 4, 5], salt=salt)[0] == 4
    server.stop()


def test_what_ram_has_lost_comes_back(start):
    server = start("hybrid", room=12_000)
    talks = [session(3, seed) for seed in range(4)]
    for turn in range(3):
        for talk in talks:
            before = 0 if not turn else len(talk[turn - 1][0] + talk[turn - 1][1])
            assert server.turn(*talk[turn]) == before
            server.flush()
    assert server.cache.evictions and server.tier.intake.hits
    assert server.cache.nbytes <= 12_000


def test_nothing_is_read_where_ram_has_it_all(start):
    server = start("dense")
    server.tier.intake.has_more = False
    server.turn([1, 2, 3], [4])
    assert server.tier.ask([1, 2, 3, 4, 5], 0) is None
    server.cache.clear()
    assert server.ask([1, 2, 3, 4, 5])[0] == 0 or server.tier.intake.hits == 1


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


def test_what_is_left_at_the_end_is_said(start, monkeypatch, caplog):
    server = start("hybrid")
    server.turn([1, 2, 3], [4])
    server.flush()
    gate = Gate(monkeypatch)
    server.turn([1, 2, 3, 4, 5], [6])
    assert gate.entered.wait(SECONDS)
    server.tier.close(0.0)
    assert "Not written to disk in 0 s: 2 paths" in caplog.text, "prompt and reply"
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


def server_entries(server):
    server.store.open()
    entries = server.store.all_entries()
    server.store.close()
    return entries


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


def test_the_cap_keeps_what_is_used(start):
    """Other models' paths go first, then what was used least recently."""
    other = start("dense", identity="other")
    other.turn(list(range(50)), [1])
    other.stop()
    talks = [session(3, seed) for seed in range(12)]
    probe = start("dense", folder=other.store.folder.path.parent / "probe")
    for prompt, reply in talks[0]:
        probe.turn(prompt, reply)
    probe.flush()
    size = probe.store.nbytes
    server = start("dense", max_bytes=5 * size)
    for talk in talks:
        for prompt, reply in talk:
            server.turn(prompt, reply)
            server.flush()
            assert server.store.nbytes <= 5 * size
    server.stop()
    server = start("dense")
    assert all(root[1] == "weights" for root in server.store.all_roots())
    kept = [server.ask([*t[-1][0], *t[-1][1], 0])[0] > 0 for t in talks]
    assert kept[-3:] == [True] * 3 and kept[0] is False


def test_the_first_path_of_a_model_finds_a_full_disk(start):
    """All that is there is another model's, and goes."""
    other = start("dense", identity="other")
    other.turn(list(range(200)), [1])
    other.stop()
    server = start("dense", max_bytes=other.store.nbytes + 10)
    server.turn(list(range(50, 60)), [1, 2])
    server.stop()
    assert server.store.evictions
    assert start("dense").ask([*range(50, 60), 1, 2, 0])[0] == 12


def test_an_entry_that_never_fits_is_refused_once(start, caplog):
    server = start("dense", max_bytes=3_000)
    server.turn([1, 2], [3])
    server.flush()
    held = server.store.nbytes
    server.turn([9, *range(300)], [1])
    server.turn([8, *range(300)], [1])
    server.flush()
    assert caplog.text.count("does not fit the disk cache") == 1
    assert server.tier.statistics()["disk_refused_entries"] >= 2
    assert server.store.nbytes == held


def test_a_hanging_disk_is_a_miss(start, monkeypatch, caplog):
    server = start("dense")
    server.turn([1, 2, 3], [4])
    server.stop()
    server = start("dense")
    monkeypatch.setattr(disk_tier, "READ_SECONDS", 0.05)
    hold = threading.Event()
    real = server.store.read
    monkeypatch.setattr(
        server.store, "read", lambda entry: hold.wait(SECONDS) and real(entry)
    )
    assert server.ask([1, 2, 3, 4, 5])[0] == 0
    assert server.tier.intake.timeouts == 1 and "does not answer" in caplog.text
    assert server.tier.ask([1, 2, 3, 4, 6], 0) is None, "nobody else waits"
    hold.set()


def test_a_load_that_costs_more_than_the_model_is_not_made(start):
    server = start("dense")
    server.turn(list(range(20)), [1])
    server.stop()
    server = start("dense")
    server.tier.measure_prefill(1_000_000, 0.001)
    assert server.ask([*range(20), 1, 2])[0] == 21, "measured while it is not known"
    server.cache.clear()
    server.tier.reader.rate = 1.0
    assert server.ask([*range(20), 1, 2])[0] == 0
    assert server.tier.statistics()["disk_declined_loads"] == 1


def test_clear_leaves_nothing(start):
    server = start("dense")
    server.turn([1, 2, 3], [4])
    server.flush()
    assert server.tier.clear(SECONDS) == 2
    server.cache.clear()
    assert server.ask([1, 2, 3, 4, 5])[0] == 0
    assert os.listdir(server.store.folder.path / ENTRIES) == []
    server.turn([1, 2, 3], [4])
    server.stop()
    assert start("dense").ask([1, 2, 3, 4, 5])[0] == 4


def test_what_was_written_while_the_disk_was_cleared_is_written_again(
    start, monkeypatch
):
    server = start("dense")
    real = server.tier.writer.do

    def do(job):
        server.turn([1, 2, 3], [4])
        real(job)

    with monkeypatch.context() as patch:
        patch.setattr(server.tier.writer, "do", do)
        assert server.tier.clear(SECONDS) > 0
    server.turn([1, 2, 3, 4, 5], [6])
    server.stop()
    assert start("dense").ask([1, 2, 3, 4, 5, 6, 7])[0] == 6


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


IDENTITY = ("eagle3", "Drafter", 1)


class Drafter:
    """A companion source: one entry a token, which is the token's id."""

    def __init__(self, ids):
        self.ids = ids

    def wants(self, segment, start):
        return segment.companion_identity != IDENTITY

    def capture(self, start, stop):
        span = mx.array(self.ids[start:stop], dtype=mx.bfloat16).reshape(1, 1, -1, 1)
        at_end = stop == len(self.ids)
        pending = mx.array([[[float(stop)]]]) if at_end else None
        return DraftPart(IDENTITY, [(span, -span)], pending)

    def span_nbytes(self, tokens):
        return 4 * tokens


def drafted(server, ids, drafter):
    """Commit a path, with the drafter's part or without."""
    row = server.layout.row(ids)
    source = Drafter(ids) if drafter else None
    server.cache.commit(ids, 0, row, 0, companion=source)
    server.flush()


def parts_of(server, ids):
    """The drafter's entries on a path, as token ids, and what is pending at its end."""
    server.ask([*ids, 99])
    nodes = server.cache.match(ids, 0).nodes
    held = [n.payload.companion for n in nodes]
    assert all(part is not None for part in held)
    spans = [int(t) for part in held for t in part.spans[0][0][0, 0, :, 0].tolist()]
    return spans, held[-1].pending


def test_the_drafters_part_comes_back(start):
    names = {IDENTITY: "drafter"}
    server = start("dense", companions=names)
    drafted(server, [1, 2, 3], True)
    drafted(server, [1, 2, 3, 4, 5], True)
    server.stop()
    server = start("dense", companions=names)
    spans, pending = parts_of(server, [1, 2, 3, 4, 5])
    assert spans == [1, 2, 3, 4, 5] and pending.item() == 5
    server.stop()
    other = start("dense", companions={IDENTITY: "another"})
    assert other.ask([1, 2, 3, 4, 5, 9])[0] == 5
    assert all(n.payload.companion is None for n in nodes_of(other.cache))


def test_a_drafter_that_comes_later_adds_its_part(start):
    names = {IDENTITY: "drafter"}
    server = start("dense")
    drafted(server, [1, 2, 3], False)
    server.stop()
    server = start("dense", companions=names)
    assert server.ask([1, 2, 3, 4])[0] == 3
    before = server.written
    drafted(server, [1, 2, 3, 4, 5], True)
    assert server.written > before
    server.stop()
    server = start("dense", companions=names)
    assert parts_of(server, [1, 2, 3, 4, 5])[0] == [1, 2, 3, 4, 5]
    kinds = [e.kind for e in server.store.all_entries()]
    assert kinds.count(COMPANION) == 1 and kinds.count(SPAN) == 2


def test_weights_that_turn_out_to_be_others(start, caplog):
    """What a sample did not show: all of it goes, in RAM too, and nothing is kept on."""
    server = start("dense")
    server.turn([1, 2, 3], [4])
    server.flush()
    server.tier.distrust({"content x": ""})
    server.tier.tick()
    assert not nodes_of(server.cache)
    assert server.turn([1, 2, 3], [4]) == 0
    server.stop()
    assert start("dense").ask([1, 2, 3, 4, 5])[0] == 0


def test_a_session_that_is_forgotten_leaves_the_disk(start):
    """What others go on from stays."""
    server = start("dense")
    server.turn([1, 2, 3], [4])
    server.turn([1, 2, 3, 4, 5, 6], [7])
    server.turn([1, 2, 3, 4, 8], [9])
    server.flush()
    server.tier.forget("", [(0, (1, 2, 3, 4, 5, 6, 7), 4)])
    server.stop()
    server = start("dense")
    assert server.ask([1, 2, 3, 4, 5, 6, 7, 0])[0] == 4
    assert server.ask([1, 2, 3, 4, 8, 9, 0])[0] == 6
