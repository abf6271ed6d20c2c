"""When a step waits for the disk, and when rows that have ended are handed over."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mlx_vlm_cacheplus.core import disk_coordination as disk
from mlx_vlm_cacheplus.core.disk_settings import DiskSettings


class Tier:
    """Notes how long a load is waited for; it never comes."""

    is_closed = False

    def __init__(self):
        self.waited, self.ticks = [], 0

    def wait(self, load, seconds):
        self.waited.append(seconds)
        return False

    def tick(self):
        self.ticks += 1


@pytest.mark.parametrize("fault", [OSError("no weights"), ValueError("a path")])
def test_a_fault_at_start_leaves_a_server_without_a_tier(
    monkeypatch, caplog, tmp_path, fault
):
    """The model is loaded: it answers, with its cache in RAM."""

    def fail(*args):
        raise fault

    monkeypatch.setattr(disk, "_open_tier", fail)
    settings = DiskSettings(tmp_path / "segments", None, queue_bytes=1)
    manager = SimpleNamespace(disk_settings=settings)
    disk.open_tier(SimpleNamespace(apc_manager=manager, apc_mode="trees"))
    assert disk.tier_of(manager) is None
    assert f"No disk cache: {fault}" in caplog.text


def step(plain=0, speculative=(), reading=None, others=0):
    """One step of a generator for whose first row the disk is read; the tier."""
    tier = Tier()
    queue = [(uid, [1, 2, 3]) for uid in range(1 + others)]
    generator = SimpleNamespace(
        apc_manager=SimpleNamespace(disk_tier=tier),
        disk_loads={0: "load"},
        _unprocessed_sequences=queue,
        _generation_batch=range(plain),
        _prompt_batch=reading,
        speculative_batches=list(speculative),
    )
    with disk.rows_being_read_wait(generator):
        assert [row[0] for row in generator._unprocessed_sequences] == [
            *range(1, 1 + others)
        ]
    assert len(generator._unprocessed_sequences) == 1 + others
    return tier


def test_a_row_that_is_alone_waits_for_the_disk():
    assert step().waited == [disk.STEP_SECONDS]


@pytest.mark.parametrize(
    "busy",
    [{"plain": 1}, {"speculative": ["batch"]}, {"reading": "batch"}, {"others": 1}],
    ids=lambda busy: next(iter(busy)),
)
def test_nobody_else_waits_for_the_disk(busy):
    assert step(**busy).waited == [0.0]


def test_what_ended_is_handed_over_once_nobody_decodes():
    assert step().ticks == 1
    assert step(plain=1).ticks == step(speculative=["batch"]).ticks == 0
