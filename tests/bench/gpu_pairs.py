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
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median, pstdev, stdev
from typing import Any, TypeVar

from tests.bench import gpu_run
from tests.bench.gpu_asking import SMALL, note
from tests.bench.gpu_inputs import DENSE, HYBRID, Plan, make_model, make_plan
from tests.bench.gpu_run import Sides
from tests.bench.gpu_switch import SHAM
from tests.bench.gpu_tables import NO_CACHE, PLUS
from tests.bench.gpu_turns import SKIPPED, Estimate, around, crossed, endings, round_log

TARGET, WANTED = 0.97, 20
OVERTIME = 40.0  # seconds by which the rounds that the target wants may run over
EACH = 3  # rounds before the servers change sides
PAIR_TURN = {DENSE: 4, HYBRID: 1}
LOST_MS = 5000.0
REPLY = 64  # tokens of the reply to which the end's cost is related


class Seat(Sides):
    """One of the two servers of a shape, and the pipe that brings it the turn."""

    pipe = Path()

    def reply(self, number: int) -> dict[str, Any]:
        """A free greedy reply to a last message of this number."""
        said = self.plan.replies[:-1]
        *before, last = self.plan.messages("p", said)
        last = {**last, "content": f"{number:05d} {last['content']}"}
        return self.ask([*before, last], max_tokens=self.options.pair_tokens)


class Pair:
    """The two servers of a shape; owns their rows file."""

    seat: type[Seat] = Seat
    overtime = OVERTIME
    kind = "turns"
    count = 2

    def __init__(self, options: argparse.Namespace, shape: str, work: Path):
        self.shape, self.work, self.options = shape, work, options
        self.folder = make_model(shape, work / shape, options.small)
        self.seats: list[Any] = []
        self.sides = (NO_CACHE, options.other)
        self.rows: dict[str, list[Any]] = {"starts": [], "rounds": []}

    def save(self) -> None:
        """Write all rows."""
        gpu_run.save(self.options, self.shape, self.kind, self.rows)

    def plan(self) -> Plan:
        """What is asked."""
        o = self.options
        return make_plan(PAIR_TURN[self.shape], o.system, o.user, 60)

    def start(self, stack: ExitStack) -> None:
        """Load the servers and warm them up, all at the same time."""
        plan = self.plan()
        for number in range(self.count):
            home = self.work / f"{self.shape}-home{number}"
            home.mkdir(parents=True)
            seat = self.seat(plan, self.options, self.folder, home)
            seat.pipe = home / "turn"
            os.mkfifo(seat.pipe)
            stack.callback(seat.server.stop)
            self.seats.append(seat)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._warm_up, self.seats))

    def _warm_up(self, seat: Seat) -> None:
        began = time.monotonic()
        up = seat.up()
        # Each shape of a round, on both sides; plus cold and warm.
        for number, side in enumerate((NO_CACHE, self.options.other, NO_CACHE)):
            seat.become(side)
            for again in range(1 if side == NO_CACHE else 2):
                seat.reply(90_000 + 10 * number + again)
        seat.seen()
        start: dict[str, Any] = {"up": up, "place": seat.place()}
        start |= {"ready": time.monotonic() - began, "before": seat.machine()}
        self.rows["starts"].append(start)
        note(f"  {self.shape}: up {up:.1f} s, ready {start['ready']:.1f} s")

    def play(self, rounds: int, end: float) -> None:
        """So many rounds, or as many as fit; what the target wants may take longer."""
        longest = 0.0
        for number in range(rounds):
            last = end if number >= WANTED else end + self.overtime
            if time.monotonic() + longest > last:
                note(f"  {self.shape}: no time after {number} rounds")
                break
            began = time.monotonic()
            self.rows["rounds"].append(self.round(number))
            self.save()
            longest = max(longest, time.monotonic() - began)
        self.rows["starts"].append({"after": self.seats[0].machine()})
        self.save()

    def round(self, number: int) -> dict[str, Any]:
        """Both replies in turn; one that lost the turn is marked."""
        seat = number // EACH % 2
        places = (self.seats[seat], self.seats[1 - seat])
        seats = dict(zip(self.sides, places, strict=True))
        for side, one in seats.items():
            one.become(side)
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
        row = seat.reply(number)
        (request,) = seat.seen()
        counts = {name: row[name] for name in ("prompt", "restored", "generated")}
        return {**counts, **request["turns"]}


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
        and len({(row[s]["prompt"], row[s]["generated"]) for s in (NO_CACHE, other)})
        == 1
        and len({len(row[s]["ms"]) for s in (NO_CACHE, other)}) == 1
        and len(row[NO_CACHE]["ms"]) > SKIPPED + 3
    ]


