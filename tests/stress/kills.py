"""Kills at random points while several sessions store: nothing wrong is restored, nothing that was durable is missing.

    python -m tests.stress.kills                                     8 kills of a small process
    python -m tests.stress.kills --kills 300 --sessions 4 --seed 1   all of them; minutes
    python -m tests.stress.kills --kills 0 --servers 12              whole servers on a tiny model

The small process has the cache in RAM and its tier on disk, as a server has them, and caches whose arrays hold the ids
of their tokens: what is restored says itself what it is.  It reports each reply, and what was durable when nothing
waited to be written.  Whole servers (``tests.stress.server_kills``) are compared by the text of greedy replies.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

# Turns until a session begins a new conversation.
TURNS = 6
SYSTEM, QUESTION, REPLY = 24, 9, 7
SECONDS = 60.0
# A kill comes at one of so many events, or a moment later.
MOST_EVENTS, MOMENT = 14, 0.03
# The share of turns behind which everybody thinks until all is written.
PAUSES = 0.3
IMPORTS = ["mlx_vlm_cacheplus.core.disk_tier", "tests.fakes.token_caches"]

# Session, conversation of the session, turns of it.
Place = tuple[int, int, int]


def path_of(seed: int, place: Place) -> list[int]:
    """Token ids of a conversation up to a turn's reply; all sessions begin alike."""
    session, conversation, turns = place
    head = random.Random(seed)
    own = random.Random(f"{seed} {session} {conversation}")
    ids = [head.randrange(40) for _ in range(SYSTEM)]
    return ids + [own.randrange(40) for _ in range(turns * (QUESTION + REPLY))]


# -- the process that is killed --------------------------------------------------------
class Store:
    """A cache with its tier; asserts that what is restored is what it is called."""

    def __init__(self, folder: Path):
        from mlx_vlm_cacheplus.core.disk_store import DiskStore
        from mlx_vlm_cacheplus.core.disk_tier import DiskTier
        from mlx_vlm_cacheplus.core.segment_cache import SegmentCache
        from tests.fakes.token_caches import LAYOUTS

        self.layout = LAYOUTS["hybrid"]
        self.cache = SegmentCache(1 << 30)
        store = DiskStore(folder)
        store.open()
        assert store.is_writer, "the lock has not gone with the process that held it"
        store.sweep()
        self.tier = DiskTier(self.cache, store, "weights")

    def ask(self, ids: list[int]) -> tuple[int, Any]:
        """How much of a prompt is restored, and its row."""
        load = self.tier.ask(ids, 0)
        if load is not None:
            assert self.tier.wait(load, SECONDS), "the disk does not answer"
            self.tier.adopt(load)
        hit = self.cache.find(ids, 0, lambda length: True)
        row = self.layout.fresh()
        if hit is None:
            return 0, row
        row = self.cache.restore(hit, row, len(ids))
        self.layout.check(row, ids[: hit.length])
        hit.release()
        return hit.length, row

    def turn(self, ids: list[int]) -> int:
        """One turn whose reply ends with ``ids``; returns the tokens that were restored."""
        prompt = ids[:-REPLY]
        restored, row = self.ask(prompt)
        self.tier.reading = True
        self.layout.feed(row, [prompt[restored:]])
        self.cache.commit(prompt, 0, row, 0)
        self.tier.reading = False
        self.tier.tick()
        self.layout.feed(row, [ids[-REPLY:]])
        self.cache.commit(ids, 0, row, 0)
        self.tier.tick()
        return restored

    @property
    def is_written(self) -> bool:
        return not self.tier.statistics()["disk_pending_paths"]


def serve(
    folder: Path,
    seed: int,
    number: int,
    places: list[Place],
    durable: set[Place],
    out: Connection,
) -> None:
    """Serve sessions until killed.

    Args:
        places: where each session stands.
        durable: what was reported so before.
        out: takes ("reply", place), ("durable", places) and ("fault", text).
    """
    try:
        _serve(Store(folder), seed, number, places, durable, out)
    except BaseException as error:
        out.send(("fault", f"{type(error).__name__}: {error}"))
        raise


def _serve(
    store: Store,
    seed: int,
    number: int,
    places: list[Place],
    durable: set[Place],
    out: Connection,
) -> None:
    rng = random.Random(f"{seed} {number}")
    waiting: list[Place] = []
    seen: set[int] = set()
    while True:
        session, conversation, turns = places[rng.randrange(len(places))]
        if turns == TURNS:
            conversation, turns = conversation + 1, 0
        place = session, conversation, turns + 1
        restored = store.turn(path_of(seed, place))
        before = session, conversation, turns
        if session not in seen and before in durable:
            wanted = len(path_of(seed, before))
            assert restored >= wanted, f"{before}: {restored} of {wanted} tokens"
        seen.add(session)
        places[session] = place
        waiting.append(place)
        out.send(("reply", place))
        if rng.random() < PAUSES:
            store.tier.writer.flush(SECONDS)
        if store.is_written:
            out.send(("durable", waiting))
            waiting = []


