"""One recorded agent session on stock and on stock with the plugin, timed on a GPU.

    python -m tests.bench.gpu_session --shape dense7b --together --json dense.json
    python -m tests.bench.gpu_session --small           # the mechanics, on a CPU

Four servers, each a process of its own, answer the same requests over HTTP, from a
script, streamed, one request at a time:

    no cache      stock, no prefix cache
    stock         stock's prefix cache in RAM, with the budget that it gives itself
    stock 40 GB   the same with APC_MEMORY_MAX_GB=40
    plus 40 GB    the same with --cacheplus

*The model* has random weights, so what it would write is arbitrary and can differ
between two servers where two logits are near.  Replies are therefore scripted inside
the server (see ``gpu_server``): the model computes each token, the script says it.  All
servers then see the same prompts, and the history that goes back holds what the server
itself wrote, so that a server that keeps replies can use them.  The prompts' ids are
compared, and no ratio is given where they differ.

*Everything is compiled before it is timed*: each server replays the whole session and
the cold turn once, then its cache is reset.  Every timed request has the shape of one
in the warm-up.  The timed rounds alternate the order of the servers.  With
``--together`` all four stay loaded, and one is asked at a time; the default loads one
after the other.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tests.bench import gpu_tables
from tests.bench.gpu_asking import HTTP, RAM_GB, SMALL, BenchServer, Session, note
from tests.bench.gpu_cores import keep_apart
from tests.bench.gpu_inputs import SHAPES, Plan, make_model, make_plan
from tests.bench.gpu_tables import NO_CACHE, PLUS, SIDES, STOCK, STOCK_40, Rows
from tests.fakes.models import NAMES, model_dir

RAM = {"APC_ENABLED": "1", "APC_DISK_ENABLED": "0"}
BUDGET = {**RAM, "APC_MEMORY_MAX_GB": str(RAM_GB)}
ENVIRONMENTS = {
    NO_CACHE: {"APC_ENABLED": "0"},
    STOCK: RAM,
    STOCK_40: BUDGET,
    PLUS: BUDGET,
}


class Server(Session):
    """One of the four."""

    def warm_up(self) -> None:
        """Every shape that will be timed, once."""
        began = time.perf_counter()
        self.session("w")
        self.reset()
        self.turn("w", self.plan.replies[:-1])
        if not self.options.together:
            self.reset()
        self.seen()
        note(f"  {self.side}: warm-up {time.perf_counter() - began:.0f} s")

    def round(self, number: int) -> None:
        """One timed session from an empty cache, then its last turn cold."""
        marker = "abcdefgh"[number]
        rows = self.timed(marker, number)
        cold = self.turn(marker, [row["text"] for row in rows[:-1]])
        gpu_tables.join_seen([cold], self.seen())
        self.rows["cold"].append({"side": self.side, "round": number, **cold})
        total = sum(row["seconds"] for row in rows)
        note(
            f"  {self.side:12} round {number}: session {total:.2f} s, last turn "
            f"{rows[-1]['ttft']:.3f} s, cold {cold['ttft']:.3f} s"
        )


def measure(
    plan: Plan,
    options: argparse.Namespace,
    rows: Rows,
    work: Path,
    save: Callable[[], None],
) -> None:
    """Time all sides; ``save`` is called after each session."""
    enough = time.monotonic() + options.seconds
    for group in [SIDES] if options.together else [(side,) for side in SIDES]:
        with ExitStack() as stack:
            servers = [
                Server(plan, options, base, side, rows)
                for side, base in start(stack, group, options, work).items()
            ]
            with ThreadPoolExecutor(len(group)) as pool:
                list(pool.map(Server.warm_up, servers))
            for number in range(options.rounds):
                for server in servers[:: -1 if number % 2 else 1]:
                    server.round(number)
                    save()
                if time.monotonic() > enough:
                    break


def start(
    stack: ExitStack, sides: Sequence[str], options: argparse.Namespace, work: Path
) -> dict[str, str]:
    """Start servers at the same time; their addresses."""
    began = time.perf_counter()

    def one(side: str) -> BenchServer:
        home = work / side.replace(" ", "-")
        server = BenchServer(str(options.folder), home, side == PLUS)
        server.settings, server.wait_seconds = ENVIRONMENTS[side], 300.0
        stack.callback(server.stop)
        server.__enter__()
        return server

    with ThreadPoolExecutor(len(sides)) as pool:
        servers = dict(zip(sides, pool.map(one, sides), strict=True))
    for side, server in servers.items():
        applied = "segments" in HTTP.get(f"{server.base}/v1/cache/stats").json()
        if applied != (side == PLUS):
            raise RuntimeError(f"{side}: plugin on is {applied}\n{server.tail()}")
    note(f"  {', '.join(sides)}: up after {time.perf_counter() - began:.0f} s")
    return {side: server.base for side, server in servers.items()}


def parser() -> argparse.ArgumentParser:
    """Arguments; the defaults are those of docs/BENCHMARKS.md."""
    out = argparse.ArgumentParser(prog="gpu_session", description=__doc__)
    out.formatter_class = argparse.RawDescriptionHelpFormatter
    model = out.add_mutually_exclusive_group()
    model.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    model.add_argument("--model", help="a bundled model's name, or a folder")
    out.add_argument("--small", action="store_true", help="a short run for a CPU")
    out.add_argument("--turns", type=int, default=12)
    out.add_argument("--system", type=int, default=2000, help="tokens of system text")
    out.add_argument("--user", type=int, default=480, help="tokens of a user message")
    out.add_argument("--reply", type=int, default=60, help="tokens of a reply")
    out.add_argument("--rounds", type=int, default=3, help="timed sessions a server")
    out.add_argument("--together", action="store_true", help="keep all four loaded")
    out.add_argument("--seconds", type=float, default=3600.0, help="stop rounds then")
    out.add_argument("--json", help="raw rows go here, as they come")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables; 0, or 1 where the sides did different work."""
    words = parser()
    if words.parse_args(arguments).small:
        words.set_defaults(**SMALL, model="dense", rounds=1)
    options = words.parse_args(arguments)
    keep_apart()
    work = Path(tempfile.mkdtemp(prefix="gpu-session-"))
    if options.shape:
        options.folder = str(
            make_model(options.shape, work / options.shape, options.small)
        )
    elif options.model in NAMES:
        options.folder = str(model_dir(options.model))
    else:
        options.folder = options.model
    plan = make_plan(options.turns, options.system, options.user, options.reply)
    rows: Rows = defaultdict(list)

    def save() -> None:
        if options.json:
            text = gpu_tables.as_json(rows, vars(options))
            Path(options.json).write_text(text, encoding="utf-8")

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        measure(plan, options, rows, work, save)
    finally:
        save()
        for log in work.rglob("server.log"):
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
            if any("rror" in line or "not kept" in line for line in tail):
                note(f"  {log.parent.name}: " + "\n    ".join(tail))
        shutil.rmtree(work, ignore_errors=True)
    report = gpu_tables.report(rows)
    print(report.text)
    return 0 if report.equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
