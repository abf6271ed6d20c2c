"""Decode speed of plus beside stock without a prefix cache, token by token in turn.

    python -m tests.bench.gpu_pairs --gpu 0 --seconds 150 --out DIR
    python -m tests.bench.gpu_pairs --small --out DIR    # the mechanics, on a CPU
    python -m tests.bench.gpu_pairs --sham --out DIR     # stock beside stock: must give 1

Two servers of ``gpu_switch`` of each shape are loaded, all at the same time.  A round is
one free greedy streamed reply of each to the same new last message, written in turn on
one core (see ``gpu_turns``, which says why).  Every three rounds the two servers change
sides, and each round the other one begins.  Rows are written after each round.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median, pstdev, stdev
from typing import Any

from tests.bench import gpu_tables
from tests.bench.gpu_asking import Sides, SwitchServer, machine
from tests.bench.gpu_inputs import make_model, make_plan
from tests.bench.gpu_session import HTTP, SMALL, note, seen
from tests.bench.gpu_sides import DENSE, HYBRID, keep_apart
from tests.bench.gpu_stats import Estimate
from tests.bench.gpu_switch import OFF, PLUS, SHAM
from tests.bench.gpu_turns import SKIPPED, crossed, endings, round_log
from tests.fakes.models import model_dir

TARGET, WANTED = 0.97, 20
OVERTIME = 40.0  # seconds by which the rounds that the target wants may run over
EACH = 3  # rounds before the servers change sides
PAIR_TURN = {DENSE: 4, HYBRID: 1}
LOST_MS = 5000.0
REPLY = 64  # tokens of the reply to which the end's cost is related


class Seat:
    """One of the two servers of a shape."""

    def __init__(self, sides: Sides, server: SwitchServer, pipe: Path):
        self.sides, self.server, self.pipe = sides, server, pipe

    def get(self, route: str, **query: Any) -> Any:
        """One of the server's own routes."""
        answer = HTTP.get(f"{self.sides.base}/bench/{route}", params=query)
        answer.raise_for_status()
        return answer.json()


class Pair:
    """The two servers of a shape; owns their rows file."""

    def __init__(self, options: argparse.Namespace, shape: str, work: Path):
        self.shape, self.work = shape, work
        self.options = argparse.Namespace(**vars(options), now=shape)
        folder = model_dir("dense" if shape == DENSE else "hybrid")
        if not options.small:
            folder = make_model(shape, work / shape)
        self.options.folder = str(folder)
        self.seats: list[Seat] = []
        self.rows: dict[str, list[Any]] = {"starts": [], "rounds": []}

    def save(self) -> None:
        """Write all rows."""
        options = {k: v for k, v in vars(self.options).items() if k != "out"}
        text = gpu_tables.as_json(self.rows, options)
        file = self.options.out / f"{self.shape}-turns.json"
        file.write_text(text, encoding="utf-8")

    def start(self, stack: ExitStack) -> None:
        """Load both servers and warm them up, both at the same time."""
        o = self.options
        plan = make_plan(4, o.system, o.user, 60)
        for number in range(2):
            home = self.work / f"{self.shape}-home{number}"
            home.mkdir(parents=True)
            pipe = home / "turn"
            os.mkfifo(pipe)
            server = SwitchServer(o.folder, home, False)
            server.kernels = str(o.kernels / f"{self.shape}-{number}")
            server.wait_seconds = 240.0
            stack.callback(server.stop)
            self.seats.append(Seat(Sides(plan, o), server, pipe))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._warm_up, self.seats))

    def _warm_up(self, seat: Seat) -> None:
        began = time.monotonic()
        seat.server.__enter__()
        up = time.monotonic() - began
        seat.sides.base, seat.sides.side = seat.server.base, OFF
        # Each shape of a round, on both sides; plus cold and warm.
        for number, side in enumerate((OFF, self.options.other, OFF)):
            become(seat, side)
            for again in range(1 if side == OFF else 2):
                seat.sides.free(90_000 + 10 * number + again)
        placed, ready = place(seat), time.monotonic() - began
        self.rows["starts"].append(
            {"up": up, "ready": ready, "place": placed, "before": self.around()}
        )
        note(f"  {self.shape}: up {up:.1f} s, ready {ready:.1f} s")

    def around(self) -> dict[str, Any]:
        """What the machine does beside this."""
        return machine(self.options.gpu or "0")

    def play(self, rounds: int, end: float) -> None:
        """So many rounds, or as many as fit; what the target wants may take longer."""
        longest = 0.0
        for number in range(rounds):
            last = end if number >= WANTED else end + OVERTIME
            if time.monotonic() + longest > last:
                note(f"  {self.shape}: no time after {number} rounds")
                break
            began = time.monotonic()
            self.rows["rounds"].append(self.round(number))
            self.save()
            longest = max(longest, time.monotonic() - began)
        self.rows["starts"].append({"after": self.around()})
        self.save()

    def round(self, number: int) -> dict[str, Any]:
        """Both replies in turn; one that lost the turn is marked."""
        seat = number // EACH % 2
        seats = {OFF: self.seats[seat], self.options.other: self.seats[1 - seat]}
        for side, one in seats.items():
            become(one, side)
        leader = list(seats)[number % 2]
        for side, other in zip(seats, reversed(list(seats)), strict=True):
            pipes = {"mine": seats[side].pipe, "other": seats[other].pipe}
            seats[side].get("sit", **pipes, leads=int(side == leader))
        with ThreadPoolExecutor(2) as pool:
            rows = list(pool.map(lambda s: self.ask(seats[s], number), seats))
        out = {"seat": seat, "leader": leader, **dict(zip(seats, rows, strict=True))}
        out["lost"] = any(max(row["ms"]) > LOST_MS for row in rows)
        return out

    def ask(self, seat: Seat, number: int) -> dict[str, Any]:
        """One reply and its turns."""
        body = {"temperature": 0, "max_tokens": self.options.pair_tokens}
        row = seat.sides.ask(seat.sides.base, seat.sides.numbered(number), **body)
        (request,) = seen(seat.sides.base)
        counts = {name: row[name] for name in ("prompt", "restored", "generated")}
        return {**counts, **request["turns"]}


