"""The server of ``gpu_agents``: sides that differ in how drafted rows share the device.

Started by ``gpu_agents``, never by hand.  A side's name may end with one of ``MODES``: how
the plugin puts speculative batches together.  ``GET /bench/steps`` counts what the
generation thread did since it was asked last:

    rounds    verify steps of speculative batches, and ``rows`` in them
    steps     steps of other batches, and ``step_rows`` in them
    chunks    forward passes of prompts
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.bench import gpu_server
from tests.bench.gpu_switch import Switch

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
            return original(batch)

        return turn

    def _round(self, original: Any) -> Any:
        def record(*args: Any) -> None:
            self.counts["rounds"] += 1
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
            return original(batch, *args, **kwargs)

        return chunk

    def steps(self) -> dict[str, int]:
        """Counts since the last call."""
        out, self.counts = dict(self.counts), Counter()
        return out


def main(words: list[str]) -> None:
    """Run stock's server with these arguments."""
    # The client of this module forbade the plugin; here it comes and goes.
    os.environ.pop("MLX_VLM_CACHEPLUS", None)
    watch = AgentsSwitch()
    routes = {"switch": watch.switch, "place": watch.place, "steps": watch.steps}
    gpu_server.serve(words, watch, routes)


if __name__ == "__main__":
    main(sys.argv[1:])
