"""Four agents at once on the bundled session with a draft model: waiting, and tokens per second of all together.

    python -m tests.bench.session_agents                 hybrid and dense, two rounds, about twenty minutes
    python -m tests.bench.session_agents --small         the mechanics: one model, two agents, two turns

Real servers, one after the other, on tiny trained models (float32, greedy, CPU).  Each agent plays the session with a
marker of its own and sends back what the server wrote; each starts some time after the one before it.  The sides:

    stock + drafter           as it comes: without a prefix cache
    stock + drafter, cache    with stock's prefix cache in RAM
    stock, cache              the same without the drafter
    plus + drafter, turns     --cacheplus --cacheplus-draft-merge never
    plus + drafter            --cacheplus; speculative batches join unless that is slower

The order of the sides alternates between rounds.  Ratios are given where the lengths of all prompts and the texts of
all replies are equal, else what was asked and written; *prefilled* says how much of the prompts each side computed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from mlx_vlm_cacheplus.replay import client
from mlx_vlm_cacheplus.replay import session as sessions
from mlx_vlm_cacheplus.replay.rows import Row
from mlx_vlm_cacheplus.replay.serving import Server
from mlx_vlm_cacheplus.replay.widen import widened_copy
from tests.bench.gpu_tables import table
from tests.fakes.models import drafter_dir, model_dir

DRAFTERS = {"hybrid": "hybrid-mtp", "dense": "dense-dflash"}
STOCK = "stock + drafter"


@dataclass(frozen=True)
class Side:
    """How a server is started."""

    name: str
    drafts: bool = True
    cache: bool = True
    merge: str = ""

    @property
    def plus(self) -> bool:
        return bool(self.merge)


SIDES = (
    Side(STOCK, cache=False),
    Side("stock + drafter, cache"),
    Side("stock, cache", drafts=False),
    Side("plus + drafter, turns", merge="never"),
    Side("plus + drafter", merge="auto"),
)


class SideServer(Server):
    """A server of one side."""

    side: Side

    def environment(self) -> dict[str, str]:
        cache = "1" if self.side.cache else "0"
        own = {"APC_ENABLED": cache, "APC_DISK_ENABLED": "0"}
        if self.plus:
            own["MLX_VLM_DRAFT_MERGE"] = self.side.merge
        return super().environment() | own


@dataclass
class Played:
    """All rows of one play, and how long it took (seconds)."""

    rows: list[Row]
    seconds: float

    @property
    def ttft(self) -> float:
        return statistics.mean(row.ttft or 0.0 for row in self.rows)

    @property
    def worst(self) -> float:
        return max(row.ttft or 0.0 for row in self.rows)

    @property
    def rate(self) -> float:
        return sum(row.generated for row in self.rows) / self.seconds

    @property
    def prompt(self) -> float:
        return sum(row.prompt for row in self.rows)

    @property
    def written(self) -> float:
        return sum(row.generated for row in self.rows)

    @property
    def prefilled(self) -> float:
        return sum(row.prefilled for row in self.rows)

    @property
    def work(self) -> list[tuple]:
        found = [(r.session, r.turn, r.prompt, r.generated, r.text) for r in self.rows]
        return sorted(found)


def play(side: Side, model: str, drafter: str, options: argparse.Namespace) -> Played:
    """One server, one play of all agents; a short request before it is not timed."""
    with tempfile.TemporaryDirectory() as home:
        arguments: tuple[str, ...] = ("--log-level", "WARNING")
        if side.drafts:
            arguments += ("--draft-model", drafter)
        waiting = SideServer(model, Path(home), side.plus, arguments)
        waiting.side = side
        session = sessions.load(options.session)
        with waiting as server:
            asked = client.Options(server.base, model=model, timeout=300.0)
            asked.marker, asked.max_tokens = "first", 8
            client.run(session.first(1), asked)
            asked.marker, asked.max_tokens = "", None
            asked.sessions, asked.stagger = options.agents, options.stagger
            began = time.perf_counter()
            rows = client.run(session.first(options.turns), asked).rows
            return Played(rows, time.perf_counter() - began)


def rows_of(model: str, rounds: Sequence[dict[str, Played]]) -> list[list[str]]:
    """A line a side: medians over rounds, and ratios to stock with the drafter, without and with its cache."""
    names = [side.name for side in SIDES]
    same = len({str(p.work) for played in rounds for p in played.values()}) == 1

    def median(name: str, figure: str) -> float:
        return statistics.median(getattr(played[name], figure) for played in rounds)

    out = []
    for name in names:
        ratios = [
            f"{median(name, f) / median(other, f):.2f}" if same else "other work"
            for f in ("ttft", "rate")
            for other in names[:2]
        ]
        rates = [played[name].rate for played in rounds]
        counts = ("prompt", "written", "prefilled")
        figures = [f"{median(name, count):.0f}" for count in counts]
        figures += [f"{median(name, 'ttft'):.2f}"]
        figures += [f"{median(name, 'worst'):.2f}", *ratios[:2]]
        figures += [f"{median(name, 'rate'):.1f}"]
        figures += [f"{min(rates):.1f} to {max(rates):.1f}", *ratios[2:]]
        out.append([model, name, *figures])
    return out


HEADS = ["model", "side", "asked", "written", "prefilled", "mean TTFT, s"]
HEADS += ["worst TTFT, s"]
HEADS += ["of stock + drafter", "of the same with cache", "tok/s of all", "range"]
HEADS += ["of stock + drafter", "of the same with cache"]


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    words.add_argument("--models", nargs="*", choices=DRAFTERS, default=list(DRAFTERS))
    words.add_argument("--session", default="coding-agent-18")
    words.add_argument("--agents", type=int, default=4)
    words.add_argument("--turns", type=int, default=6)
    words.add_argument("--rounds", type=int, default=2)
    words.add_argument("--stagger", type=float, default=1.0, help="seconds")
    words.add_argument("--small", action="store_true", help="the mechanics alone")
    return words


def main() -> int:
    words = parser()
    if words.parse_args().small:
        words.set_defaults(models=["hybrid"], session="short", agents=2)
        words.set_defaults(turns=2, rounds=1)
    options, console = words.parse_args(), Console(stderr=True)
    found: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as bar:
        steps = len(options.models) * options.rounds * len(SIDES)
        task = bar.add_task("servers", total=steps)
        for name in options.models:
            model = str(widened_copy(model_dir(name), Path(folder) / name))
            source = drafter_dir(DRAFTERS[name])
            drafter = str(widened_copy(source, Path(folder) / DRAFTERS[name]))
            rounds: list[dict[str, Played]] = []
            for number in range(options.rounds):
                rounds.append({})
                for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                    bar.update(task, description=f"{name}: {side.name}")
                    rounds[-1][side.name] = play(side, model, drafter, options)
                    bar.advance(task)
            found += rows_of(name, rounds)
    print(table(HEADS, found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
