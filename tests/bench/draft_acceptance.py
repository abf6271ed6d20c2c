"""How many drafted tokens are accepted, cold and in a warm second turn, on stock and with the plugin.

    python -m tests.bench.draft_acceptance                       all bundled drafters, about three minutes
    python -m tests.bench.draft_acceptance --drafters hybrid-mtp --chats 2

Each side is a process of its own with the in-process server of the tests: tiny trained models, greedy, float32, CPU.
Counts come from the loaded drafter, times from the events of a streamed reply.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench import gpu_tables

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("stock", "plus")
TURNS = ("cold", "warm")
TOKENS = 64
COUNTERS = ("speculative_total_drafted", "speculative_total_accepted")


def timed_server(host: Any, settings: Any) -> Any:
    """A TinyServer that knows when the events of its last streamed reply came."""
    from tests.fakes.server import TinyServer

    class Timed(TinyServer):
        times: list[float] = []

        def _events(self, *args: Any) -> Iterator[dict[str, Any]]:
            self.times = []
            for event in super()._events(*args):
                self.times.append(time.perf_counter())
                yield event

    return Timed(host, settings)


def play(server: Any, chats: int) -> dict[str, dict[str, float]]:
    """Two turns of each chat on an empty cache; sums by turn."""
    from tests.fakes.models import record_prompt

    drafter = server.generator.draft_model
    out = {
        turn: dict.fromkeys(
            ("drafted", "accepted", "tokens", "seconds", "prompt", "restored"), 0.0
        )
        for turn in TURNS
    }
    for seed in range(chats):
        chat = record_prompt(100 + seed, 20, filler=4, task="get", count=10)
        asked = list(chat.messages)
        server.clear_cache()
        for turn in TURNS:
            before = counts(drafter)
            reply = server.chat(asked, max_tokens=TOKENS, stream=True)
            sums = out[turn]
            for name, now, then in zip(
                ("drafted", "accepted"), counts(drafter), before, strict=True
            ):
                sums[name] += now - then
            sums["tokens"] += len(reply.ids) - 1
            sums["seconds"] += server.times[-1] - server.times[0]
            sums["prompt"] += len(reply.prompt_ids)
            sums["restored"] += reply.cached_tokens
            asked += [reply.message(), chat.ask("get", 10)]
    return out


def counts(drafter: Any) -> tuple[float, ...]:
    """Drafted and accepted tokens since the drafter was loaded."""
    return tuple(float(getattr(drafter, name, 0)) for name in COUNTERS)


def run_side(side: str, drafters: list[str], chats: int) -> dict[str, Any]:
    """In a process of its own: each drafter, and its model without one."""
    if side == "plus":
        import mlx_vlm_cacheplus

        report = mlx_vlm_cacheplus.activate()
        assert all(finding.state.is_good for finding in report.findings)
    from tests.fakes.host import Settings, resolve_model, serving
    from tests.fakes.models import DRAFTERS

    out: dict[str, Any] = {}
    with serving() as host:
        for name in drafters:
            for drafter in (None, name):
                settings = Settings(
                    resolve_model(DRAFTERS[name]),
                    draft_model=drafter and resolve_model(drafter),
                    apc_checkpoint_entries=8,
                )
                server = timed_server(host, settings)
                play(server, 1)  # compiles
                out.setdefault(name, {})["with" if drafter else "without"] = play(
                    server, chats
                )
    return out


def ask_side(side: str, drafters: list[str], chats: int) -> dict[str, Any]:
    """Run one side in a process and return what it measured."""
    command = [sys.executable, "-m", "tests.bench.draft_acceptance", "--side", side]
    command += ["--drafters", *drafters, "--chats", str(chats)]
    switch = "" if side == "plus" else "0"
    env = {**os.environ, "MLX_VLM_CACHEPLUS": switch, "PYTHONPATH": str(ROOT)}
    env |= {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rate(sums: dict[str, float]) -> float:
    """Accepted of drafted tokens."""
    return sums["accepted"] / sums["drafted"] if sums["drafted"] else 0.0


def speed(found: dict[str, Any], turn: str) -> float:
    """Tokens per second with the drafter, relative to the same side without it."""
    with_it, without = (found[name][turn] for name in ("with", "without"))
    return float(
        (with_it["tokens"] / with_it["seconds"])
        / (without["tokens"] / without["seconds"])
    )


def table(results: dict[str, Any], drafters: list[str]) -> str:
    """The rows of docs/BENCHMARKS.md."""
    header = ["drafter", "side", "turn", "restored of prompt", "accepted of drafted"]
    header += ["rate", "tok/s of the same without drafter"]
    lines = []
    for name, side, turn in itertools.product(drafters, SIDES, TURNS):
        found = results[side][name]
        sums = found["with"][turn]
        restored = f"{sums['restored']:.0f} of {sums['prompt']:.0f}"
        accepted = f"{sums['accepted']:.0f} of {sums['drafted']:.0f}"
        figures = [f"{rate(sums):.2f}", f"{speed(found, turn):.2f}"]
        lines.append([f"`{name}`", side, turn, restored, accepted, *figures])
    return gpu_tables.table(header, lines)


def main() -> int:
    from tests.fakes.models import DRAFTERS

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--drafters", nargs="*", default=sorted(DRAFTERS))
    parser.add_argument("--chats", type=int, default=6)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(run_side(options.side, options.drafters, options.chats)))
        return 0
    results = {s: ask_side(s, options.drafters, options.chats) for s in SIDES}
    print(table(results, options.drafters))
    return 0


if __name__ == "__main__":
    sys.exit(main())
