"""Agents at once with a draft model, on stock and on plus, in one process on a GPU.

    python -m tests.bench.gpu_agents --gpu 0 --shapes hybrid4b --seconds 400 --out DIR
    python -m tests.bench.gpu_agents --small --out DIR      # the mechanics, on a CPU

Models, drafters and what they say are those of ``gpu_drafts``: real shapes, random
weights, replies and acceptance planted (see ``gpu_chain``), so that every side writes the
same tokens.  The gemma4 is one with heads of 256, for which MLX's CUDA back-end makes no
plan of each new length.  Four agents have a conversation each; the next one
starts when the one before it has eight texts of its first reply.  The sides:

    no cache + drafter              stock as it comes with a drafter
    stock 40 GB + drafter           the same with stock's prefix cache
    stock 40 GB                     without drafter: rows decode in one batch
    plus 40 GB + drafter, turns     speculative batches take turns
    plus 40 GB + drafter, joined    they become one wherever they can
    plus 40 GB + drafter, by pace   where that was measured to be faster

Each side plays two turns once, then, on an empty cache, all of them, timed; the order
alternates between rounds.  Ratios are given where all texts and the lengths of all
prompts are equal.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tests.bench import gpu_run
from tests.bench.gpu_asking import note
from tests.bench.gpu_drafts import Drafted
from tests.bench.gpu_inputs import DRAFTED, HYBRID
from tests.bench.gpu_run import SwitchServer
from tests.bench.gpu_sides import FIRST, measure
from tests.bench.gpu_tables import DRAFTER, NO_CACHE, PLUS, STOCK_40, table

STOCK = STOCK_40 + DRAFTER
ALONE = NO_CACHE + DRAFTER
SIDES = {
    "nocache+drafter": ALONE,
    "stock+drafter": STOCK,
    "stock": STOCK_40,
    "turns": PLUS + DRAFTER + ", turns",
    "joined": PLUS + DRAFTER + ", joined",
    "pace": PLUS + DRAFTER + ", by pace",
    "plus": PLUS,
}
USUAL = "nocache+drafter,stock+drafter,stock,turns,joined"
# Texts of a reply behind which the next agent starts.
LEAD = 8


class AgentsServer(SwitchServer):
    """A server of ``gpu_agents_server``."""

    module = "tests.bench.gpu_agents_server"


class Crew(Drafted):
    """One model, its drafter, and the agents that ask it."""

    kind = "agents"

    def __init__(self, options: argparse.Namespace, shape: str, work: Path):
        super().__init__(options, shape, work)
        one = self.server
        self.server = AgentsServer(one.model, one.home, False, one.arguments, 240.0)

    def agent(
        self, number: int, turns: int, follows: threading.Event
    ) -> list[dict[str, Any]]:
        """One conversation; ``follows`` is set when the next one may start."""
        rows: list[dict[str, Any]] = []
        try:
            for _ in range(turns):
                times: list[float] = []

                def heard(now: float, times: list[float] = times) -> None:
                    times.append(now)
                    if len(times) == LEAD:
                        follows.set()

                said = [row["text"] for row in rows]
                row = self.turn(f"agent {number}", said, heard=heard)
                gaps = [after - before for before, after in pairwise(times)]
                rows.append({**row, "agent": number, "gap": max(gaps, default=0.0)})
        finally:
            follows.set()
        return rows

    def played(self, side: str, number: int) -> None:
        """All agents, staggered, on an empty cache; ``FIRST``: two turns, not timed."""
        turns = min(2, self.options.turns) if number == FIRST else self.options.turns
        self.become(side)
        self.ask([{"role": "user", "content": "."}], max_tokens=4)
        self.reset()
        self.seen()
        self.get("steps")
        began = time.perf_counter()
        with ThreadPoolExecutor(self.options.agents) as pool:
            jobs = []
            for agent in range(self.options.agents):
                follows = threading.Event()
                jobs.append(pool.submit(self.agent, agent, turns, follows))
                follows.wait(120)
            rows = [row for job in jobs for row in job.result()]
        seconds = time.perf_counter() - began
        part = "first" if number == FIRST else "turns"
        played = {"side": side, "round": number, "seconds": seconds}
        played |= {"steps": self.get("steps"), "rows": rows, "at": self.machine()}
        self.rows[part].append(played)
        self.seen()
        self.reset()
        self.save()
        written = sum(row["generated"] for row in rows)
        note(
            f"  {self.shape}: {side}, {part}: {seconds:.2f} s, {written / seconds:.1f}"
            f" tok/s, mean TTFT {fmean(row['ttft'] for row in rows):.3f} s,"
            f" {played['steps']}"
        )


# -- the report ------------------------------------------------------------------------
def figures(played: dict[str, Any]) -> dict[str, float]:
    """What one play says."""
    rows = played["rows"]
    steps = {"rounds": 0, "steps": 0, **played["steps"]}
    return {
        "ttft": fmean(row["ttft"] for row in rows),
        "worst": max(row["ttft"] for row in rows),
        "gap": max(row["gap"] for row in rows),
        "prefilled": sum(row["prompt"] - row["restored"] for row in rows),
        "rate": sum(row["generated"] for row in rows) / played["seconds"],
        "steps": steps["rounds"] + steps["steps"],
    }


def work_of(played: dict[str, Any]) -> list[tuple[int, int, str]]:
    """What was asked and written."""
    return [(row["prompt"], row["generated"], row["text"]) for row in played["rows"]]


def rows_of(plays: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line a side: medians over rounds, and ratios to stock with the drafter."""
    sides = list(dict.fromkeys(played["side"] for played in plays))
    held = {
        side: [figures(played) for played in plays if played["side"] == side]
        for side in sides
    }
    same = len({json.dumps(work_of(played)) for played in plays}) == 1

    def mid(side: str, name: str) -> float:
        return median(one[name] for one in held[side])

    out = []
    for side in sides:
        ratios = [
            f"{mid(side, name) / mid(other, name):.2f}" if same else "other work"
            for name in ("ttft", "rate")
            for other in (ALONE, STOCK)
            if other in held
        ]
        half = len(ratios) // 2
        rates = [one["rate"] for one in held[side]]
        spread = f"{min(rates):.1f} to {max(rates):.1f}"
        out.append(
            [
                *(side, str(len(rates)), f"{mid(side, 'prefilled'):.0f}"),
                *(f"{mid(side, 'steps'):.0f}", f"{mid(side, 'ttft'):.3f}"),
                *(f"{mid(side, 'worst'):.3f}", " ".join(ratios[:half])),
                *(f"{mid(side, 'gap'):.2f}", f"{mid(side, 'rate'):.1f}", spread),
                " ".join(ratios[half:]),
            ]
        )
    return out


