"""Plus beside stock in one process: decode speed in paired rounds, and one session.

    python -m tests.bench.gpu_sides --gpu 0 --seconds 470 --out DIR
    python -m tests.bench.gpu_sides --small --out DIR    # the mechanics, on a CPU

A server of ``gpu_switch`` is each side in turn, so that the sides of a round share the
process and all that differs between processes.  Rounds come from several starts.

*Decode speed*, both shapes: a round asks plus and stock without a prefix cache once
each, in alternating order, for a free greedy streamed reply to the same new last
message.  Speed is counted in the generation thread from the first token to the last,
what plus keeps at a reply's end included.

*Placement*, dense only: the same request again and again without the plugin, with the
generation thread among all others, on a core of its own, and there without streaming:
what makes one request slower than the next?  Rounds use a core of its own.

*Session*, hybrid only: the session of ``gpu_session`` on plus and on stock with and
without prefix cache, from an empty cache, every shape played once before.

Each part writes its rows after each request group, so a broken run loses nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench import gpu_tables
from tests.bench.gpu_asking import Sides, SwitchServer, joined, machine
from tests.bench.gpu_cores import share
from tests.bench.gpu_inputs import make_model, make_plan
from tests.bench.gpu_report import report
from tests.bench.gpu_session import HTTP, SMALL, note, reset, seen
from tests.bench.gpu_switch import OFF, PLUS, SHAM, STOCK
from tests.fakes.models import model_dir

SESSION_SIDES = (OFF, STOCK, PLUS)
DENSE, HYBRID = "dense7b", "hybrid4b"
# The turn whose prompt the pairs extend: a cold prefill of the hybrid is slow.
PAIR_TURN = {DENSE: 4, HYBRID: 2}
# Share of the time at which the dense part must have ended.
DENSE_ENDS = 0.26
FIRST_SECONDS = 35.0
# The hybrid start that plays the session; the ones before it make enough rounds sure.
SESSION_START = 1


class Clock:
    """Time since the start, and whether something still fits."""

    def __init__(self, seconds: float):
        self.began = time.monotonic()
        self.seconds = seconds

    def until(self, share_: float) -> float:
        """The moment at which this share of the time is over."""
        return self.began + share_ * self.seconds

    def fits(self, need: float, end: float) -> bool:
        """Whether ``need`` seconds are left before ``end``."""
        return time.monotonic() + need <= end


class Run:
    """One shape's starts; owns its rows file."""

    def __init__(self, options: argparse.Namespace, shape: str, work: Path):
        self.options, self.shape, self.work = options, shape, work
        options.now = shape
        folder = model_dir("dense" if shape == DENSE else "hybrid")
        if not options.small:
            folder = make_model(shape, work / shape)
        options.folder = str(folder)
        o = options
        self.sides = Sides(make_plan(o.turns, o.system, o.user, o.reply), o)
        self.sides.rows = {
            name: []
            for name in ("starts", "placement", "pairs", "turns", "cold", "memory")
        }
        self.starts = 0
        self.cost = 0.0  # seconds from a start to its first round
        self.pair_seconds = 0.0

    @property
    def file(self) -> Path:
        return self.options.out / f"{self.shape}.json"

    def save(self) -> None:
        """Write all rows."""
        options = {k: v for k, v in vars(self.options).items() if k != "out"}
        text = gpu_tables.as_json(self.sides.rows, options)
        self.file.write_text(text, encoding="utf-8")

    @contextmanager
    def server(self) -> Iterator[Sides]:
        """A fresh start with both sides of a pair warm."""
        began = time.monotonic()
        home = self.work / f"{self.shape}-{self.starts}"
        server = SwitchServer(self.options.folder, home, False)
        server.kernels, server.wait_seconds = str(self.work / "ptx"), 240.0
        try:
            with server:
                up = time.monotonic() - began
                s = self.sides
                s.base, s.side = server.base, OFF
                place = self.place("alone")
                self.warm_up()
                self.cost = time.monotonic() - began
                start = {"start": self.starts, "up": up, "ready": self.cost}
                self.sides.rows["starts"].append(
                    {
                        **start,
                        "place": place,
                        "before": machine(self.options.gpu or "0"),
                    }
                )
                note(f"  {self.shape} start {self.starts}: up {up:.1f} s, {start}")
                yield s
                after = machine(self.options.gpu or "0")
                self.sides.rows["starts"][-1]["after"] = after
        finally:
            self.starts += 1
            self.save()
            log = home / "server.log"
            if log.exists():
                kept = log.read_text(encoding="utf-8", errors="replace")[-20_000:]
                with open(self.options.out / "servers.log", "a") as out:
                    out.write(kept)

    def place(self, mode: str) -> dict[str, Any]:
        """Put the server's threads; nothing where cores are few."""
        if "BENCH_CORES" not in os.environ:
            return {"mode": "as they come"}
        address = f"{self.sides.base}/bench/place"
        return HTTP.get(address, params={"mode": mode}).json()

    def warm_up(self) -> None:
        """Each shape of a round, cold and warm, on both sides."""
        for number, side in enumerate((OFF, PLUS, PLUS, OFF)):
            self.sides.switch(side)
            self.sides.free(90_000 + 100 * self.starts + number)
            if side == PLUS:
                self.sides.free(91_000 + 100 * self.starts + number)

    def placement(self, rounds: int, end: float) -> None:
        """Stock alone, asked the same way on different cores."""
        modes = (("free", True), ("alone", True), ("alone", False))
        self.sides.switch(OFF)
        for number in range(rounds):
            for mode, streamed in modes:
                if time.monotonic() > end:
                    break
                self.place(mode)
                row = self.sides.free(
                    80_000 + number, streamed=streamed, stream=streamed
                )
                lead = {"mode": mode, "streamed": streamed}
                self.sides.rows["placement"].append({**lead, **row})
        self.place("alone")
        self.save()

    def pairs(self, rounds: int, end: float) -> None:
        """So many rounds of this start, or as many as fit."""
        s, other = self.sides, self.options.other
        done = len(s.rows["pairs"])
        for number in range(done, done + rounds):
            began = time.monotonic()
            if began + self.pair_seconds > end:
                break
            row: dict[str, Any] = {"start": self.starts}
            for side in (OFF, other) if number % 2 == 0 else (other, OFF):
                s.switch(side)
                row[side] = s.free(number)
            s.rows["pairs"].append(row)
            self.pair_seconds = time.monotonic() - began
            self.save()

    def session(self, rounds: int, end: float) -> None:
        """Warm up, then timed sessions; the order of the sides alternates."""
        s = self.sides
        longest = 0.0
        for side in SESSION_SIDES:
            s.switch(side)
            reset(s.base)
            self.play_once(side)
            reset(s.base)
            seen(s.base)
        for number in range(rounds):
            for side in SESSION_SIDES if number % 2 == 0 else SESSION_SIDES[::-1]:
                began = time.monotonic()
                if began + longest > end:
                    note(f"  no time for round {number} of {side}")
                    return
                s.switch(side)
                self.session_round(side, number)
                self.save()
                longest = max(longest, time.monotonic() - began)

    def play_once(self, side: str) -> None:
        """Compile the session's shapes.

        Stock keeps no replies, so its prompts have the same shapes after short ones.
        """
        s = self.sides
        if side == PLUS:
            s.session(s.base, "w")
            return
        for turn in range(len(s.plan.users)):
            s.say(s.base, "w", s.plan.replies[:turn], max_tokens=4)

    def session_round(self, side: str, number: int) -> None:
        """One session from an empty cache."""
        s = self.sides
        reset(s.base)
        before = HTTP.get(f"{s.base}/bench/memory").json()
        marker = "abcdefgh"[number]
        rows = joined(s.session(s.base, marker), seen(s.base))
        after = HTTP.get(f"{s.base}/bench/memory").json()
        lead = {"side": side, "round": number}
        for turn, row in enumerate(rows, 1):
            s.rows["turns"].append({**lead, "turn": turn, **row})
        if side == PLUS:
            answer = HTTP.get(f"{s.base}/v1/cacheplus/report", params={"last": 99})
            records = answer.json()["records"][-len(rows) :]
            s.rows.setdefault("records", []).extend({**lead, **r} for r in records)
        memory = {"before": before["active"], "peak": after["peak"]}
        s.rows["memory"].append({**lead, **memory, "after": after["active"]})
        reset(s.base)
        total = sum(row["seconds"] for row in rows)
        last = rows[-1]["ttft"]
        note(f"  {side:12} round {number}: session {total:.2f} s, last {last:.3f} s")