def verify(folder: Path, seed: int, durable: set[Place], out: Connection) -> None:
    """Ask for all that was reported durable, from an empty cache."""
    try:
        store, tokens = Store(folder), 0
        for place in sorted(durable):
            ids = path_of(seed, place)
            store.cache.clear()
            restored, _ = store.ask([*ids, 0])
            assert restored >= len(ids), f"{place}: {restored} of {len(ids)} tokens"
            tokens += restored
        out.send(("verified", tokens))
        store.tier.close()
    except BaseException as error:
        out.send(("fault", f"{type(error).__name__}: {error}"))
        raise


# -- who kills ---------------------------------------------------------------------------
@dataclass
class Found:
    """What was counted; ``served`` are processes that gave a reply before their end."""

    kills: int = 0
    served: int = 0
    at_start: int = 0
    replies: int = 0
    durable: set[Place] = field(default_factory=set)
    verified_tokens: int = 0
    stray_files: int = 0


def processes() -> Any:
    """Processes that begin with everything imported, where the system forks safely."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    return context


class Killer:
    """Starts processes on a folder and kills them.

    Args:
        seed: gives what the sessions say and where the kills come, as far as a clock lets it.
    """

    def __init__(self, folder: Path, sessions: int, seed: int):
        self.folder, self.seed = folder, seed
        self.places: list[Place] = [(session, 0, 0) for session in range(sessions)]
        self.found = Found()
        self._rng = random.Random(seed)
        self._context = processes()

    def kill_one(self) -> None:
        """One process from start to kill."""
        number, found = self.found.kills, self.found
        more = (number, list(self.places), set(found.durable))
        process, events = self._start(serve, *more)
        replies = found.replies
        for _ in range(self._rng.randrange(MOST_EVENTS)):
            self._take(events, SECONDS)
        # The start of a process takes longer than a moment: some never come to serve.
        time.sleep(self._rng.random() * MOMENT)
        process.kill()
        process.join(SECONDS)
        while self._take(events, 0.0):
            pass
        events.close()
        found.kills += 1
        found.served += found.replies > replies
        found.at_start += found.replies == replies
        found.stray_files += self._strays()

    def verify(self) -> None:
        """A process that is not killed asks for all that was durable."""
        process, events = self._start(verify, set(self.found.durable))
        assert self._take(events, 10 * SECONDS), "it ended without a word"
        process.join(SECONDS)
        events.close()

    def _start(self, what: Callable[..., None], *arguments: Any) -> Any:
        events, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=what, args=(self.folder, self.seed, *arguments, theirs), daemon=True
        )
        process.start()
        theirs.close()
        return process, events

    def _take(self, events: Connection, seconds: float) -> bool:
        """Take one event; False where there is none.

        Raises:
            AssertionError: a fault was reported, or nothing in all this time.
        """
        try:
            if not events.poll(seconds):
                assert not seconds, f"nothing was served in {seconds:.0f} s"
                return False
            kind, content = events.recv()
        except (EOFError, OSError):
            return False
        assert kind != "fault", f"after {self.found.kills} kills: {content}"
        if kind == "reply":
            self.places[content[0]] = content
            self.found.replies += 1
        elif kind == "durable":
            self.found.durable |= set(content)
        else:
            self.found.verified_tokens += content
        return True

    def _strays(self) -> int:
        """Files that were being written."""
        place = self.folder / "entries"
        return len(list(place.glob("*.part"))) if place.exists() else 0


def run(
    folder: Path,
    kills: int,
    sessions: int,
    seed: int,
    advance: Callable[[], None] = lambda: None,
) -> Found:
    """Kill so many processes, one after the other, and verify at the end.

    Raises:
        AssertionError: something wrong was restored, or something durable is missing.
    """
    killer = Killer(folder, sessions, seed)
    for _ in range(kills):
        killer.kill_one()
        advance()
    killer.verify()
    return killer.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=8, help="of the small process")
    parser.add_argument("--servers", type=int, default=0, help="kills of whole servers")
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    arguments, console = parser.parse_args(), Console()
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        chosen = (arguments.sessions, arguments.seed)
        if arguments.kills:
            task = progress.add_task("kills", total=arguments.kills)
            small = Path(folder) / "small"
            found = run(small, arguments.kills, *chosen, lambda: progress.advance(task))
            console.print(
                f"{found.kills} kills, {found.served} of processes that served, {found.at_start} before the first "
                f"reply; {found.replies} replies, {len(found.durable)} reported durable and there "
                f"({found.verified_tokens} tokens), {found.stray_files} files were being written"
            )
        if arguments.servers:
            from tests.stress import server_kills

            whole = progress.add_task("servers", total=arguments.servers + 1)
            counts = server_kills.run(
                Path(folder),
                arguments.servers,
                *chosen,
                lambda: progress.advance(whole),
            )
            console.print(counts.line())


if __name__ == "__main__":
    main()
