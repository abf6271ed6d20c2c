"""The benchmark's server that can be each side in turn, in one process.

Started by ``gpu_run``, never by hand.  It starts as stock without a prefix cache.
``GET /bench/switch?side=...`` makes it another side between two requests, in the
generation thread, on the model that is loaded: the plugin is taken away or applied by
its own ``deactivate()`` and ``activate()``, and the generator gets that side's storage
manager.  So the sides share weights, compiled kernels, memory, cores and threads, and
differ in nothing else.

*The side without the plugin is stock*: after each ``deactivate()`` every symbol that a
change targets is compared with the object that stock defined; one that is not the same
object fails the switch.  Without a prefix cache the generator has no manager, as in a
server that was started with ``APC_ENABLED=0``.

What is observed (see ``gpu_server``) hangs on seams that no change targets, or is taken
off for the switch; it costs every side the same.

*With a draft model* a side's name ends with ``DRAFTER`` where it drafts; the others have
none in their generator, as in a server that was started without.  A model folder with a
``chain.json`` gets a head and a drafter that agree on replies (see ``gpu_chain``).

``GET /bench/place`` puts the generation thread on a core of its own.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import mlx_vlm_cacheplus
from mlx_vlm_cacheplus import checks, patching
from mlx_vlm_cacheplus.changes import load_changes
from tests.bench import gpu_chain, gpu_server
from tests.bench.gpu_cores import siblings
from tests.bench.gpu_server import Watch
from tests.bench.gpu_tables import DRAFTER, NO_CACHE, PLUS, STOCK_40
from tests.bench.gpu_turns import Turns, turn_times

# Again stock without a cache, by the same way as a switch to plus: what a switch costs.
SHAM = "sham"
RAM = {
    "APC_ENABLED": "1",
    "APC_DISK_ENABLED": "0",
    "APC_MEMORY_MAX_GB": os.environ.get("BENCH_RAM_GB", "40"),
}
WAIT_SECONDS = 60.0


class Switch(Watch):
    """Makes the process one side after the other, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.side = NO_CACHE
        self.generator: Any = None
        self.thread = 0
        self.job: tuple[Callable[[], Any], Future[Any]] | None = None
        self.drafter: tuple[Any, Any] = (None, None)
        self.turns = Turns()
        self.storage: dict[str, tuple[Any, Any]] = {}
        for side in (NO_CACHE, NO_CACHE + DRAFTER, SHAM):
            self.storage[side] = (None, None)
        self.originals: list[tuple[Any, str, Any]] = []
        # A planted slow-down of one side, to see that the benchmark finds it.
        side, _, share = os.environ.get("BENCH_PLANT", "").partition(":")
        self.planted = (side, float(share or 0))

    # -- what is observed --------------------------------------------------------
    def install(self) -> None:
        """As the base's; before it, remember what stock defines."""
        for target in (t for change in load_changes() for t in change.targets):
            holder, name = patching.resolve_holder(target.module, target.qualname)
            value = patching.raw_value(holder, name)
            self.originals.append((holder, name, value))
        super().install()

    def _leave_seams(self) -> None:
        while self.seams:
            owner, name, original = self.seams.pop()
            setattr(owner, name, original)

    def between(self, generator: Any, active: bool) -> bool:
        """Do what waits for an idle generation thread; whether there was something."""
        if self.generator is not generator:
            self.generator, self.thread = generator, threading.get_native_id()
            self.drafter = (generator.draft_model, generator.draft_kind)
            gpu_chain.install(generator, Path(generator.model_path))
        if active or self.job is None:
            return False
        (work, done), self.job = self.job, None
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return True

    def admitted(self, request: Any) -> dict[str, Any]:
        """Counts of the drafter and clocks of the turns too."""
        own = {"drafted": self._drafted(), "began": [], "cpu": []}
        most = int(request.args.max_tokens or 0)
        return {**super().admitted(request), **own, "most": most}

    def wrote(self, request: dict[str, Any], token: int) -> None:
        """One token; in turn with another server where that is wanted."""
        self._plant(request)
        super().wrote(request, token)
        request["cpu"].append(time.thread_time())
        said = len(request["times"])
        request["began"].append(self.turns.after(said, request["most"]))

    def _plant(self, request: dict[str, Any]) -> None:
        side, share = self.planted
        if side == self.side and request["began"]:
            now = time.perf_counter()
            until = now + share * (now - request["began"][-1][0])
            while time.perf_counter() < until:
                pass

    def take(self) -> list[dict[str, Any]]:
        """Everything since the last call; what was drafted, and the turns."""
        out = super().take()
        counts = [request["drafted"] for request in out] + [self._drafted()]
        for request, before, after in zip(out, counts, counts[1:], strict=False):
            request["drafted"] = [b - a for a, b in zip(before, after, strict=True)]
            request["turns"] = turn_times(request)
            del request["began"], request["cpu"]
        return out

    def _drafted(self) -> list[int]:
        """Rounds, accepted and drafted tokens of the drafter so far."""
        names = ("rounds", "accepted", "drafted")
        drafter = self.drafter[0]
        return [int(getattr(drafter, f"speculative_total_{n}", 0)) for n in names]

    # -- the switch --------------------------------------------------------------
    def _in_generation_thread(self, work: Callable[[], Any]) -> Any:
        done: Future[Any] = Future()
        self.job = (work, done)
        if self.generator is not None:
            self.generator.requests.put(None)
        wait([done], WAIT_SECONDS)
        if not done.done():
            raise RuntimeError("the generation thread did not become idle")
        return done.result()

    def switch(self, side: str) -> dict[str, Any]:
        """Become this side before the next request."""
        began = time.perf_counter()
        try:
            out = self._in_generation_thread(lambda: self._become(side))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {**out, "seconds": round(time.perf_counter() - began, 4)}

    def _become(self, side: str) -> dict[str, Any]:
        self._leave_seams()
        mlx_vlm_cacheplus.deactivate()
        # The app builds its middleware again, with or without the plugin's.
        app = importlib.import_module("mlx_vlm.server.app").app
        app.middleware_stack = None
        for holder, name, original in self.originals:
            if vars(holder).get(name, original) is not original:
                raise RuntimeError(f"{holder}.{name} is not stock's")
        for name in [name for name in os.environ if name.startswith("APC_")]:
            del os.environ[name]
        cache = side.removesuffix(DRAFTER)
        os.environ.update(RAM if cache in (STOCK_40, PLUS) else {"APC_ENABLED": "0"})
        drafter = self.drafter if side != cache else (None, None)
        self.generator.draft_model, self.generator.draft_kind = drafter
        applied: tuple[str, ...] = ()
        if cache == PLUS:
            report = self._activate()
            wrong = [f.line() for f in report.findings if f.state.value != "applied"]
            if wrong:
                raise RuntimeError("; ".join(wrong))
            applied = report.applied
        manager, mode = self._storage_of(side)
        self._hand_over(manager, mode)
        self.side = side
        self.watch_seams()
        return {"side": side, "applied": applied, "mode": str(mode)}

    @staticmethod
    def _activate() -> Any:
        """Apply the plugin to a server that serves, which it refuses by itself.

        What the refusal protects is cared for: no request is in flight, the next one
        gets a batch generator of its own, and the storage is made afterwards.  The last
        batch generator is asked once more whether it has work.
        """
        generate = importlib.import_module("mlx_vlm.generate.ar")
        generate.BatchGenerator.speculative_batches = ()
        reason, checks.serving_reason = checks.serving_reason, lambda: ""
        try:
            return mlx_vlm_cacheplus.activate()
        finally:
            checks.serving_reason = reason

    def _storage_of(self, side: str) -> tuple[Any, Any]:
        if side not in self.storage:
            apc = importlib.import_module("mlx_vlm.apc")
            model = self.generator.model
            language_model = getattr(model, "language_model", model)
            self.storage[side] = (apc.from_env(), apc.model_apc_mode(language_model))
        return self.storage[side]

    def _hand_over(self, manager: Any, mode: Any) -> None:
        app = importlib.import_module("mlx_vlm.server.app")
        self.generator.apc_manager = app.runtime.apc_manager = manager
        self.generator.apc_mode = mode
        for _, loaded in app._model_cache_registry().items():
            if loaded.get("response_generator") is self.generator:
                loaded["apc_manager"] = manager

    def place(self) -> Any:
        """The generation thread on a core of its own, whose siblings stay idle."""
        return self._in_generation_thread(self._place)

    def _place(self) -> dict[str, Any]:
        # New threads inherit their place from their maker.
        cores = {int(core) for core in os.environ["BENCH_CORES"].split(",")}
        own = {max(cores)}  # the first core has most of the interrupts
        others = cores - siblings(max(cores))
        for task in Path("/proc/self/task").iterdir():
            try:
                mine = int(task.name) == self.thread
                os.sched_setaffinity(int(task.name), own if mine else others)
            except OSError:
                pass  # it has ended
        return {"own": sorted(own), "others": sorted(others)}


def main(words: list[str]) -> None:
    """Run stock's server with these arguments."""
    # The client of this module forbade the plugin; here it comes and goes.
    os.environ.pop("MLX_VLM_CACHEPLUS", None)
    watch = Switch()
    routes = {"switch": watch.switch, "place": watch.place, "sit": watch.turns.sit}
    gpu_server.serve(words, watch, routes)


if __name__ == "__main__":
    main(sys.argv[1:])
