"""Stock's coordinator on segment trees: trouble with the cache never reaches a request."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest

from mlx_vlm_cacheplus.core import segment_coordination as core
from tests.fakes.token_caches import Layout
from tests.fakes.token_layers import Dense

DENSE = Layout((Dense(heads=2),))
ANY = {
    "extra_hash": 0,
    "safe_lookup_min": 0,
    "suffix_is_text_only": lambda length: True,
    "prefix_has_media": lambda length: False,
}


class Manager(SimpleNamespace):
    """What the coordinator's work needs of a storage manager, with its lock."""

    def __init__(self, budget=1 << 30):
        stats = SimpleNamespace(
            hits=0,
            misses=0,
            matched_tokens=0,
            restored_tokens=0,
            stored_tokens=0,
            stores=0,
            memory_skips=0,
            evictions=0,
            memory_evictions=0,
        )
        super().__init__(
            lock=threading.RLock(),
            stats=stats,
            memory_max_bytes=budget,
            memory_reserve_bytes=0,
            _prefill_reserve_bytes=0,
            checkpoint_interval_tokens=256,
        )
        core.attach(self)

    def _memory_headroom(self):
        return 1 << 40

    def _make_room(self, allocation_bytes, *, retain_bytes=0):
        return core.make_room(self, allocation_bytes, retain_bytes)


@pytest.fixture
def coordinator():
    return SimpleNamespace(
        enabled=True,
        is_checkpoint=False,
        plan=None,
        manager=Manager(),
        fresh_cache=DENSE.fresh,
        plain_rows=True,
    )


def commit(coordinator, ids):
    return core.commit(coordinator, ids, DENSE.row(ids), batch_idx=None, extra_hash=0)


def test_a_hit_is_restored_as_the_plain_row_of_a_cold_request(coordinator):
    assert commit(coordinator, [1, 2, 3])
    hit = core.lookup(coordinator, [1, 2, 3, 4], **ANY)
    caches, longest = core.merge_rows(coordinator, [hit], [hit["prefix_len"]], None)
    assert longest == 3
    DENSE.check(caches, [1, 2, 3])
    core.release(hit["matched_blocks"])
    assert coordinator.manager.segments.statistics()["leases"] == 0


@pytest.mark.parametrize("part", ["find", "match"])
def test_a_fault_while_looking_up_is_a_miss(coordinator, monkeypatch, caplog, part):
    commit(coordinator, [1, 2, 3])
    monkeypatch.setattr(coordinator.manager.segments, part, broken)
    with caplog.at_level(logging.WARNING):
        assert core.lookup(coordinator, [1, 2, 3, 4], **ANY) is None
    assert "broken" in caplog.text and coordinator.manager.stats.misses == 1


def test_a_fault_while_restoring_leaves_the_rows_cold(coordinator, monkeypatch, caplog):
    commit(coordinator, [1, 2, 3])
    hit = core.lookup(coordinator, [1, 2, 3, 4], **ANY)
    monkeypatch.setattr(coordinator.manager.segments, "restore", broken)
    assert core.merge_rows(coordinator, [hit, None], [3, 0], None) == (None, 0)
    assert "broken" in caplog.text
    assert coordinator.manager.stats.restored_tokens == 0


def test_a_fault_while_committing_stores_nothing(coordinator, monkeypatch, caplog):
    monkeypatch.setattr(coordinator.manager.segments, "commit", broken)
    assert not commit(coordinator, [1, 2, 3])
    assert "broken" in caplog.text


def test_only_what_was_not_there_counts_as_stored(coordinator):
    commit(coordinator, [1, 2, 3])
    commit(coordinator, [1, 2, 3, 4, 5])
    commit(coordinator, [1, 2, 3, 4, 5])
    assert coordinator.manager.stats.stored_tokens == 5


def test_statistics_and_commits_do_not_wait_for_each_other(coordinator):
    """One holds the manager's lock and asks for bytes; the other holds the segments'
    lock and asks the manager for room."""
    manager = coordinator.manager
    manager.segments.max_bytes = manager.memory_max_bytes = 4096
    done = threading.Event()

    def read():
        while not done.is_set():
            with manager.lock:
                assert manager.segments.nbytes >= 0

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    writer = threading.Thread(
        target=lambda: [commit(coordinator, [n, 1, 2, 3]) for n in range(200)],
        daemon=True,
    )
    writer.start()
    writer.join(60)
    done.set()
    reader.join(5)
    assert not writer.is_alive() and not reader.is_alive(), "a dead lock"
    assert manager.segments.evictions > 0


def broken(*args, **kwargs):
    raise RuntimeError("broken")
