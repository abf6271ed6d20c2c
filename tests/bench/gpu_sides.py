"""One session on stock, with and without prefix cache, and on plus, in one process.

    python -m tests.bench.gpu_sides --gpu 0 --seconds 465 --out DIR
    python -m tests.bench.gpu_sides --small --out DIR    # the mechanics, on a CPU

The session of ``gpu_session``, scripted in the same way.  A server of ``gpu_switch`` is
each side in turn, so that the sides share the process and all that differs between
processes.  Every shape is played once before; then the order of the sides alternates
between rounds.  Rows are written after each session.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.bench import gpu_run, gpu_tables
from tests.bench.gpu_asking import SMALL, note
from tests.bench.gpu_inputs import HYBRID, make_model, make_plan
from tests.bench.gpu_run import Sides
from tests.bench.gpu_tables import NO_CACHE, PLUS, STOCK_40

SIDES = (NO_CACHE, STOCK_40, PLUS)
FIRST = -1  # the round of a play that only warms up
SHORT = 6  # tokens of a reply that only follows a prefill of interest


class Played(Sides):
    """One model's server, which plays the session on each side; owns its rows file."""

    kind = "sides"
    shape = ""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.rows |= {name: [] for name in ("starts", "turns", "memory", "failed")}
        self.known: set[str] = set()  # sides whose every length has been used
        self.longest: dict[bool, float] = {}

    def save(self) -> None:
        """Write all rows."""
        gpu_run.save(self.options, self.shape, self.kind, self.rows)

    def start(self, stack: ExitStack) -> None:
        """Load it and play every shape once."""
        began = time.monotonic()
        stack.callback(self.server.stop)
        up = self.up()
        # A session that is played before it is timed warms up by itself.
        for side in () if self.options.twice else self.options.sides:
            try:
                self.warm_up(side)
            except Exception as error:
                self.failed(side, "warm-up", error)
        start: dict[str, Any] = {"up": up, "place": self.place()}
        start |= {"ready": time.monotonic() - began, "before": self.machine()}
        self.rows["starts"].append(start)
        self.save()
        note(f"  {self.shape}: up {up:.1f} s, ready {start['ready']:.1f} s")

    def failed(self, side: str, what: str, error: Exception) -> None:
        """Note it and go on with the other sides."""
        traceback.print_exc()
        self.rows["failed"].append({"side": side, "what": what, "error": repr(error)})

    def warm_up(self, side: str) -> None:
        """Compile this side's shapes.

        Stock keeps no replies, so its prompts have the same shapes after short ones.
        """
        began = time.monotonic()
        self.become(side)
        self.reset()
        most = {} if side.startswith(PLUS) else {"max_tokens": SHORT}
        for turn in self.warmed(side):
            self.turn("w", self.plan.replies[:turn], **most)
        self.reset()
        self.seen()
        note(f"  {self.shape}: {side} warm after {time.monotonic() - began:.1f} s")

    def warmed(self, side: str) -> range:
        """Turns whose shapes the side has not met before."""
        return range(len(self.plan.users))

    def played(self, side: str, number: int) -> None:
        """One session of a side; ``FIRST``: one that is not timed."""
        self.become(side)
        # What the switch itself costs goes with a request that is not kept.
        self.ask([{"role": "user", "content": "."}], max_tokens=4)
        self.seen()
        part = "first" if number == FIRST else "turns"
        rows = self.timed("a", number, part)
        self.save()
        seconds, last = sum(row["seconds"] for row in rows), rows[-1]["ttft"]
        what = "first play" if number == FIRST else f"round {number}"
        note(
            f"  {self.shape}: {side}, {what}: session {seconds:.2f} s, last {last:.3f} s"
        )

    def play(self, sides: Sequence[str], number: int, end: float) -> None:
        """A session of each side, while one more fits before ``end``."""
        for side in sides:
            fresh = self.options.twice and side not in self.known
            began = time.monotonic()
            if began + self.longest.get(fresh, 0.0) > end:
                note(f"  {self.shape}: no time for {side}, round {number}")
                continue
            try:
                if fresh:
                    self.played(side, FIRST)
                    self.known.add(side)
                self.played(side, number)
            except Exception as error:
                self.failed(side, "session", error)
                self.side = ""  # whatever it is now, switch again
            spent = time.monotonic() - began
            self.longest[fresh] = max(self.longest.get(fresh, 0.0), spent)
        self.save()


def measure(models: Sequence[Played], groups: Sequence[Sequence[str]]) -> bool:
    """All models load at the same time and are timed one at a time; whether all went well.

    ``groups``: sides that all models play before any plays the next.
    """
    options = models[0].options
    end = time.monotonic() + options.seconds
    with ExitStack() as stack, ThreadPoolExecutor(len(models)) as pool:
        starts = [pool.submit(model.start, stack) for model in models]
        ready = []
        try:
            for model, start in zip(models, starts, strict=True):
                try:
                    start.result()
                    ready.append(model)
                except Exception as error:
                    model.failed("", "start", error)
            for sides in groups:
                for number in range(options.rounds):
                    for model in ready:
                        model.play(sides[:: -1 if number % 2 else 1], number, end)
        finally:
            for model in models:
                model.save()
                model.keep_log()
    return not any(model.rows["failed"] for model in models)


def scripted(options: argparse.Namespace, work: Path) -> bool:
    """Play the scripted session with each shape."""
    models = []
    o = options
    for shape in o.shapes.split(","):
        plan = make_plan(o.turns, o.system, o.user, o.reply)
        folder = make_model(shape, work / shape, o.small)
        models.append(Played(plan, o, folder, work / f"{shape}-home"))
        models[-1].shape = shape
    return measure(models, [o.sides])


def report(folder: Path) -> str:
    """Everything that the files of a run say."""
    parts = []
    for file in sorted(folder.glob("*-sides.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))
        parts += [f"## {file.stem}", gpu_tables.report(rows).text]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the figures; 0, or 1 where a part failed."""
    words = gpu_run.parser("gpu_sides", __doc__, 465.0, [HYBRID])
    words.add_argument("--rounds", type=int, default=2, help="sessions a side")
    words.add_argument("--turns", type=int, default=12)
    words.add_argument("--system", type=int, default=2000)
    words.add_argument("--user", type=int, default=480)
    words.add_argument("--reply", type=int, default=60)
    words.set_defaults(sides=SIDES, twice=False)
    options = gpu_run.parse(words, arguments, **SMALL, rounds=1)
    return gpu_run.run(options, scripted, report)


if __name__ == "__main__":
    raise SystemExit(main())
