"""Runs whose servers switch sides: the parts that they have in common."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.bench import gpu_tables
from tests.bench.gpu_asking import RAM_GB, BenchServer, Session
from tests.bench.gpu_cores import keep_apart
from tests.bench.gpu_inputs import Plan


class SwitchServer(BenchServer):
    """A server that starts without a prefix cache and can become each side."""

    module = "tests.bench.gpu_switch"
    settings = {"APC_ENABLED": "0"}

    def stop(self) -> None:
        """End it at once: it holds nothing that must be written."""
        if self._process is not None:
            self._process.kill()
        super().stop()


class Sides(Session):
    """Asks one server, side after side; owns its process."""

    def __init__(
        self,
        plan: Plan,
        options: argparse.Namespace,
        folder: Path,
        home: Path,
        arguments: tuple[str, ...] = (),
    ):
        options = argparse.Namespace(**vars(options), folder=str(folder))
        super().__init__(plan, options)
        self.server = SwitchServer(str(folder), home, False, arguments, 240.0)

    def up(self) -> float:
        """Start the server; seconds."""
        began = time.monotonic()
        self.server.__enter__()
        self.base = self.server.base
        return time.monotonic() - began

    def become(self, side: str) -> None:
        """Make the server this side; nothing is asked in between."""
        if self.side != side:
            answer = self.get("switch", side=side)
            if "error" in answer:
                raise RuntimeError(f"no switch to {side}: {answer['error']}")
            self.side = side

    def place(self) -> Any:
        """Give the generation thread a core of its own, where there are enough."""
        return self.get("place") if "BENCH_CORES" in os.environ else None

    def machine(self) -> dict[str, Any]:
        """What else can make a process slow: steal time, load, the GPU's clocks."""
        out: dict[str, Any] = {"at": time.monotonic(), "load": os.getloadavg()}
        stat = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
        names = "user nice system idle iowait irq softirq steal".split()
        out["ticks"] = dict(zip(names, map(int, stat[1:9]), strict=True))
        wanted = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"
        command = ["nvidia-smi", "-i", self.options.gpu or "0", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                [*command, wanted],
                capture_output=True,
                text=True,
                timeout=5,
                check=False,
            )
            out["gpu"] = done.stdout.strip()
        return out

    def keep_log(self) -> None:
        """Append the end of the server's log to the run's."""
        if self.server.log.exists():
            with open(self.options.out / "servers.log", "a", encoding="utf-8") as log:
                log.write(self.server.tail(100))


def parser(
    name: str, text: str | None, seconds: float, shapes: Sequence[str]
) -> argparse.ArgumentParser:
    """Arguments that all runs have; the defaults are those of docs/BENCHMARKS.md."""
    out = argparse.ArgumentParser(prog=name, description=text)
    out.formatter_class = argparse.RawDescriptionHelpFormatter
    out.add_argument("--out", type=Path, required=True, help="folder of the results")
    out.add_argument("--gpu", help="CUDA_VISIBLE_DEVICES of the servers")
    out.add_argument(
        "--seconds", type=float, default=seconds, help="as far as possible"
    )
    out.add_argument("--shapes", default=",".join(shapes))
    out.add_argument("--small", action="store_true", help="a short run for a CPU")
    return out


def parse(
    words: argparse.ArgumentParser, arguments: Sequence[str] | None, **small: Any
) -> argparse.Namespace:
    """Options; with ``--small`` the defaults are these."""
    if words.parse_args(arguments).small:
        words.set_defaults(**small)
    return words.parse_args(arguments)


def prepare(options: argparse.Namespace) -> None:
    """Environment and folders of a run."""
    options.out.mkdir(parents=True, exist_ok=True)
    if options.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.gpu
    options.ram_gb = RAM_GB
    os.environ["BENCH_RAM_GB"] = str(RAM_GB)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    keep_apart()
    # An end from outside leaves through ``finally``, so that rows and servers are seen to.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def run(
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, Path], bool],
    report: Callable[[Path], str],
) -> int:
    """Measure, print the figures; 0, or 1 where a part failed."""
    prepare(options)
    work = Path(tempfile.mkdtemp(prefix="gpu-run-"))
    fine = False
    try:
        fine = measure(options, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        text = report(options.out)
        (options.out / "report.md").write_text(text, encoding="utf-8")
        print(text, flush=True)
    return 0 if fine else 1


def save(
    options: argparse.Namespace, shape: str, kind: str, rows: gpu_tables.Rows
) -> None:
    """Write all rows of a shape."""
    text = gpu_tables.as_json(rows, vars(options))
    file = options.out / f"{shape}-{kind}.json"
    file.write_text(text, encoding="utf-8")
