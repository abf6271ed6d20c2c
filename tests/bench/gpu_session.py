"""One recorded agent session on stock and on stock with the plugin, timed on a GPU.

    python -m tests.bench.gpu_session --shape dense7b --together --json dense.json
    python -m tests.bench.gpu_session --small           # the mechanics, on a CPU

Four servers, each a process of its own, answer the same requests over HTTP, greedily
or from a script, streamed, one request at a time:

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

*Decode speed* is compared between plus and stock without a prefix cache in pairs of
requests at about 4k tokens, in alternating order, with free greedy replies of a fixed
length: no sampler, no script, stock's own path.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from mlx_vlm_cacheplus.replay.serving import Server
from tests.bench import gpu_tables
from tests.bench.gpu_inputs import SHAPES, Plan, make_model, make_plan
from tests.bench.gpu_server import SCRIPT
from tests.fakes.models import NAMES, model_dir

NO_CACHE, STOCK, STOCK_40, PLUS = gpu_tables.SIDES
RAM = {"APC_ENABLED": "1", "APC_DISK_ENABLED": "0"}
ENVIRONMENTS = {
    NO_CACHE: {"APC_ENABLED": "0"},
    STOCK: RAM,
    STOCK_40: {**RAM, "APC_MEMORY_MAX_GB": "40"},
    PLUS: {**RAM, "APC_MEMORY_MAX_GB": "40"},
}
SMALL = {
    "model": "dense",
    "pair_turn": 2,
    "pair_tokens": 24,
    "turns": 5,
    "system": 200,
    "user": 60,
    "reply": 12,
    "rounds": 1,
    "pairs": 3,
}
# One client for all: to make one costs more than a warm turn.
HTTP = httpx.Client(timeout=600)


class BenchServer(Server):
    """One of the four servers."""

    side = NO_CACHE

    def command(self, port: int) -> list[str]:
        """Stock's command line, run by ``gpu_server``."""
        stock = super().command(port)
        words = ["-m", "tests.bench.gpu_server", *stock[3:], "--log-level", "WARNING"]
        return [sys.executable, *words]

    def environment(self) -> dict[str, str]:
        """This side's cache settings; kernels are compiled in a folder of its own."""
        kept = super().environment() | ENVIRONMENTS[self.side]
        return {**kept, "MLX_PTX_CACHE_DIR": str(self.home / "ptx")}


