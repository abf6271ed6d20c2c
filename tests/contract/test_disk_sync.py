"""The end of a reply waits for the disk: how long, for what, and that nobody else does."""

from __future__ import annotations

import errno
import gc
import os
import random
import shutil
import time
import weakref
from queue import Queue
from types import SimpleNamespace

import pytest

from mlx_vlm_cacheplus.changes import durable_disk
from mlx_vlm_cacheplus.core import disk_coordination as disk
from mlx_vlm_cacheplus.core.disk_settings import settings_of
from mlx_vlm_cacheplus.core.disk_sync import Receipt
from tests.contract.disk_server import SECONDS, Gate, quick, session, start

__all__ = ["quick", "start"]


@pytest.fixture
def told(monkeypatch):
    """How often each receipt was told something that it took, by its id, in order of their making."""
    counts, real_init, real_tell = {}, Receipt.__init__, Receipt.tell

    def init(self, sync):
        real_init(self, sync)
        self.number = len(counts)
        counts[self.number] = 0

    def tell(self, written):
        counts[self.number] += not self.is_told
        real_tell(self, written)

    monkeypatch.setattr(Receipt, "__init__", init)
    monkeypatch.setattr(Receipt, "tell", tell)
    return counts


def end(server, prompt, reply):
    """A turn whose end is about to be sent: its receipt, made between commit and hand-over."""
    server.turn(prompt, [])
    ids = [*prompt, *reply]
    restored, row = server.ask(ids)
    server.layout.feed(row, [ids[restored:]])
    server.cache.commit(ids, 0, row, 0)
    receipt = server.tier.promise()
    server.tier.tick()
    return receipt


def hold(receipt, seconds=SECONDS):
    """Wait as a reader does, but no shorter than this machine needs."""
    receipt.sync.seconds = seconds
    receipt.hold()
    return receipt.written


def of_tier(tier):
    """A response generator whose storage has this tier."""
    return SimpleNamespace(apc_manager=SimpleNamespace(disk_tier=tier))


def counts(server):
    found = server.tier.statistics()
    return found["disk_synced_replies"], found["disk_unsynced_replies"]


def test_off_unless_it_is_asked_for(start):
    server = start("hybrid")
    assert end(server, *session(1)[0]) is None
    assert not [name for name in server.tier.statistics() if "sync" in name]
    queue = Queue()
    disk.promise_end(of_tier(server.tier), queue)
    disk.promise_end(SimpleNamespace(), queue)
    assert not hasattr(queue, "receipt")
    disk.hold_end(queue)


def test_settings():
    def sync(**environ):
        return settings_of(None, environ).sync

    assert not sync() and not sync(APC_DISK_SYNC="never")
    assert sync(APC_DISK_SYNC="reply")
    assert settings_of(None, {}, sync="reply").sync
    assert not settings_of(None, {"APC_DISK_SYNC": "reply"}, sync="never").sync
    with pytest.raises(ValueError, match="never or reply"):
        sync(APC_DISK_SYNC="always")


def test_the_option(monkeypatch):
    (option,) = [o for o in durable_disk.CHANGE.options if o.env == durable_disk.SYNC]
    option.check("never")
    with pytest.raises(ValueError, match="never or reply"):
        option.check("")
    monkeypatch.setenv("APC_DISK_SYNC", "never")
    assert "wait" not in durable_disk.describe_disk(None)
    monkeypatch.setenv(option.env, "reply")
    assert durable_disk.describe_disk(None).endswith("ends of replies wait")
    assert durable_disk.settings(None).sync


@pytest.mark.parametrize("layout", ["dense", "hybrid", "recurrent"])
def test_what_was_told_is_there_for_the_next_server(start, tmp_path, layout):
    server = start(layout, sync=True)
    for number, (prompt, reply) in enumerate(session(5)):
        assert hold(end(server, prompt, reply))
        killed = tmp_path / f"killed-{number}"
        shutil.copytree(server.store.folder.path, killed)
        after = start(layout, folder=killed)
        assert after.ask([*prompt, *reply, 0])[0] == len(prompt) + len(reply)
    assert counts(server) == (5, 0)


def test_a_slow_disk_is_waited_for_no_longer_than_said(start, monkeypatch, caplog):
    server = start("hybrid", sync=True)
    server.flush()
    gate = Gate(monkeypatch)
    receipts = [end(server, *session(1, seed)[0]) for seed in range(3)]
    assert gate.entered.wait(SECONDS)
    assert not any(receipt.is_told for receipt in receipts)
    for receipt in receipts:
        assert not hold(receipt, 0.01)
    assert counts(server) == (0, 3)
    assert len([r for r in caplog.records if "after its end" in r.getMessage()]) == 1
    gate.open.set()
    server.flush()
    assert hold(end(server, *session(2)[1]))
    assert counts(server) == (1, 3)