def figures(rows: Sequence[dict[str, Any]], other: str) -> str:
    """The ratio by the clock and by CPU time, and what the end of a reply costs."""
    good = usable(rows, other)
    lines = [f"{len(rows)} rounds, {len(rows) - len(good)} left out"]
    for name, what in (("ms", "speed"), ("cpu", "speed by the thread's CPU time")):
        logs = [round_log(row, other, NO_CACHE, name) for row in good]
        try:
            found = crossed(good, logs)
        except ValueError as error:
            return "\n".join([*lines, f"no figures: {error}"])
        lines.append(f"- {what}: {found}, a round {100 * stdev(logs):.1f} %")
        if name == "ms":
            lines += [verdict(what, found), *ends(good, other, found)]
    for side in (NO_CACHE, other):
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
    costs = {side: endings(rows, side) for side in (NO_CACHE, other)}
    if min(map(len, costs.values())) < 2:
        return []
    means = {side: fmean(values) for side, values in costs.items()}
    errors = [stdev(values) / math.sqrt(len(values)) for values in costs.values()]
    token = median(t for row in rows for t in row[NO_CACHE]["ms"][SKIPPED:-1])
    more = (means[other] - means[NO_CACHE]) / (REPLY * token)
    ratio = 1 / (1 / found.ratio + more)
    wide = math.hypot(
        math.log(found.ratio / found.low), 2 * math.hypot(*errors) / (REPLY * token)
    )
    whole = around(math.log(ratio), wide, found.count)
    return [
        f"- the last turn beyond the others: {NO_CACHE} {means[NO_CACHE]:.1f} ms, "
        f"{other} {means[other]:.1f} ms",
        verdict(f"speed with it, a reply of {REPLY} tokens: {whole}", whole),
    ]


AnyPair = TypeVar("AnyPair", bound=Pair)


# -- the run ---------------------------------------------------------------------------
def started(
    pairs: Sequence[AnyPair], stack: ExitStack, pool: ThreadPoolExecutor
) -> list[AnyPair]:
    """Start all at the same time; those that did, what the others met is printed."""
    ready = []
    starts = [pool.submit(pair.start, stack) for pair in pairs]
    for pair, start in zip(pairs, starts, strict=True):
        try:
            start.result()
            ready.append(pair)
        except Exception:
            traceback.print_exc()
    return ready


def measure(options: argparse.Namespace, work: Path) -> bool:
    """All shapes; whether all went well."""
    began = time.monotonic()
    shapes = options.shapes.split(",")
    pairs = [Pair(options, shape, work) for shape in shapes]
    with ExitStack() as stack, ThreadPoolExecutor(len(pairs)) as pool:
        ready = started(pairs, stack, pool)
        fine = len(ready) == len(pairs)
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
                    seat.keep_log()
    return fine


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the figures; 0, or 1 where a part failed."""
    words = gpu_run.parser("gpu_pairs", __doc__, 150.0, [DENSE, HYBRID])
    words.add_argument("--rounds", type=int, default=22, help="each shape")
    words.add_argument("--pair-tokens", type=int, default=24)
    words.add_argument("--system", type=int, default=1200)
    words.add_argument("--user", type=int, default=480)
    words.add_argument("--sham", action="store_true", help="stock with itself")
    words.add_argument("--plant", type=float, help="slow the second side by this share")
    small = {name: SMALL[name] for name in ("system", "user")}
    options = gpu_run.parse(words, arguments, **small, rounds=12, pair_tokens=16)
    options.other = SHAM if options.sham else PLUS
    if options.plant:
        os.environ["BENCH_PLANT"] = f"{options.other}:{options.plant}"
    return gpu_run.run(options, measure, lambda out: report(out, options.other))


if __name__ == "__main__":
    raise SystemExit(main())
