"""A restart in the middle of a session: how long the next turn's first token takes.

    python -m tests.bench.restart             both bundled models, about three minutes
    python -m tests.bench.restart --small     the mechanics: two turns, one round

Real servers, tiny models in float32, greedy.  Three sides: *cold*, a stock server that has seen nothing; *stock*, one
with stock's disk tier that has served all turns but the last, was ended by SIGTERM and started again; *plus*, the same
with ``--cacheplus``.  Each server is asked another conversation of the same length first, so that nothing is compiled
within what is timed, and each round starts from a copy of the same folder.  The order of the sides alternates.

Ratios are given where all sides were sent the same messages and gave the same reply.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from mlx_vlm_cacheplus.replay import session as sessions
from mlx_vlm_cacheplus.replay.history import History, recorded_reply
from mlx_vlm_cacheplus.replay.serving import Server
from mlx_vlm_cacheplus.replay.widen import widened_copy
from tests.bench import gpu_tables
from tests.fakes.models import model_dir

COLD, STOCK, PLUS = "cold", "stock", "plus"
SIDES = (COLD, STOCK, PLUS)
MODELS = ("dense", "hybrid")
# How long what was written last may take to be on disk.
WRITTEN_SECONDS = 3.0


@dataclass
class Asked:
    """One streamed request: seconds to its first text, prompt tokens and those restored, and the reply."""

    ttft: float
    prompt: int
    restored: int
    text: str


def ask(server: Server, messages: list[dict[str, Any]], tokens: int) -> Asked:
    """Send it, and read it to its end."""
    body = {"model": server.model, "messages": messages, "temperature": 0}
    body |= {"max_tokens": tokens, "stream": True}
    body["stream_options"] = {"include_usage": True}
    first, text, usage, sent = None, "", {}, time.perf_counter()
    url = f"{server.base}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=300) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            delta = (event.get("choices") or [{}])[0].get("delta") or {}
            if delta.get("content"):
                first = first or time.perf_counter() - sent
                text += delta["content"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    assert first is not None, "the reply has no text"
    return Asked(first, usage["prompt_tokens"], cached, text)


def conversation(session: Any, marker: str = "") -> list[dict[str, Any]]:
    """All messages up to the last turn's, with the replies that the session recorded."""
    history = History(session, marker)
    for number, turn in enumerate(session.turns[:-1], 1):
        history.add_turn(turn)
        history.add_reply(recorded_reply(turn, number))
    history.add_turn(session.turns[-1])
    return history.messages


class Side:
    """One side of one model: a folder as it was left by the turns before the last."""

    def __init__(self, name: str, model: Path, session: Any, home: Path, tokens: int):
        self.name, self.model, self.session = name, model, session
        self.home, self.tokens = home, tokens
        if name != COLD:
            self._fill()

    def _server(self, home: Path) -> Server:
        arguments = ("--log-level", "WARNING")
        return Server(str(self.model), home, self.name == PLUS, arguments)

    def _fill(self) -> None:
        with self._server(self.home) as server:
            for turns in range(1, len(self.session.turns)):
                ask(server, conversation(self.session.first(turns)), self.tokens)
            time.sleep(WRITTEN_SECONDS)

    def last_turn(self, folder: Path) -> Asked:
        """On a server that has just been started."""
        if self.home.exists():
            shutil.copytree(self.home, folder)
        with self._server(folder) as server:
            ask(server, conversation(self.session, "another"), self.tokens)
            return ask(server, conversation(self.session), self.tokens)


def rows_of(model: str, rounds: list[dict[str, Asked]]) -> list[list[str]]:
    """Medians over rounds, and ratios to the cold side and to stock."""
    texts = {asked.text for played in rounds for asked in played.values()}

    def median(side: str) -> float:
        return statistics.median(played[side].ttft for played in rounds)

    rows = []
    for side in SIDES:
        asked = rounds[0][side]
        ratios = [
            f"{median(side) / median(other):.2f}" if len(texts) == 1 else "other work"
            for other in (COLD, STOCK)
        ]
        seconds = [played[side].ttft for played in rounds]
        spread = f"{1000 * min(seconds):.0f} to {1000 * max(seconds):.0f}"
        rows.append(
            [
                *(model, side, str(asked.prompt), str(asked.prompt - asked.restored)),
                *(f"{1000 * median(side):.0f}", spread, *ratios),
            ]
        )
    return rows


def play(model: str, turns: int, rounds: int, tokens: int, home: Path) -> list:
    """One model: all sides, round by round."""
    session = sessions.load("short").first(turns)
    copy = widened_copy(model_dir(model), home / "model")
    sides = [Side(name, copy, session, home / name, tokens) for name in SIDES]
    played: list[dict[str, Asked]] = []
    for number in range(rounds):
        order = sides if number % 2 == 0 else sides[::-1]
        played.append({s.name: s.last_turn(home / f"{s.name}-{number}") for s in order})
    return rows_of(model, played)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16, help="a reply")
    parser.add_argument("--small", action="store_true", help="the mechanics alone")
    options = parser.parse_args()
    if options.small:
        options.models, options.turns, options.rounds = ["dense"], 3, 1
    rows = []
    for model in options.models:
        with tempfile.TemporaryDirectory() as home:
            shape = (options.turns, options.rounds, options.tokens)
            rows += play(model, *shape, Path(home))
    heads = ["model", "side", "prompt", "prefilled", "TTFT ms, median", "range"]
    print(gpu_tables.table([*heads, "of cold", "of stock"], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
