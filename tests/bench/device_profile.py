"""What a CUDA device did in some rounds: kernels, graphs, copies and calls.

PyTorch's profiler records all that its process asks of the device, MLX's work too.  So
this needs a PyTorch beside MLX, and nothing of it is imported before it is used.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Turns of a kind before the first that is recorded, and how many are.
BEFORE, RECORDED = 60, 30


class DeviceProfile:
    """Records turns of each kind once; writes a file for each.

    Args:
        folder: gets the files.
        rounds: how many verify steps there were so far.
    """

    def __init__(self, folder: Path, rounds: Callable[[], int]):
        self._folder = folder
        self._rounds = rounds
        self._seen: dict[str, int] = {}
        self._running: tuple[str, Any, int, float] | None = None

    def turn(self, kind: str) -> None:
        """A turn of this kind is about to begin; call in the thread that takes it."""
        if self._running and (
            kind != self._running[0] or self._seen[kind] >= BEFORE + RECORDED
        ):
            self._end()
        self._seen[kind] = self._seen.get(kind, 0) + 1
        if self._seen[kind] == BEFORE:
            self._begin(kind)

    def _begin(self, kind: str) -> None:
        from torch import profiler

        activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]
        running = profiler.profile(activities=activities, acc_events=True)
        running.start()
        self._running = (kind, running, self._rounds(), time.perf_counter())

    def _end(self) -> None:
        assert self._running is not None
        (kind, running, before, began), self._running = self._running, None
        seconds = time.perf_counter() - began
        running.stop()
        rows = sorted(
            (
                (
                    row.key[:160],
                    row.count,
                    row.self_device_time_total,
                    row.self_cpu_time_total,
                )
                for row in running.key_averages()
            ),
            key=lambda row: -(row[2] + row[3]),
        )
        found = {"kind": kind, "rounds": self._rounds() - before, "seconds": seconds}
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"device-{len(list(self._folder.glob('device-*')))}.json"
        found["events"] = rows[:150]
        file.write_text(json.dumps(found, indent=1), encoding="utf-8")