def dense_part(options: argparse.Namespace, work: Path, clock: Clock) -> Run:
    """Starts of the dense shape, rounds each, as many as fit."""
    run = Run(options, DENSE, work)
    end = clock.until(DENSE_ENDS)
    while run.starts < options.starts and (
        run.starts == 0 or clock.fits(run.cost + 4 * run.pair_seconds, end)
    ):
        with run.server():
            if run.starts == 0:
                # However long its kernels took to compile, the first start is used.
                end = max(end, time.monotonic() + FIRST_SECONDS)
                run.placement(options.placement, end)
            run.pairs(options.rounds, end)
    return run


def hybrid_part(options: argparse.Namespace, work: Path, clock: Clock) -> Run:
    """Rounds in each start, in one of them the session too."""
    run = Run(options, HYBRID, work)
    end = clock.until(1.0)
    chosen = min(SESSION_START, options.starts - 1)
    while run.starts < options.starts and (
        run.starts <= chosen or clock.fits(run.cost + 3 * run.pair_seconds, end)
    ):
        with run.server():
            run.pairs(options.hybrid_rounds, end)
            if run.starts == chosen and options.session_rounds:
                run.session(options.session_rounds, end)
    return run


def parser() -> argparse.ArgumentParser:
    """Arguments; the defaults are those of docs/BENCHMARKS.md."""
    out = argparse.ArgumentParser(prog="gpu_sides", description=__doc__)
    out.formatter_class = argparse.RawDescriptionHelpFormatter
    out.add_argument("--out", type=Path, required=True, help="folder of the results")
    out.add_argument("--gpu", help="CUDA_VISIBLE_DEVICES of the servers")
    out.add_argument("--seconds", type=float, default=470.0, help="all parts together")
    out.add_argument("--parts", default="dense,hybrid")
    out.add_argument("--starts", type=int, default=9, help="at most, each shape")
    out.add_argument("--rounds", type=int, default=10, help="rounds a dense start")
    out.add_argument("--hybrid-rounds", type=int, default=10)
    out.add_argument("--session-rounds", type=int, default=2)
    out.add_argument("--placement", type=int, default=6, help="rounds; 0: none")
    out.add_argument("--pair-tokens", type=int, default=64)
    out.add_argument("--turns", type=int, default=12)
    out.add_argument("--system", type=int, default=2000)
    out.add_argument("--user", type=int, default=480)
    out.add_argument("--reply", type=int, default=60)
    out.add_argument("--small", action="store_true", help="a short run for a CPU")
    out.add_argument(
        "--sham", action="store_true", help="pairs of stock with itself: must give 1"
    )
    out.add_argument("--plant", type=float, help="slow the second side by this share")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the figures; 0, or 1 where a part failed."""
    words = parser()
    options = words.parse_args(arguments)
    if options.small:
        small = {name: SMALL[name] for name in ("turns", "system", "user", "reply")}
        words.set_defaults(
            **small,
            pair_tokens=24,
            starts=2,
            rounds=4,
            hybrid_rounds=4,
            session_rounds=1,
            placement=1,
        )
        options = words.parse_args(arguments)
    options.other = SHAM if options.sham else PLUS
    options.pair_turns = PAIR_TURN
    options.out.mkdir(parents=True, exist_ok=True)
    if options.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.gpu
    if options.plant:
        os.environ["BENCH_PLANT"] = f"{options.other}:{options.plant}"
    # The plugin refuses a budget above the machine's memory, and some machines say
    # less than they have; nothing here needs more than a few GB.
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    options.ram_gb = min(40, pages // 2**31)
    os.environ["BENCH_RAM_GB"] = str(options.ram_gb)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    keep_apart()
    # An end from outside leaves through ``finally``, so that rows and servers are seen to.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    clock = Clock(options.seconds)
    work = Path(tempfile.mkdtemp(prefix="gpu-sides-"))
    failed = False
    try:
        for name in options.parts.split(","):
            part = dense_part if name == "dense" else hybrid_part
            try:
                part(options, work, clock)
            except Exception:
                failed = True
                traceback.print_exc()
    finally:
        shutil.rmtree(work, ignore_errors=True)
        text = report(options.out, options.other)
        (options.out / "report.md").write_text(text, encoding="utf-8")
        print(text, flush=True)
    return 1 if failed else 0


def keep_apart() -> None:
    """Client on one half of the physical cores, server on the other."""
    cores = os.sched_getaffinity(0)
    if len(cores) >= 8:
        server, client = share(cores, 1, 2), share(cores, 2, 2)
        os.environ["BENCH_CORES"] = ",".join(map(str, server))
        os.sched_setaffinity(0, client)


if __name__ == "__main__":
    raise SystemExit(main())