def test_a_failing_disk_is_waited_for_once(start, monkeypatch, caplog):
    server = start("hybrid", sync=True)
    server.flush()

    def refuse(*args):
        raise OSError(errno.ENOSPC, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        patch.setattr(os, "replace", refuse)
        first = end(server, *session(1, 1)[0])
        deadline = time.monotonic() + SECONDS
        while not server.tier.writer.is_failing and time.monotonic() < deadline:
            time.sleep(0.005)
        assert not hold(first, 0.05)
        others = [end(server, *session(1, seed)[0]) for seed in range(2, 5)]
        assert all(receipt.is_told and not receipt.written for receipt in others)
        for receipt in others:
            receipt.hold()
    server.flush()
    assert counts(server) == (0, 4)
    assert hold(end(server, *session(1, 6)[0]))
    assert len([r for r in caplog.records if "injected" in r.getMessage()]) == 1


def test_where_nothing_waits_nobody_does(start):
    server = start("hybrid", sync=True)
    end(server, *session(1)[0])
    server.flush()
    receipt = server.tier.promise()
    assert receipt.is_told and receipt.written


def test_where_there_is_no_room_nobody_waits(start, monkeypatch):
    server = start("hybrid", sync=True, queue_bytes=1)
    server.flush()
    gate = Gate(monkeypatch)
    first = end(server, *session(1, 1)[0])
    assert gate.entered.wait(SECONDS)
    second = end(server, *session(1, 2)[0])
    assert second.is_told and not second.written
    gate.open.set()
    server.stop()
    assert first.is_told


def test_who_reads_only_waits_for_nothing(start):
    start("hybrid", sync=True).flush()
    second = start("hybrid", sync=True)
    for prompt, reply in session(3):
        assert not hold(end(second, prompt, reply))
    last = end(second, *session(1, 9)[0])
    assert last.is_told and not last.written


@pytest.mark.parametrize("how", ["clear", "stop", "distrust"])
def test_who_waits_for_what_is_given_up_is_told(start, monkeypatch, how):
    server = start("hybrid", sync=True)
    server.flush()
    gate = Gate(monkeypatch)
    one = end(server, *session(1, 1)[0])
    assert gate.entered.wait(SECONDS)
    two = server.tier.promise()
    three = server.tier.sync.receipt()
    server.tier.sync.after_hand_over(three)
    if how == "clear":
        gate.open.set()
        server.tier.clear(SECONDS)
    elif how == "distrust":
        server.tier.distrust({})
    else:
        server.tier.close(0.01)
    gate.open.set()
    for receipt in (one, two, three):
        assert receipt._told.wait(SECONDS)
    if how == "distrust":
        assert server.tier.promise() is None


def test_the_spelling_of_a_reply_is_waited_for(start, monkeypatch):
    server = start("hybrid", sync=True)
    server.flush()
    entered, real = [], server.store.keep_reply

    def keep(*reply):
        entered.append(reply)
        real(*reply)

    monkeypatch.setattr(server.store, "keep_reply", keep)
    server.tier.keep_reply("owner", b"key", b"tokens")
    receipt = server.tier.promise()
    assert not receipt.is_told
    server.tier.tick()
    assert hold(receipt)
    assert entered == [("owner", b"key", b"tokens")]


def test_each_is_told_once_and_none_is_kept(start, told):
    server, random_ = start("hybrid", sync=True, queue_bytes=30_000), random.Random(5)
    kept = []
    for seed in range(40):
        receipt = end(server, *session(1, seed)[0])
        if random_.random() < 0.5:
            kept.append(weakref.ref(receipt))
            if random_.random() < 0.5:
                receipt.hold()
        if random_.random() < 0.1:
            server.tier.clear(SECONDS)
        del receipt
    server.flush()
    server.stop()
    assert told and set(told.values()) == {1}
    gc.collect()
    assert not [ref for ref in kept if ref() is not None]


def test_a_queue_carries_its_receipt_to_who_reads_it(start, monkeypatch):
    server = start("hybrid", sync=True)
    server.flush()
    gate = Gate(monkeypatch)
    prompt, reply = session(1)[0]
    server.turn(prompt, reply)
    server.tier.sync.seconds, queue = SECONDS, Queue()
    disk.promise_end(of_tier(server.tier), queue)
    receipt = weakref.ref(queue.receipt)
    gate.open.set()
    disk.hold_end(queue)
    assert counts(server) == (1, 0)
    disk.hold_end(queue)
    assert counts(server) == (1, 0), "its end is held once"
    gc.collect()
    assert receipt() is None


def test_a_reader_that_has_left_leaves_nothing_behind(start, monkeypatch):
    server = start("hybrid", sync=True)
    server.flush()
    gate = Gate(monkeypatch)
    server.turn(*session(1)[0])
    queue = Queue()
    disk.promise_end(of_tier(server.tier), queue)
    receipt = weakref.ref(queue.receipt)
    del queue
    gate.open.set()
    server.flush()
    gc.collect()
    assert receipt() is None
