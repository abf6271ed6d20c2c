"""The server of ``gpu_disk``: a ``gpu_switch`` whose sides can have a disk tier.

A side whose name ends with ``DISK`` gets a storage manager with a disk tier: of stock's
what ``APC_DISK_PATH`` makes of it, of plus what ``durable-disk`` does, opened as with a
model that has been loaded.  A side that has not the tiers that its name says fails the
switch.  One that ends with ``TWIN`` is the same as without, with storage of its own.

``GET /bench/restart?side=...&folder=...`` is a server's end and start on that folder, as
far as the cache knows: the side's manager is closed as with the model, and a new one is
made.  ``GET /bench/leave`` is the end alone.

At each token it is noted how much waits to be written and how much is written.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_vlm_cacheplus.core import disk_coordination
from tests.bench import gpu_server
from tests.bench.gpu_switch import Switch
from tests.bench.gpu_tables import NO_CACHE, PLUS

DISK, TWIN = " + disk", " + twin"


class DiskSwitch(Switch):
    """See the module's text."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(os.environ["MLX_VLM_CACHE_HOME"]) / "disk"
        self.wanted = NO_CACHE
        self.opened = 0.0  # seconds in which the last storage was made and opened
        self.handed = 0  # parcels that were given to the writer

    # -- the switch --------------------------------------------------------------
    def _become(self, side: str) -> dict[str, Any]:
        self.wanted = side
        out = super()._become(side.removesuffix(DISK).removesuffix(TWIN))
        manager = self.generator.apc_manager
        if side == PLUS + DISK and disk_coordination.tier_of(manager) is None:
            began = time.perf_counter()
            disk_coordination.open_tier(self.generator)
            self.opened += time.perf_counter() - began
            self._watch(disk_coordination.tier_of(manager))
        self.side = side
        tiers = {
            "stock": getattr(manager, "disk", None) is not None,
            "plus": disk_coordination.tier_of(manager) is not None,
        }
        wanted = {name: side.startswith(name) and DISK in side for name in tiers}
        if tiers != wanted:
            raise RuntimeError(f"{side} has these disk tiers: {tiers}")
        return {**out, "side": side, "tiers": tiers}

    def _storage_of(self, side: str) -> tuple[Any, Any]:
        if self.wanted.endswith(DISK):
            os.environ["APC_DISK_ENABLED"] = "1"
            os.environ["APC_DISK_PATH"] = str(self.folder)
        began = time.perf_counter()
        out = super()._storage_of(self.wanted)
        self.opened = time.perf_counter() - began
        return out

    def _close(self, side: str) -> None:
        """Close a side's manager, on that side, and forget it."""
        if side in self.storage and side.endswith(DISK):
            if self.side != side:
                self._become(side)
            manager, _ = self.storage.pop(side)
            manager.close()

    def restart(self, side: str, folder: str) -> dict[str, Any]:
        """End this side if it runs, and start it on a folder with nothing in RAM."""

        def work() -> dict[str, Any]:
            self._close(side)
            self.folder = Path(folder)
            gc.collect()
            out = {**self._become(side), "opened": self.opened}
            # The tier's threads were made by this one and must not share its core.
            if "BENCH_CORES" in os.environ:
                self._place()
            return out

        return self._said(work)

    def leave(self) -> dict[str, Any]:
        """End the side that this is."""

        def work() -> dict[str, Any]:
            began = time.perf_counter()
            self._close(self.side)
            closed = time.perf_counter() - began
            out = {**self._become(NO_CACHE), "closed": closed}
            gc.collect()
            return out

        return self._said(work)

    def _said(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            out: dict[str, Any] = self._in_generation_thread(work)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return out

    # -- what is written ---------------------------------------------------------
    def _watch(self, tier: Any) -> None:
        """Note what is handed to the writer, and how long that takes."""
        put, hand_over = tier.writer.put, tier.spill.hand_over

        def counted(parcel: Any) -> None:
            self.handed += 1
            put(parcel)

        def timed(again: bool = False) -> None:
            before, began = self.handed, time.perf_counter()
            hand_over(again)
            if self.handed > before and self.requests:
                request = self.requests[-1]
                ms = round(1000 * (time.perf_counter() - began), 3)
                said, nbytes = len(request["times"]), tier.writer.pending_bytes
                request["disk"]["handed"].append([said, ms, nbytes])

        tier.writer.put, tier.spill.hand_over = counted, timed

    def admitted(self, request: Any) -> dict[str, Any]:
        """How much is written at each token too."""
        disk: dict[str, list[Any]] = {"waiting": [], "bytes": [], "handed": []}
        return {**super().admitted(request), "disk": disk}

    def wrote(self, request: dict[str, Any], token: int) -> None:
        """One token; what is noted is noted when this server has the turn again."""
        super().wrote(request, token)
        tier = disk_coordination.tier_of(self.generator.apc_manager)
        waiting = nbytes = 0
        if tier is not None:
            waiting = len(tier.spill.notes) + tier.writer.pending
            nbytes = tier.writer.counts.written_bytes
        request["disk"]["waiting"].append(waiting)
        request["disk"]["bytes"].append(nbytes)


def main(words: list[str]) -> None:
    """Run stock's server with these arguments."""
    os.environ.pop("MLX_VLM_CACHEPLUS", None)
    watch = DiskSwitch()
    routes = {"switch": watch.switch, "place": watch.place, "sit": watch.turns.sit}
    routes |= {"restart": watch.restart, "leave": watch.leave}
    gpu_server.serve(words, watch, routes)


if __name__ == "__main__":
    main(sys.argv[1:])
