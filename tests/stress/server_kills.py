"""Whole servers, killed while several sessions talk: the same text as from one that is not, and durable stays durable.

The model is dense, so that every length of a path can be restored; replies are spelled as the tokenizer does, so that
a prompt's tokens do not depend on what a killed server still remembered.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from mlx_vlm_cacheplus.changes import ORDER
from mlx_vlm_cacheplus.replay.serving import Server
from tests.fakes.models import record_prompt
from tests.stress.restarts import QUIET, Models

TURNS, REPLY = 6, 24
# A kill comes behind one of so many replies, up to so many seconds later.
MOST_REPLIES, MOST_SECONDS = 16, 0.5
# How long the first reply of a server may take.
PATIENCE = 120.0
CHOSEN = ",".join(name for name in ORDER if name != "reply-ids")


class Canonical(Server):
    """A server that spells replies as the tokenizer does, whatever it remembers."""

    def command(self, port: int) -> list[str]:
        return [*super().command(port), CHOSEN]


@dataclass
class Reply:
    """One turn: its text, tokens of its prompt, and how many of these were restored."""

    text: str
    prompt: int
    restored: int


@dataclass
class Counts:
    """What was seen; ``durable`` are turns that were reported so and then built upon."""

    kills: int = 0
    replies: int = 0
    durable: int = 0
    read_again: int = 0

    def line(self) -> str:
        return (
            f"{self.kills} servers killed; {self.replies} replies with the same text, {self.durable} turns "
            f"built upon what was durable, {self.read_again} tokens read again"
        )


@dataclass
class Talk:
    """One session; ``turn`` is the next one, ``durable`` how many are on disk for sure."""

    messages: list[dict[str, Any]]
    asks: list[dict[str, Any]]
    replies: list[Reply] = field(default_factory=list)
    turn: int = 0
    durable: int = 0

    def prompt(self, texts: list[str]) -> list[dict[str, Any]]:
        """The messages of the next turn, with these replies before it."""
        said = list(self.messages)
        for text, ask in zip(texts[: self.turn], self.asks, strict=False):
            said += [{"role": "assistant", "content": text}, ask]
        return said


def talks(sessions: int, seed: int) -> list[Talk]:
    made = []
    for number in range(sessions):
        chat = record_prompt(seed=100 * seed + number, n_records=12)
        asks = [chat.ask("get", 3) for _ in range(TURNS)]
        made.append(Talk(list(chat.messages), asks))
    return made


def ask(server: Server, messages: list[dict[str, Any]]) -> Reply:
    body = {
        "model": server.model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": REPLY,
    }
    answer = httpx.post(f"{server.base}/v1/chat/completions", json=body, timeout=120)
    answer.raise_for_status()
    data = answer.json()
    usage = data["usage"]
    return Reply(
        data["choices"][0]["message"].get("content") or "",
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


class Life:
    """One server from start to kill, and the sessions that talk to it."""

    def __init__(
        self, server: Server, open_: list[Talk], want: list[Talk], counts: Counts
    ):
        self.server, self.open, self.want, self.counts = server, open_, want, counts
        self.served = threading.Semaphore(0)
        self.dead = threading.Event()
        self.faults: list[str] = []

    def run(self, replies: int, seconds: float) -> None:
        """Talk until so many replies have come and so long after, then kill."""
        with ThreadPoolExecutor(len(self.open) + 1) as pool:
            for number in range(len(self.open)):
                pool.submit(self._guarded, self._talk, number)
            pool.submit(self._guarded, self._watch)
            came = all(self.served.acquire(timeout=PATIENCE) for _ in range(replies))
            time.sleep(seconds)
            self.dead.set()
            assert self.server._process is not None
            self.server._process.kill()
        assert came, f"nothing was served\n{self.server.tail()}"
        assert not self.faults, self.faults

    def _guarded(self, what: Callable[..., None], *arguments: Any) -> None:
        try:
            what(*arguments)
        except httpx.HTTPError as error:
            if not self.dead.is_set():
                self.faults.append(f"{type(error).__name__}: {error}")
        except AssertionError as error:
            self.faults.append(str(error))
            self.served.release(MOST_REPLIES)

    def _talk(self, number: int) -> None:
        talk, want = self.open[number], self.want[number]
        texts = [reply.text for reply in want.replies]
        first = True
        while not self.dead.is_set():
            if talk.turn == TURNS:
                talk.turn = talk.durable = 0
                first = False
            durable = talk.durable == talk.turn and talk.turn > 0 and first
            got, there = ask(self.server, talk.prompt(texts)), want.replies[talk.turn]
            place = f"session {number + 1}, turn {talk.turn + 1}"
            assert (got.text, got.prompt) == (there.text, there.prompt), place
            if durable:
                assert got.restored >= there.restored, (place, got, there)
                self.counts.durable += 1
            self.counts.replies += 1
            self.counts.read_again += max(0, there.restored - got.restored)
            talk.turn, first = talk.turn + 1, False
            self.served.release()

    def _watch(self) -> None:
        """Note what is durable: replied before the server said that nothing waits."""
        while not self.dead.is_set():
            before = [talk.turn for talk in self.open]
            stats = httpx.get(f"{self.server.base}/v1/cache/stats", timeout=30).json()
            if not stats["disk_pending_paths"]:
                for talk, turn in zip(self.open, before, strict=True):
                    talk.durable = turn if turn <= talk.turn else 0
            time.sleep(0.02)


def run(
    folder: Path,
    kills: int,
    sessions: int,
    seed: int,
    advance: Callable[[], None] = lambda: None,
) -> Counts:
    """Kill so many servers, one after the other.

    Raises:
        AssertionError: a text differs, a server does not serve, or something durable is missing.
    """
    model, rng, counts = (
        Models(folder / "models")("dense"),
        random.Random(seed),
        Counts(),
    )
    want, open_ = talks(sessions, seed), talks(sessions, seed)
    off = (*QUIET, "--cacheplus-disk", "off")
    with Canonical(model, folder / "never", True, off) as server:
        for talk in want:
            for talk.turn in range(TURNS):
                texts = [reply.text for reply in talk.replies]
                talk.replies.append(ask(server, talk.prompt(texts)))
    advance()
    for _ in range(kills):
        when = rng.randrange(1, MOST_REPLIES), rng.random() * MOST_SECONDS
        with Canonical(model, folder / "killed", True, QUIET) as server:
            Life(server, open_, want, counts).run(*when)
        counts.kills += 1
        advance()
    return counts
