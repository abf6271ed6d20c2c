"""A session on servers that end between all of its turns: what is read again, what is accepted, what a kill costs.

    python -m tests.stress.restarts                                  SIGTERM and SIGKILL, one model, all turns
    python -m tests.stress.restarts --models hybrid dense --drafter --signals KILL --think 0 0.25 1
    python -m tests.stress.restarts --durable                        ms from a reply's last event to its row on disk
    python -m tests.stress.restarts --signals KILL --sync            the last event waits until the reply is on disk
    python -m tests.stress.restarts --durable --sync                 ms that it waited

Each server is a process of its own on tiny trained models, float32, CPU, greedy.  Tokens are compared to a server that
never ends and has no disk; ``re-read`` is what all turns read, over what was new in them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sqlite3
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mlx_vlm_cacheplus.core.disk_index import INDEX
from mlx_vlm_cacheplus.replay import session as sessions
from mlx_vlm_cacheplus.replay.history import History
from mlx_vlm_cacheplus.replay.serving import Server
from mlx_vlm_cacheplus.replay.widen import widened_copy
from mlx_vlm_cacheplus.replay.wire import PROTOCOLS, Ask, Received
from tests.fakes.models import drafter_dir, model_dir

DRAFTERS = {"hybrid": "hybrid-mtp", "dense": "dense-eagle3"}
QUIET = ("--log-level", "WARNING")
WAITS = ("--cacheplus-disk-sync", "reply")
# How long a reply may take to be on disk before that is a fault.
DURABLE_SECONDS = 20.0
SIGNALS = {"TERM": signal.SIGTERM, "KILL": signal.SIGKILL}


@dataclass(frozen=True)
class Ending:
    """How a server ends behind a turn.

    Attributes:
        how: the signal; None where it goes on.
        think: seconds between the reply's last event and the signal; None waits until the
            server says that nothing waits to be written.
    """

    how: signal.Signals | None = None
    think: float | None = None


@dataclass
class Turn:
    """Counts of one turn: tokens, and milliseconds until its row was on disk."""

    prompt: int
    restored: int
    text: str
    durable_ms: float | None = None
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def read(self) -> int:
        return self.prompt - self.restored


@dataclass
class Play:
    """A session that was played.

    Attributes:
        held_ms: what ends of replies waited for the disk, median and most, where servers
            were asked.
    """

    turns: list[Turn] = field(default_factory=list)
    held_ms: tuple[float, float] | None = None

    @property
    def read(self) -> int:
        return sum(turn.read for turn in self.turns)

    @property
    def new(self) -> int:
        return sum(turn.record["new"] for turn in self.turns)

    @property
    def texts(self) -> list[str]:
        return [turn.text for turn in self.turns]

    @property
    def drafts(self) -> list[tuple[int, int]]:
        """Drafted and accepted tokens of each turn, where its record was asked for."""
        held = [turn.record["drafter"] for turn in self.turns if turn.record]
        return [(d["drafted"] or 0, d["accepted"] or 0) for d in held]


class Models:
    """models(name) -> a float32 copy, so that how a prompt was split changes no token."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._made: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        if name not in self._made:
            source = drafter_dir(name) if "-" in name else model_dir(name)
            self._made[name] = str(widened_copy(source, self.folder / name))
        return self._made[name]


def stored_up_to(home: Path, tokens: int, seconds: float = DURABLE_SECONDS) -> float:
    """Milliseconds until the index has a row that ends at least there.

    Raises:
        TimeoutError: it has none in so many seconds.
    """
    began = time.perf_counter()
    path = home / "apc" / "segments" / INDEX
    with contextlib.closing(sqlite3.connect(path, timeout=5.0)) as index:
        while (passed := time.perf_counter() - began) < seconds:
            (stop,) = index.execute("SELECT MAX(stop) FROM entries").fetchone()
            if (stop or 0) >= tokens:
                return 1000 * passed
            time.sleep(0.0005)
    raise TimeoutError(f"{tokens} tokens are not on disk after {seconds:.0f} s")


def is_written(server: Server) -> None:
    """Wait until the server says that nothing waits to be written."""
    with httpx.Client(timeout=60) as http:
        while True:
            stats = http.get(f"{server.base}/v1/cache/stats").json()
            if not stats["disk_pending_bytes"] and stats["disk_written_entries"]:
                return
            time.sleep(0.2)


@dataclass
class Player:
    """Plays a session turn by turn, on new servers where an ending says so.

    Attributes:
        home: a folder of its own for cache and log.
        durable: measure how long each reply takes to be on disk.
        kind: of the servers.
    """

    session: sessions.Session
    model: str
    home: Path
    arguments: tuple[str, ...] = ()
    durable: bool = False
    kind: type[Server] = Server

    def play(self, endings: list[Ending], advance: Any = lambda: None) -> Play:
        """``endings`` are taken in turn, from the first one again; the last turn ends all."""
        played, history, server = Play(), History(self.session), None
        try:
            for number, turn in enumerate(self.session.turns):
                if server is None:
                    server = self._start()
                ending = endings[number % len(endings)]
                history.add_turn(turn)
                played.turns.append(self._turn(server, history, turn, ending))
                if ending.how is not None:
                    server = _end(server, ending)
                advance()
            if server is not None:
                played.held_ms = _held_ms(server)
        finally:
            if server is not None:
                server.stop()
        return played

    def _start(self) -> Server:
        arguments = (*QUIET, *self.arguments)
        server = self.kind(self.model, self.home, plus=True, arguments=arguments)
        return server.__enter__()

    def _turn(
        self, server: Server, history: History, turn: Any, ending: Ending
    ) -> Turn:
        ask = Ask(
            model=server.model,
            tools=self.session.tools,
            max_tokens=self.session.reply_limit(turn),
            temperature=0.0,
            stream=True,
        )
        out = _exchange(server, history.messages, ask)
        assert out.prompt is not None and out.generated is not None
        done = Turn(out.prompt, out.restored or 0, out.reply.text())
        if ending.how is signal.SIGKILL and ending.think is not None:
            time.sleep(ending.think)
            if not ending.think:
                # Nothing may come between the last event and the signal.
                assert server._process is not None
                server._process.kill()
        elif self.durable:
            # With a drafter the last token of a reply is not kept.
            done.durable_ms = stored_up_to(self.home, out.prompt + out.generated - 1)
        if ending.how is not signal.SIGKILL or ending.think != 0:
            done.record = _last_record(server)
        history.add_reply(out.reply)
        return done


