"""Four agents at once with a draft model: time to first token, and tokens per second of all together.

    python -m tests.bench.staggered_agents                      all bundled drafters, about ten minutes
    python -m tests.bench.staggered_agents --long --turns 1     short prompts and long replies: decoding is most of the work
    python -m tests.bench.staggered_agents --small              the mechanics: two agents, one drafter

Five sides, each a process of its own with the in-process server of the tests (tiny trained models, greedy, float32,
CPU): stock with the drafter, stock without it, and the plugin with the drafter, whose speculative batches take turns,
join wherever they can, or join where that was measured to be faster.  Each agent has a conversation of its own; the next one starts when the one before it has its eighth event.
A side plays everything once to compile, then, on an empty cache, timed.  The order of the sides alternates between
rounds.  A verify step is one forward pass of the target over what was drafted, or over one token where nothing is.
CPU seconds are the server process' own, so that they do not depend on what else the machine does.

Sides are compared where they did the same work: equal ids of every prompt and reply.  Otherwise no ratio is given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.bench import gpu_tables

ROOT = Path(__file__).resolve().parents[2]
STOCK, ALONE = "stock + drafter", "stock"
TURNS, JOINED, PLUS = (
    "plus + drafter, turns",
    "plus + drafter, joined",
    "plus + drafter",
)
SIDES = (STOCK, ALONE, TURNS, JOINED, PLUS)
# How speculative batches are put together on each side of the plugin.
MODES = {TURNS: "never", JOINED: "always", PLUS: "auto"}
TOKENS = 96
LONG_TOKENS = 192
# Events of a stream behind which the next agent starts.
LEAD = 8


class Agent:
    """One conversation, and what each of its requests took."""

    def __init__(self, server: Any, number: int, turns: int, long: bool):
        from tests.fakes.models import record_prompt

        self.server, self.turns = server, turns
        self.tokens = LONG_TOKENS if long else TOKENS
        work: dict[str, Any] = {"filler": 4, "task": "get", "count": 10}
        facts = 20
        if long:
            work, facts = {"task": "dump"}, 32
        self.chat = record_prompt(300 + number, facts, **work)
        self.asked = list(self.chat.messages)
        self.leads = threading.Event()
        self.requests: list[dict[str, Any]] = []

    def run(self) -> None:
        try:
            for turn in range(self.turns):
                self._ask(turn)
        finally:
            self.leads.set()

    def _ask(self, turn: int) -> None:
        times: list[float] = []

        def seen() -> None:
            times.append(time.perf_counter())
            if len(times) == LEAD:
                self.leads.set()

        self.server.watch(seen)
        sent = time.perf_counter()
        reply = self.server.chat(self.asked, max_tokens=self.tokens, stream=True)
        self.requests.append(
            {
                "wait": times[0] - sent,
                "tokens": len(reply.ids),
                "work": [reply.prompt_ids, reply.ids],
            }
        )
        # At most ten records again, drawn from the agent's own.
        self.asked += [reply.message(), self.chat.ask("get", 10)]


def watched_server(host: Any, settings: Any) -> Any:
    """A TinyServer that tells each thread of the text events of its own stream."""
    from tests.fakes.server import TinyServer

    class Watched(TinyServer):
        local = threading.local()

        def watch(self, seen: Any) -> None:
            self.local.seen = seen

        def _events(self, *args: Any) -> Iterator[dict[str, Any]]:
            for event in super()._events(*args):
                choices = event.get("choices") or [{}]
                if (choices[0].get("delta") or {}).get("content"):
                    self.local.seen()
                yield event

    return Watched(host, settings)


def play(server: Any, agents: int, turns: int, long: bool) -> dict[str, Any]:
    """All agents, staggered, on an empty cache."""
    from tests.fakes.timeline import Timeline

    server.clear_cache()
    crew = [Agent(server, number, turns, long) for number in range(agents)]
    started, worked = time.perf_counter(), time.process_time()
    with Timeline() as line, ThreadPoolExecutor(agents) as pool:
        jobs = []
        for agent in crew:
            jobs.append(pool.submit(agent.run))
            agent.leads.wait(120)
        for job in jobs:
            job.result()
    seconds, worked = time.perf_counter() - started, time.process_time() - worked
    requests = [request for agent in crew for request in agent.requests]
    return {
        "ttft": statistics.mean(request["wait"] for request in requests),
        "worst": max(request["wait"] for request in requests),
        "rate": sum(request["tokens"] for request in requests) / seconds,
        "worked": worked,
        "steps": sum(kind in ("round", "step") for kind, _ in line.events),
        "work": [request["work"] for request in requests],
    }


def run_side(
    side: str, name: str, agents: int, turns: int, long: bool
) -> dict[str, Any]:
    """In a process of its own: one pass to compile, one that is timed."""
    if side in MODES:
        import mlx_vlm_cacheplus

        report = mlx_vlm_cacheplus.activate()
        assert all(finding.state.is_good for finding in report.findings)
    from tests.fakes.host import Settings, resolve_model, serving
    from tests.fakes.models import DRAFTERS

    with serving() as host:
        settings = Settings(
            resolve_model(DRAFTERS[name]),
            draft_model=None if side == ALONE else resolve_model(name),
            apc_checkpoint_entries=32,
        )
        server = watched_server(host, settings)
        play(server, agents, turns, long)
        return play(server, agents, turns, long)


def ask_side(
    side: str, name: str, agents: int, turns: int, long: bool
) -> dict[str, Any]:
    """Run one side in a process and return what it measured."""
    command = [sys.executable, "-m", "tests.bench.staggered_agents", "--side", side]
    command += ["--drafters", name, "--agents", str(agents), "--turns", str(turns)]
    command += ["--long"] if long else []
    switch = "" if side in MODES else "0"
    env = {**os.environ, "MLX_VLM_CACHEPLUS": switch, "PYTHONPATH": str(ROOT)}
    env["MLX_VLM_DRAFT_MERGE"] = MODES.get(side, "auto")
    env |= {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows_of(name: str, rounds: list[dict[str, dict[str, Any]]]) -> list[list[str]]:
    """The rows of one drafter: medians over rounds, and ratios to stock with the drafter."""

    def median(side: str, figure: str) -> float:
        return statistics.median(played[side][figure] for played in rounds)

    rows = []
    for side in SIDES:
        ratios = ["", ""]
        if side != STOCK:
            same = all(p[side]["work"] == p[STOCK]["work"] for p in rounds)
            ratios = [
                f"{median(side, f) / median(STOCK, f):.2f}" if same else "other work"
                for f in ("ttft", "rate")
            ]
        figures = [f"{1000 * median(side, f):.0f}" for f in ("ttft", "worst")]
        rate, steps = (f"{median(side, f):.0f}" for f in ("rate", "steps"))
        work = [steps, f"{median(side, 'worked'):.1f}"]
        rows.append([f"`{name}`", side, *figures, ratios[0], *work, rate, ratios[1]])
    return rows


def main() -> int:
    from tests.fakes.models import DRAFTERS

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--drafters", nargs="*", default=sorted(DRAFTERS))
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--long", action="store_true", help="decode more than is read")
    parser.add_argument("--small", action="store_true", help="the mechanics alone")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.small:
        options.drafters, options.agents = ["dense-dflash"], 2
        options.turns = options.rounds = 1
    shape = (options.agents, options.turns, options.long)
    if options.side:
        print(json.dumps(run_side(options.side, options.drafters[0], *shape)))
        return 0
    rows = []
    for name in options.drafters:
        rounds = []
        for number in range(options.rounds):
            order = SIDES if number % 2 == 0 else SIDES[::-1]
            rounds.append({side: ask_side(side, name, *shape) for side in order})
        rows += rows_of(name, rounds)
    header = [
        "drafter",
        "side",
        "mean TTFT, ms",
        "worst TTFT, ms",
        "of stock + drafter",
    ]
    header += ["verify steps", "CPU, s", "tok/s of all", "of stock + drafter"]
    print(gpu_tables.table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
