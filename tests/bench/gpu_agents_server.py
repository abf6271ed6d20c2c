"""The server of ``gpu_agents``: sides that differ in how drafted rows share the device.

Started by ``gpu_agents``, never by hand.  A side's name may end with one of ``MODES``: how
the plugin puts speculative batches together.  ``GET /bench/steps`` counts what the
generation thread did since it was asked last:

    rounds    verify steps of speculative batches, and ``rows`` in them
    steps     steps of other batches, and ``step_rows`` in them
    chunks    forward passes of prompts

With ``BENCH_PROFILE`` in its environment, a folder, it is told every few seconds where
the generation thread was, and what each turn took: side, rows, columns, seconds.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench import gpu_server
from tests.bench.device_profile import DeviceProfile
from tests.bench.gpu_switch import Switch
from tests.bench.thread_profile import Profiler

MODE = "MLX_VLM_DRAFT_MERGE"
# What ends a side's name: how the plugin puts speculative batches together.
MODES = {", turns": "never", ", joined": "always", ", by pace": "auto"}


def parted(side: str) -> tuple[str, str]:
    """A side as ``gpu_switch`` knows it, and its mode."""
    for mode in MODES:
        if side.endswith(mode):
            return side.removesuffix(mode), mode
    return side, ""


class AgentsSwitch(Switch):
    """Knows the modes, and counts steps."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.batch: Any = None
        self.took: list[tuple[str, str, int, int, float]] = []
        self.folder = os.environ.get("BENCH_PROFILE")
        self.device: DeviceProfile | None = None
        if cuda := os.environ.get("BENCH_CUDA"):
            self.device = DeviceProfile(Path(cuda), lambda: self.counts_of_all)
        self.counts_of_all = 0

    def between(self, generator: Any, active: bool) -> bool:
        """As the base's; the first time, begin to watch this thread."""
        if self.folder and self.generator is not generator:
            profiler = Profiler(Path(self.folder), self._told)
            profiler.watch(threading.get_ident())
        return super().between(generator, active)

    def _told(self) -> dict[str, Any]:
        took, self.took = self.took, []
        return {"side": self.side, "took": took}

    def _note(self, what: str, batch: Any, rows: int, began: float) -> None:
        if self.folder:
            columns = _columns(batch)
            seconds = round(time.perf_counter() - began, 4)
            self.took.append((self.side, what, rows, columns, seconds))

    def _become(self, side: str) -> dict[str, Any]:
        base, mode = parted(side)
        out = super()._become(base)
        os.environ[MODE] = MODES.get(mode, "never")
        self.side = side
        return {**out, "side": side}

    def watch_seams(self) -> None:
        """Count steps too."""
        super().watch_seams()
        ar = importlib.import_module("mlx_vlm.generate.ar")
        for name in ("mtp", "eagle3"):
            module = importlib.import_module(f"mlx_vlm.speculative.{name}")
            self._count(module, "_record_speculative_round", self._round)
        self._count(ar.SpeculativeGenerationBatch, "next", self._turn)
        self._count(ar.GenerationBatch, "next", self._step)
        for name in ("prompt_step", "generate"):
            self._count(ar.PromptProcessingBatch, name, self._chunk)

    def _count(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self.seams.append((owner, name, vars(owner)[name]))
        self._wrap(owner, name, make)

    def _turn(self, original: Any) -> Any:
        def turn(batch: Any) -> Any:
            self.batch = batch
            rows = len(batch.uids)
            if self.device is not None:
                self.device.turn(f"{self.side}, rows {rows}")
            began = time.perf_counter()
            try:
                return original(batch)
            finally:
                self._note("turn", batch, rows, began)

        return turn

    def _round(self, original: Any) -> Any:
        def record(*args: Any) -> None:
            self.counts["rounds"] += 1
            self.counts_of_all += 1
            self.counts["rows"] += len(self.batch.uids)
            original(*args)

        return record

    def _step(self, original: Any) -> Any:
        def step(batch: Any) -> Any:
            if batch.uids:
                self.counts["steps"] += 1
                self.counts["step_rows"] += len(batch.uids)
            return original(batch)

        return step

    def _chunk(self, original: Any) -> Any:
        def chunk(batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.counts["chunks"] += 1
            rows, began = len(batch.uids), time.perf_counter()
            try:
                return original(batch, *args, **kwargs)
            finally:
                self._note(original.__name__, batch, rows, began)

        return chunk

    def steps(self) -> dict[str, int]:
        """Counts since the last call."""
        out, self.counts = dict(self.counts), Counter()
        return out


def _columns(batch: Any) -> int:
    known = (getattr(entry, "_idx", 0) for entry in batch.prompt_cache or ())
    return max((one for one in known if isinstance(one, int)), default=0)


def main(words: list[str]) -> None:
    """Run stock's server with these arguments."""
    # The client of this module forbade the plugin; here it comes and goes.
    os.environ.pop("MLX_VLM_CACHEPLUS", None)
    watch = AgentsSwitch()
    routes = {"switch": watch.switch, "place": watch.place, "steps": watch.steps}
    gpu_server.serve(words, watch, routes)


if __name__ == "__main__":
    main(sys.argv[1:])