def _exchange(server: Server, messages: list[dict[str, Any]], ask: Ask) -> Received:
    protocol, out = PROTOCOLS["chat"], Received()
    body = protocol.body(messages, ask)
    with httpx.stream(
        "POST", server.base + protocol.path, json=body, timeout=120
    ) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                break
            if line.startswith("data:"):
                event = json.loads(data)
                assert not event.get("error"), f"{event}\n{server.tail()}"
                protocol.event(event, out)
    return out


def _last_record(server: Server) -> dict[str, Any]:
    url = f"{server.base}/v1/cacheplus/report"
    (record,) = httpx.get(url, params={"last": 1}, timeout=60).json()["records"]
    return dict(record)


def _held_ms(server: Server) -> tuple[float, float] | None:
    stats = httpx.get(f"{server.base}/v1/cache/stats", timeout=60).json()
    if not stats.get("disk_sync_most_ms"):
        return None
    return stats["disk_sync_median_ms"], stats["disk_sync_most_ms"]


def _end(server: Server, ending: Ending) -> None:
    if ending.how is signal.SIGKILL:
        if ending.think is None:
            is_written(server)
        assert server._process is not None
        server._process.kill()
        server._process.wait()
    server.stop()


# -- the script --------------------------------------------------------------------------
def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=DRAFTERS, default=["hybrid"])
    parser.add_argument("--drafter", action="store_true", help="with its draft model")
    parser.add_argument("--signals", nargs="*", choices=SIGNALS, default=list(SIGNALS))
    parser.add_argument(
        "--think",
        nargs="+",
        type=float,
        default=[0.0],
        help="seconds between a reply's last event and SIGKILL",
    )
    parser.add_argument("--session", default="coding-agent-18")
    parser.add_argument("--turns", type=int, help="only so many")
    parser.add_argument("--durable", action="store_true", help="measure, end nothing")
    parser.add_argument(
        "--sync", action="store_true", help="ends of replies wait for the disk"
    )
    return parser.parse_args()


def _endings(arguments: argparse.Namespace) -> list[Ending]:
    if arguments.durable:
        return [Ending()]
    found = []
    for name in arguments.signals:
        thinks = arguments.think if name == "KILL" else [None]
        found += [Ending(SIGNALS[name], think) for think in thinks]
    return found


def _row(name: str, ending: Ending, whole: Play, ended: Play) -> list[str]:
    how = ending.how.name if ending.how else "none"
    wait = "" if ending.think is None else f"{ending.think:g} s"
    accepted = [sum(a for _, a in play.drafts) for play in (ended, whole)]
    complete = len(ended.drafts) == len(whole.drafts)
    times = [t.durable_ms for t in ended.turns if t.durable_ms is not None]
    return [
        *(name, how, wait, f"{ended.read / whole.new:.3f}"),
        f"{whole.read / whole.new:.3f}",
        "same" if ended.texts == whole.texts else "DIFFER",
        "/".join(map(str, accepted)) if complete and any(accepted) else "",
        f"{statistics.median(times):.0f}, {max(times):.0f}" if times else "",
        "{:.0f}, {:.0f}".format(*ended.held_ms) if ended.held_ms else "",
    ]


def main() -> None:
    arguments, console = _arguments(), Console()
    session = sessions.load(arguments.session).first(arguments.turns)
    table = Table(
        *("model", "end", "think", "re-read", "in RAM", "tokens", "accepted / in RAM"),
        *("ms to disk: median, most", "ms held: median, most"),
    )
    endings = _endings(arguments)
    turns = len(arguments.models) * (1 + len(endings)) * len(session.turns)
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        task = progress.add_task("turns", total=turns)
        models, home = Models(Path(folder) / "models"), Path(folder)
        for name in arguments.models:
            more: tuple[str, ...] = ()
            if arguments.drafter:
                more = ("--draft-model", models(DRAFTERS[name]))

            model = models(name)

            def step() -> None:
                progress.advance(task)

            off = (*more, "--cacheplus-disk", "off")
            player = Player(session, model, home / f"{name}-whole", off)
            whole = player.play([Ending()], step)
            for number, ending in enumerate(endings):
                place = home / f"{name}-{number}"
                waits = (*more, *(WAITS if arguments.sync else ()))
                player = Player(session, model, place, waits, arguments.durable)
                ended = player.play([ending], step)
                table.add_row(*_row(name, ending, whole, ended))
    console.print(table)


if __name__ == "__main__":
    main()
