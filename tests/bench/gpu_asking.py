"""The benchmarks' client: a server process, and one that asks it and keeps raw rows."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from mlx_vlm_cacheplus.replay.serving import Server
from mlx_vlm_cacheplus.replay.wire import Ask, Chat, Received, ServerFault
from tests.bench.gpu_inputs import Plan
from tests.bench.gpu_server import SCRIPT
from tests.bench.gpu_tables import Rows, join_seen

# One client for all: to make one costs more than a warm turn.
HTTP = httpx.Client(timeout=600)
CHAT = Chat()
# The plugin refuses a budget above the machine's memory, and some machines say less
# than they have; nothing here needs more than a few GB.
RAM_GB = min(40, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**31)
# What makes a CPU play the mechanics.
SMALL = {"turns": 5, "system": 200, "user": 60, "reply": 12}


class BenchServer(Server):
    """A stock server run by one of the benchmark's modules."""

    module = "tests.bench.gpu_server"
    settings: dict[str, str] = {}

    def command(self, port: int) -> list[str]:
        """Stock's command line with another module."""
        words = super().command(port)[3:]
        return [sys.executable, "-m", self.module, *words, "--log-level", "WARNING"]

    def environment(self) -> dict[str, str]:
        """This side's cache settings; kernels are compiled in a folder of its own."""
        kernels = {"MLX_PTX_CACHE_DIR": str(self.home / "ptx")}
        return super().environment() | self.settings | kernels


@dataclass
class Session:
    """Asks one server for one side; several may share the rows."""

    plan: Plan
    options: argparse.Namespace
    base: str = ""
    side: str = ""
    rows: Rows = field(default_factory=lambda: defaultdict(list))

    def get(self, route: str, **query: Any) -> Any:
        """One of the server's own routes."""
        answer = HTTP.get(f"{self.base}/bench/{route}", params=query)
        return answer.raise_for_status().json()

    def reset(self) -> None:
        """Empty the server's prefix cache."""
        HTTP.post(f"{self.base}/v1/cache/reset").raise_for_status()

    def seen(self) -> list[dict[str, Any]]:
        """What the server saw since the last call."""
        out: list[dict[str, Any]] = self.get("requests")
        return out

    def ask(
        self,
        messages: list[dict[str, str]],
        max_tokens: int,
        temperature: float = 0.0,
        heard: Callable[[float], None] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """One streamed request; its counts and times (seconds).

        ``heard`` gets the time of each text as it comes.
        """
        ask = Ask(self.options.folder, [], max_tokens, temperature, True)
        body = {**CHAT.body(messages, ask), **more}
        out, first = Received(), None
        sent = time.perf_counter()
        with HTTP.stream("POST", f"{self.base}{CHAT.path}", json=body) as answer:
            if answer.status_code != 200:
                text = answer.read()[:300]
                raise ServerFault(f"HTTP {answer.status_code}: {text!r}")
            for line in answer.iter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                if CHAT.event(json.loads(line[5:]), out):
                    now = time.perf_counter()
                    first = now if first is None else first
                    if heard is not None:
                        heard(now)
        ended = time.perf_counter()
        assert out.prompt is not None, f"a reply without usage, of {out}"
        return {
            "prompt": out.prompt,
            "restored": out.restored or 0,
            "generated": out.generated,
            "ttft": None if first is None else first - sent,
            "seconds": ended - sent,
            "sent": sent,
            "text": out.reply.reasoning + out.reply.content,
        }

    def turn(self, marker: str, said: Sequence[str], **more: Any) -> dict[str, Any]:
        """The turn after these replies, with its scripted reply."""
        # A temperature, because stock has a path of its own for greedy requests
        # that asks no sampler.
        body = {"temperature": 1, "max_tokens": 4 * self.options.reply}
        body[SCRIPT] = self.plan.replies[len(said)]
        return self.ask(self.plan.messages(marker, said), **{**body, **more})

    def session(self, marker: str) -> list[dict[str, Any]]:
        """Every turn; the server's own text goes back."""
        rows: list[dict[str, Any]] = []
        for _ in self.plan.users:
            rows.append(self.turn(marker, [row["text"] for row in rows]))
        return rows

    def timed(
        self, marker: str, number: int, part: str = "turns"
    ) -> list[dict[str, Any]]:
        """One session from an empty cache; its rows and its memory are kept."""
        self.reset()
        before = self.get("memory")
        rows = self.session(marker)
        after = self.get("memory")
        join_seen(rows, self.seen())
        lead = {"side": self.side, "round": number}
        for turn, row in enumerate(rows, 1):
            self.rows[part].append({**lead, "turn": turn, **row})
        if part == "turns":
            memory = {"before": before["active"], "peak": after["peak"]}
            self.rows["memory"].append({**lead, **memory, "after": after["active"]})
        self.reset()
        return rows


def note(text: str) -> None:
    """Progress, beside what is printed at the end."""
    print(text, file=sys.stderr, flush=True)