def place(seat: Seat) -> dict[str, Any]:
    """Give the generation thread a core of its own, where there are enough."""
    if "BENCH_CORES" not in os.environ:
        return {"mode": "as they come"}
    placed: dict[str, Any] = seat.get("place", mode="alone")
    return placed


def become(seat: Seat, side: str) -> None:
    """Make the server this side; nothing is asked in between."""
    if seat.sides.side != side:
        answer = seat.get("switch", side=side)
        if "error" in answer:
            raise RuntimeError(f"no switch to {side}: {answer['error']}")
        seat.sides.side = side


# -- figures ---------------------------------------------------------------------------
def report(folder: Path, other: str) -> str:
    """Everything that the files of a run say."""
    parts = []
    for file in sorted(folder.glob("*-turns.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))
        parts += [f"## {file.stem}", figures(rows["rounds"], other)]
    return "\n\n".join(parts)


def usable(rows: Sequence[dict[str, Any]], other: str) -> list[dict[str, Any]]:
    """Rounds in which both sides wrote the same number of tokens, in turn."""
    return [
        row
        for row in rows
        if not row["lost"]
        and len({(row[s]["prompt"], row[s]["generated"]) for s in (OFF, other)}) == 1
        and len({len(row[s]["ms"]) for s in (OFF, other)}) == 1
        and len(row[OFF]["ms"]) > SKIPPED + 3
    ]


def figures(rows: Sequence[dict[str, Any]], other: str) -> str:
    """The ratio by the clock and by CPU time, and what the end of a reply costs."""
    good = usable(rows, other)
    lines = [f"{len(rows)} rounds, {len(rows) - len(good)} left out"]
    for name, what in (("ms", "speed"), ("cpu", "speed by the thread's CPU time")):
        logs = [round_log(row, other, OFF, name) for row in good]
        try:
            found = crossed(good, logs)
        except ValueError as error:
            return "\n".join([*lines, f"no figures: {error}"])
        lines.append(f"- {what}: {found}, a round {100 * stdev(logs):.1f} %")
        if name == "ms":
            lines += [verdict(what, found), *ends(good, other, found)]
    for side in (OFF, other):
        turns = [t for row in good for t in row[side]["ms"][SKIPPED:-1]]
        spread = 100 * pstdev(turns) / fmean(turns)
        lines.append(
            f"- {side}: a token {fmean(turns):.2f} ms, median {median(turns):.2f}, "
            f"spread {spread:.0f} %"
        )
    return "\n".join(lines)


def verdict(what: str, found: Estimate) -> str:
    """Whether the target is met."""
    met = found.low >= TARGET and found.count >= WANTED
    word = "met" if met else "not shown"
    return f"- {what}: lower bound {found.low:.4f}, {TARGET} is {word}"


def ends(rows: Sequence[dict[str, Any]], other: str, found: Estimate) -> list[str]:
    """What the end of a reply costs, and the ratio with it, for a reply of ``REPLY``."""
    costs = {side: endings(rows, side) for side in (OFF, other)}
    if min(map(len, costs.values())) < 2:
        return []
    means = {side: fmean(values) for side, values in costs.items()}
    errors = [stdev(values) / math.sqrt(len(values)) for values in costs.values()]
    token = median(t for row in rows for t in row[OFF]["ms"][SKIPPED:-1])
    more = (means[other] - means[OFF]) / (REPLY * token)
    ratio = 1 / (1 / found.ratio + more)
    wide = math.hypot(
        math.log(found.ratio / found.low), 2 * math.hypot(*errors) / (REPLY * token)
    )
    whole = Estimate(
        ratio, ratio * math.exp(-wide), ratio * math.exp(wide), found.count
    )
    return [
        f"- the last turn beyond the others: {OFF} {means[OFF]:.1f} ms, "
        f"{other} {means[other]:.1f} ms",
        verdict(f"speed with it, a reply of {REPLY} tokens: {whole}", whole),
    ]


# -- the run ---------------------------------------------------------------------------
def measure(options: argparse.Namespace, work: Path) -> bool:
    """All shapes; whether all went well."""
    began = time.monotonic()
    shapes = options.shapes.split(",")
    pairs = [Pair(options, shape, work) for shape in shapes]
    fine = True
    with ExitStack() as stack, ThreadPoolExecutor(len(pairs)) as pool:
        starts = [pool.submit(pair.start, stack) for pair in pairs]
        ready = []
        for pair, start in zip(pairs, starts, strict=True):
            try:
                start.result()
                ready.append(pair)
            except Exception:
                fine = False
                traceback.print_exc()
        for number, pair in enumerate(ready):
            # What is left of the time is shared by the shapes that wait.
            now = time.monotonic()
            share = max(0.0, began + options.seconds - now) / (len(ready) - number)
            try:
                pair.play(options.rounds, now + share)
            except Exception:
                fine = False
                traceback.print_exc()
            finally:
                pair.save()
                for seat in pair.seats:
                    keep_log(seat.server, options.out)
    return fine


def keep_log(server: SwitchServer, out: Path) -> None:
    """Append the end of a server's log to the run's."""
    if server.log.exists():
        text = server.log.read_text(encoding="utf-8", errors="replace")[-10_000:]
        with open(out / "servers.log", "a", encoding="utf-8") as log:
            log.write(text)


def parser() -> argparse.ArgumentParser:
    """Arguments; the defaults are those of docs/BENCHMARKS.md."""
    out = argparse.ArgumentParser(prog="gpu_pairs", description=__doc__)
    out.formatter_class = argparse.RawDescriptionHelpFormatter
    out.add_argument("--out", type=Path, required=True, help="folder of the results")
    out.add_argument("--gpu", help="CUDA_VISIBLE_DEVICES of the servers")
    out.add_argument("--seconds", type=float, default=150.0, help="as far as possible")
    out.add_argument("--shapes", default=f"{DENSE},{HYBRID}")
    out.add_argument("--rounds", type=int, default=22, help="each shape")
    out.add_argument("--pair-tokens", type=int, default=24)
    out.add_argument("--system", type=int, default=1200)
    out.add_argument("--user", type=int, default=480)
    out.add_argument("--kernels", type=Path, help="keeps compiled kernels")
    out.add_argument("--small", action="store_true", help="a short run for a CPU")
    out.add_argument("--sham", action="store_true", help="stock with itself")
    out.add_argument("--plant", type=float, help="slow the second side by this share")
    return out


def prepare(options: argparse.Namespace) -> None:
    """Environment and folders that all runs of this kind need."""
    options.out.mkdir(parents=True, exist_ok=True)
    if options.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.gpu
    # The plugin refuses a budget above the machine's memory, and some machines say
    # less than they have; nothing here needs more than a few GB.
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    options.ram_gb = min(40, pages // 2**31)
    os.environ["BENCH_RAM_GB"] = str(options.ram_gb)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    keep_apart()
    # An end from outside leaves through ``finally``, so that rows and servers are seen to.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the figures; 0, or 1 where a part failed."""
    words = parser()
    options = words.parse_args(arguments)
    if options.small:
        small = {name: SMALL[name] for name in ("system", "user")}
        words.set_defaults(**small, rounds=12, pair_tokens=16)
        options = words.parse_args(arguments)
    options.other = SHAM if options.sham else PLUS
    options.pair_turns = PAIR_TURN
    if options.plant:
        os.environ["BENCH_PLANT"] = f"{options.other}:{options.plant}"
    prepare(options)
    work = Path(tempfile.mkdtemp(prefix="gpu-pairs-"))
    options.kernels = options.kernels or work / "kernels"
    fine = False
    try:
        fine = measure(options, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        text = report(options.out, options.other)
        (options.out / "pairs.md").write_text(text, encoding="utf-8")
        print(text, flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