HEADS = ["side", "plays", "prefilled", "verify and decode steps", "mean TTFT, s"]
HEADS += ["worst TTFT, s", "of the first two sides", "longest gap, s"]
HEADS += ["tok/s of all", "range", "of the first two sides"]


def report(folder: Path) -> str:
    """Everything that the files of a run say."""
    parts = []
    for file in sorted(folder.glob("*-agents.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))
        parts.append(f"## {file.stem}")
        parts += [f"- failed: {row}" for row in rows["failed"]]
        if rows.get("first"):
            parts += ["First plays:", table(HEADS, rows_of(rows["first"]))]
        if rows["turns"]:
            parts += ["Timed:", table(HEADS, rows_of(rows["turns"]))]
    return "\n\n".join(parts)


def named(words: str) -> list[str]:
    """Sides by their short names."""
    unknown = [word for word in words.split(",") if word not in SIDES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown}: not of {', '.join(SIDES)}")
    return [SIDES[word] for word in words.split(",")]


def agents(options: argparse.Namespace, work: Path) -> bool:
    """Play with each model."""
    models = [Crew(options, shape, work) for shape in options.shapes.split(",")]
    return measure(models, [options.sides])


def parser() -> argparse.ArgumentParser:
    """Arguments; the defaults are those of docs/BENCHMARKS.md."""
    out = gpu_run.parser("gpu_agents", __doc__, 400.0, [HYBRID, "gemma7w"])
    usual = named(USUAL)
    out.add_argument(
        "--sides", type=named, default=usual, help=f"of {', '.join(SIDES)}"
    )
    out.add_argument("--agents", type=int, default=4)
    out.add_argument("--rounds", type=int, default=2, help="timed plays a side")
    out.add_argument("--turns", type=int, default=4)
    out.add_argument("--system", type=int, default=2500)
    out.add_argument("--user", type=int, default=400)
    out.add_argument("--reply", type=int, default=150, help="tokens, the stop among")
    out.add_argument("--wrong", type=float, default=0.2, help="share of wrong drafts")
    out.add_argument("--block", type=int, default=4, help="--draft-block-size")
    out.set_defaults(twice=True)
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables; 0, or 1 where a part failed."""
    small = {"turns": 2, "system": 100, "user": 40, "reply": 40, "rounds": 1}
    options = gpu_run.parse(parser(), arguments, **small)
    unknown = set(options.shapes.split(",")) - set(DRAFTED)
    if unknown:
        raise SystemExit(f"{', '.join(sorted(unknown))}: not of {', '.join(DRAFTED)}")
    return gpu_run.run(options, agents, report)


if __name__ == "__main__":
    raise SystemExit(main())