@dataclass
class Session:
    """Asks the servers and keeps raw rows."""

    plan: Plan
    options: argparse.Namespace
    rows: dict[str, list[Any]] = field(
        default_factory=lambda: {"turns": [], "cold": [], "memory": [], "pairs": []}
    )

    def ask(
        self, base: str, messages: list[dict[str, str]], **body: Any
    ) -> dict[str, Any]:
        """One streamed request; its counts and times."""
        body = {
            "model": self.options.folder,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        deltas: list[float] = []  # when text came
        text, usage = "", None
        sent = time.perf_counter()
        url = f"{base}/v1/chat/completions"
        with HTTP.stream("POST", url, json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(
                    f"HTTP {answer.status_code}: {answer.read()[:300]!r}"
                )
            for line in answer.iter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                event = json.loads(line[5:])
                usage = event.get("usage") or usage
                for choice in event.get("choices") or []:
                    delta = choice.get("delta") or {}
                    part = delta.get("content") or delta.get("reasoning") or ""
                    if part:
                        deltas.append(time.perf_counter())
                        text += part
        ended = time.perf_counter()
        assert usage is not None, "a reply without usage"
        details = usage.get("prompt_tokens_details") or {}
        prompt = usage.get("prompt_tokens") or usage.get("input_tokens")
        return {
            "prompt": prompt,
            "restored": details.get("cached_tokens") or 0,
            "generated": usage.get("completion_tokens") or usage.get("output_tokens"),
            "ttft": deltas[0] - sent if deltas else None,
            "seconds": ended - sent,
            "sent": sent,
            "text": text,
        }

    def say(
        self, base: str, marker: str, said: Sequence[str], **more: Any
    ) -> dict[str, Any]:
        """The turn after these replies, with its scripted reply."""
        reply = self.plan.replies[len(said)]
        # A temperature, because stock has a path of its own for greedy requests
        # that asks no sampler.
        body = {"temperature": 1, "max_tokens": 4 * self.options.reply, SCRIPT: reply}
        return self.ask(base, self.plan.messages(marker, said), **{**body, **more})

    def session(self, base: str, marker: str) -> list[dict[str, Any]]:
        """Every turn; the server's own text goes back."""
        said: list[str] = []
        rows = []
        for _ in self.plan.users:
            rows.append(self.say(base, marker, said))
            said.append(rows[-1]["text"])
        return rows

    def warm_up(self, base: str) -> None:
        """Every shape that will be timed, once."""
        began = time.perf_counter()
        self.session(base, "w")
        reset(base)
        self.say(base, "w", self.plan.replies[:-1])
        if not self.options.together:
            reset(base)
        seen(base)
        note(f"  warm-up {time.perf_counter() - began:.0f} s")

    def round(self, side: str, base: str, number: int) -> None:
        """One timed session from an empty cache, then its last turn cold."""
        reset(base)
        before = HTTP.get(f"{base}/bench/memory").json()
        marker = "abcdefgh"[number]
        rows = self.session(base, marker)
        after = HTTP.get(f"{base}/bench/memory").json()
        gpu_tables.join_seen(rows, seen(base))
        for turn, row in enumerate(rows, 1):
            lead = {"side": side, "round": number, "turn": turn}
            self.rows["turns"].append({**lead, **row})
        reset(base)
        cold = self.say(base, marker, [row["text"] for row in rows[:-1]])
        gpu_tables.join_seen([cold], seen(base))
        self.rows["cold"].append({"side": side, "round": number, **cold})
        memory = {"before": before["active"], "peak": after["peak"]}
        memory["after"] = after["active"]
        self.rows["memory"].append({"side": side, "round": number, **memory})
        total = sum(row["seconds"] for row in rows)
        note(
            f"  {side:12} round {number}: session {total:.2f} s, last turn "
            f"{rows[-1]['ttft']:.3f} s, cold {cold['ttft']:.3f} s"
        )

    def pairs(self, bases: dict[str, str], enough: float) -> None:
        """Decode speed of plus beside stock without a cache, free and greedy."""
        said = self.plan.replies[: max(1, self.options.pair_turn - 1)]
        body = {"temperature": 0, "max_tokens": self.options.pair_tokens}

        def prompt(number: int) -> list[dict[str, str]]:
            # Another last message each time, so that each reply is a new one to keep.
            *before, last = self.plan.messages("p", said)
            return [*before, {**last, "content": f"{number:04d} {last['content']}"}]

        for number, side in enumerate((NO_CACHE, PLUS, NO_CACHE, PLUS, PLUS)):
            self.ask(bases[side], prompt(9000 + number), **body)
            seen(bases[side])
        for number in range(self.options.pairs):
            if time.monotonic() > enough:
                note(f"  time is up after {number} pairs")
                break
            order = (NO_CACHE, PLUS) if number % 2 == 0 else (PLUS, NO_CACHE)
            pair = {
                side: self.ask(bases[side], prompt(number), **body) for side in order
            }
            for side, row in pair.items():
                gpu_tables.join_seen([row], seen(bases[side]))
            self.rows["pairs"].append(pair)


def reset(base: str) -> None:
    """Empty the server's prefix cache."""
    HTTP.post(f"{base}/v1/cache/reset").raise_for_status()


def seen(base: str) -> list[dict[str, Any]]:
    """What the server saw since the last call."""
    return HTTP.get(f"{base}/bench/requests").json()


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(session: Session, work: Path, save: Any) -> None:
    """Run everything that the options ask for; ``save`` is called after each part."""
    options = session.options
    enough = time.monotonic() + options.seconds
    sides = list(gpu_tables.SIDES) if options.rounds else [NO_CACHE, PLUS]
    for group in [sides] if options.together else [[side] for side in sides]:
        with ExitStack() as stack:
            bases = start(stack, group, options, work)
            if options.together:
                session.pairs(bases, enough)
                save()
            if not options.rounds:
                continue
            with ThreadPoolExecutor(len(group)) as pool:
                list(pool.map(session.warm_up, bases.values()))
            for number in range(options.rounds):
                for side in group if number % 2 == 0 else group[::-1]:
                    session.round(side, bases[side], number)
                    save()
                if time.monotonic() > enough:
                    break
    if not options.together:
        with ExitStack() as stack:
            bases = start(stack, [NO_CACHE, PLUS], options, work / "pairs")
            session.pairs(bases, enough)
            save()


def start(
    stack: ExitStack, sides: Sequence[str], options: argparse.Namespace, work: Path
) -> dict[str, str]:
    """Start servers at the same time; their addresses."""
    began = time.perf_counter()

    def one(side: str) -> BenchServer:
        home = work / side.replace(" ", "-")
        server = BenchServer(str(options.folder), home, side == PLUS)
        server.side, server.wait_seconds = side, 300.0
        server.__enter__()
        return server

    with ThreadPoolExecutor(len(sides)) as pool:
        servers = dict(zip(sides, pool.map(one, sides), strict=True))
    for side, server in servers.items():
        stack.callback(server.stop)
        applied = "segments" in HTTP.get(f"{server.base}/v1/cache/stats").json()
        if applied != (side == PLUS):
            raise RuntimeError(f"{side}: plugin on is {applied}\n{server.tail()}")
    note(f"  {', '.join(sides)}: up after {time.perf_counter() - began:.0f} s")
    return {side: server.base for side, server in servers.items()}


def keep_apart() -> None:
    """Client on one half of the cores, servers (see ``gpu_server``) on the other."""
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) >= 8:
        cores = sorted(os.sched_getaffinity(0))
        half = len(cores) // 2
        os.environ["BENCH_CORES"] = ",".join(map(str, cores[:half]))
        os.sched_setaffinity(0, cores[half:])


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
    out.add_argument(
        "--rounds", type=int, default=3, help="timed sessions a server; 0: pairs only"
    )
    out.add_argument("--pairs", type=int, default=24, help="pairs for decode speed")
    out.add_argument("--pair-turn", type=int, default=4, help="the turn they extend")
    out.add_argument("--pair-tokens", type=int, default=96)
    out.add_argument("--together", action="store_true", help="keep all four loaded")
    out.add_argument("--seconds", type=float, default=3600.0, help="stop rounds then")
    out.add_argument("--json", help="raw rows go here, as they come")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables; 0, or 1 where the sides did different work."""
    words = parser()
    options = words.parse_args(arguments)
    if options.small:
        words.set_defaults(**SMALL)
        options = words.parse_args(arguments)
    keep_apart()
    work = Path(tempfile.mkdtemp(prefix="gpu-session-"))
    if options.shape:
        options.folder = str(make_model(options.shape, work / options.shape))
    elif options.model in NAMES:
        options.folder = str(model_dir(options.model))
    else:
        options.folder = options.model
    o = options
    session = Session(make_plan(o.turns, o.system, o.user, o.reply), o)

    def save() -> None:
        if options.json:
            text = gpu_tables.as_json(session.rows, vars(options))
            Path(options.json).write_text(text, encoding="utf-8")

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        measure(session, work, save)
    finally:
        save()
        for log in work.rglob("server.log"):
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
            if any("rror" in line or "not kept" in line for line in tail):
                note(f"  {log.parent.name}: " + "\n    ".join(tail))
        shutil.rmtree(work, ignore_errors=True)
    report = gpu_tables.report(session.rows)
    print(report.text)
    return 0 if report.equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
