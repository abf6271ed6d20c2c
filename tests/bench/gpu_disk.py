"""The disk tier on a GPU: decoding while it writes, and the first token after a restart.

    python -m tests.bench.gpu_disk --part decode --gpu 0 --seconds 270 --out DIR
    python -m tests.bench.gpu_disk --part restart --gpu 0 --seconds 270 --out DIR
    python -m tests.bench.gpu_disk --small --out DIR     # the mechanics, on a CPU
    python -m tests.bench.gpu_disk --sham --part decode --out DIR   # must give 1

*decode*: two plus servers of each shape, one with the disk tier and one without, write a
free greedy reply to the same new prompt, token by token in turn (see ``gpu_turns``).  The
whole prompt has to be written, and is while the reply is decoded.  Who is which, and who
begins, alternates.  A round begins when nothing waits to be written.  The one with a disk
tier is asked when the other one has its first token: so each reads its prompt alone, and
no time passes between the last of its prompt and its first turn.

What is written is written in both servers' turns.  So a reply has twice the time for it:
about half as many of its tokens meet the writer as would if it were alone, and the shares
that are printed are of replies in turn.  What the writer takes from its own process (the
interpreter, the generation thread's time for copies to the host) is in the ratio; what it
takes from both (memory, the bus, the GPU) makes both slower and is not.  How much that is
says the line on the side without: its own turns while the other one writes, beside those
while it does not.

*restart*: one process of each shape is each side in turn (see ``gpu_switch``): cold, and
stock and plus with a disk tier on a folder that holds all turns but the last.  For each
round a side's cache is closed as with its model and opened again (``gpu_disk_server``)
on a copy of its folder: entries are hard links, as they are never changed, all else is
copied.  They are in the page cache, as after the end of a server; ``--from-medium``
drops them from it first, as after the end of the machine.  Then another conversation of
the same shape is asked, everything is written, and then the last turn comes.  A round
before the timed ones plays all shapes.  The order of the sides alternates.

Rows are written after each round.  Folders are in the temporary folder (``TMPDIR``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.bench import gpu_run
from tests.bench.gpu_asking import HTTP, SMALL, note
from tests.bench.gpu_disk_report import COLD, DISK, SIDES, report
from tests.bench.gpu_disk_server import TWIN
from tests.bench.gpu_inputs import DENSE, HYBRID, Plan, make_plan
from tests.bench.gpu_pairs import EACH, Pair, Seat, started
from tests.bench.gpu_run import SwitchServer
from tests.bench.gpu_sides import FIRST, SHORT
from tests.bench.gpu_tables import PLUS, join_seen

WRITTEN_SECONDS = 60.0
PARTS = {"decode": ("decode",), "restart": ("restart",)}
PARTS["both"] = ("decode", "restart")


class DiskServer(SwitchServer):
    """One whose sides can have a disk tier."""

    module = "tests.bench.gpu_disk_server"


class DiskSeat(Seat):
    """A server, and what its cache says of itself."""

    def __init__(self, plan: Plan, options: argparse.Namespace, *paths: Path):
        super().__init__(plan, options, *paths)
        folder, home = paths
        self.server = DiskServer(str(folder), home, False, (), 240.0)

    def reply(self, number: int) -> dict[str, Any]:
        """A free greedy reply to a prompt that nobody has asked."""
        messages = self.plan.messages(f"{number:05d}", [])
        return self.ask(messages, max_tokens=self.options.pair_tokens)

    def stats(self) -> dict[str, Any]:
        """The cache's numbers."""
        answer = HTTP.get(f"{self.base}/v1/cache/stats").raise_for_status().json()
        return {k: v for k, v in answer.items() if isinstance(v, int | float)}

    def written(self) -> dict[str, Any]:
        """Wait until nothing waits to be written; the cache's numbers then."""
        began = time.monotonic()
        while True:
            now = self.stats()
            if not now.get("disk_pending_paths") and not now.get("disk_pending_bytes"):
                return {**now, "waited": time.monotonic() - began}
            if time.monotonic() - began > WRITTEN_SECONDS:
                raise TimeoutError(f"{self.side}: not written: {now}")
            time.sleep(0.02)

    def restart(self, side: str, folder: Path) -> dict[str, Any]:
        """Become a side as after a start on this folder."""
        query = {"side": side, "folder": str(folder)}
        return self._switched("restart", side, query)

    def leave(self) -> dict[str, Any]:
        """End this side, and be the cold one."""
        return self._switched("leave", COLD, {})

    def _switched(self, route: str, side: str, query: dict[str, str]) -> dict[str, Any]:
        self.side = ""  # until it is known
        answer: dict[str, Any] = self.get(route, **query)
        if "error" in answer:
            raise RuntimeError(f"no {route} to {side}: {answer['error']}")
        self.side = side
        return answer


class DiskPair(Pair):
    """The servers of a shape: two that decode, the first of which restarts."""

    seat, overtime, kind = DiskSeat, 0.0, "decode"

    def __init__(self, options: argparse.Namespace, shape: str, work: Path):
        super().__init__(options, shape, work)
        self.sides = (PLUS, options.other)
        self.count = 2 if "decode" in PARTS[options.part] else 1
        self.first = 0.0  # seconds to a first token, the shortest

    def save(self) -> None:
        """Write all rows."""
        if self.count == 2:
            super().save()

    def plan(self) -> Plan:
        """What is asked in the rounds of decoding."""
        return make_plan(1, self.options.prompt, 60, 60)

    def _warm_up(self, seat: Any) -> None:
        began = time.monotonic()
        up = seat.up()
        # Each side twice: the first reply opens the tier, the second finds it open.
        for number, side in enumerate(self.sides if self.count == 2 else ()):
            seat.become(side)
            for again in range(2):
                seat.reply(90_000 + 10 * number + again)
                seat.written()
        seat.seen()
        start: dict[str, Any] = {"up": up, "place": seat.place()}
        start["files"] = file_system(seat.server.home)
        start |= {"ready": time.monotonic() - began, "before": seat.machine()}
        self.rows["starts"].append(start)
        note(f"  {self.shape}: up {up:.1f} s, ready {start['ready']:.1f} s")

    def round(self, number: int) -> dict[str, Any]:
        """Both replies in turn, and what the one with a disk tier wrote."""
        writer = self.seats[1 - number // EACH % 2]
        writer.become(self.sides[1])
        before = writer.stats()
        out = super().round(number)
        return {**out, "number": number, "before": before, "written": writer.written()}

    def ask(self, seat: Any, number: int) -> dict[str, Any]:
        """One reply, its turns, and what waited to be written at each."""
        late = seat.side == self.sides[1]
        if late:
            time.sleep(1.25 * self.first + 0.02)
        row = seat.reply(number)
        (request,) = seat.seen()
        counts = {name: row[name] for name in ("prompt", "restored", "generated")}
        ids = sha256(repr([request["prompt"], request["reply"]]).encode()).hexdigest()
        # By the server's clock: the client's holds the wait for the other's first token.
        first = request["times"][0] - request["arrived"]
        if not late:
            self.first = min(self.first or first, first)
        own = {"ids": ids[:12], "first": first, "disk": request["disk"]}
        return {**counts, **own, **request["turns"]}


class Restarts:
    """The rounds of restarts of one shape, on one server; owns their rows file."""

    def __init__(self, pair: DiskPair):
        self.options, self.shape, self.work = pair.options, pair.shape, pair.work
        self.seat: Any = pair.seats[0]
        self.rows: dict[str, list[Any]] = {"starts": pair.rows["starts"][:1]}
        self.rows |= {name: [] for name in ("filled", "first", "turns", "failed")}
        self.said: list[str] = []

    def save(self) -> None:
        """Write all rows."""
        gpu_run.save(self.options, self.shape, "restart", self.rows)

    def folder(self, side: str, what: str) -> Path:
        return self.work / f"{self.shape}-{side.split()[0]}-{what}"

    def play(self, end: float) -> None:
        """Fill both folders, then rounds while one more fits before ``end``."""
        o = self.options
        self.seat.get("sit")  # no turns are taken any more
        self.seat.plan = make_plan(o.turns, o.system, o.user, o.reply)
        if not all(self.fill(side, end) for side in SIDES[1:]):
            note(f"  {self.shape}: no time to fill the folders")
            return
        longest = 0.0
        for number in range(FIRST, o.rounds):
            if time.monotonic() + longest > end:
                note(f"  {self.shape}: no time for restarts of round {number}")
                break
            began = time.monotonic()
            rows = [self.last_turn(side, number) for side in self.order(number)]
            self.rows["first" if number == FIRST else "turns"] += rows
            self.save()
            if number > FIRST:
                longest = max(longest, time.monotonic() - began)
            note(f"  {self.shape}: restarts, round {number}: {brief(rows)}")

    @staticmethod
    def order(number: int) -> Sequence[str]:
        return SIDES[:: -1 if number % 2 else 1]

    def fill(self, side: str, end: float) -> bool:
        """Play all turns but the last on a new folder, and end the side.

        Returns False where there was no time to.
        """
        seat, began, texts = self.seat, time.monotonic(), list[str]()
        seat.restart(side, self.folder(side, "filled"))
        rows = []
        for _ in seat.plan.users[:-1]:
            if time.monotonic() > end:
                return False
            rows.append(seat.turn("a", texts))
            texts.append(rows[-1]["text"])
        join_seen(rows, seat.seen())
        stats = seat.written()
        left = seat.leave()
        if self.said not in ([], texts):
            raise RuntimeError("the sides' replies have other texts")
        self.said = texts
        for row in rows:
            row["side"] = side
        seconds = time.monotonic() - began
        about = {"closed": left["closed"], "seconds": seconds, "stats": stats}
        about["size"] = size(self.folder(side, "filled"))
        self.rows["filled"].append({"side": side, **about, "turns": rows})
        self.save()
        note(
            f"  {self.shape}: {side} filled in {seconds:.1f} s, "
            f"{about['size'] / 1e9:.3f} GB"
        )
        return True

    def last_turn(self, side: str, number: int) -> dict[str, Any]:
        """The last turn after a restart."""
        seat, opened = self.seat, dict[str, Any]()
        folder = self.folder(side, f"round{number}")
        if side == COLD:
            seat.become(COLD)
        else:
            shutil.copytree(self.folder(side, "filled"), folder, copy_function=link)
            if self.options.from_medium:
                drop(folder)
            opened = seat.restart(side, folder)
        seat.turn("b", self.said, max_tokens=SHORT)
        before = seat.written()
        seat.seen()
        row = seat.turn("a", self.said)
        after = seat.stats()
        join_seen([row], seat.seen())
        if side != COLD:
            seat.leave()
            shutil.rmtree(folder)
        about = {"opened": opened.get("opened"), "before": before, "after": after}
        return {"side": side, "round": number, "turn": 1, **row, **about}


# -- folders ---------------------------------------------------------------------------
def link(source: str, target: str) -> None:
    """Entries are never changed: another name is a copy."""
    if source.endswith(".safetensors"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def drop(folder: Path) -> None:
    """Have all files read from the medium."""
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            opened = os.open(file, os.O_RDONLY)
            with contextlib.suppress(OSError):
                os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(opened)


def size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def file_system(folder: Path) -> list[str]:
    """Device and type of the file system that a folder is on, and free bytes."""
    best = ["", "", "?"]
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        device, place, kind = line.split()[:3]
        inside = folder.resolve().is_relative_to(place)
        if inside and len(place) >= len(best[1]):
            best = [device, place, kind]
    return [*best, str(shutil.disk_usage(folder).free)]


def brief(rows: Sequence[dict[str, Any]]) -> str:
    return ", ".join(
        f"{row['side']} {1000 * row['ttft']:.0f} ms ({row['prefilled']} read)"
        for row in rows
    )


# -- the run ---------------------------------------------------------------------------
def measure(options: argparse.Namespace, work: Path) -> bool:
    """All shapes and parts; whether all went well."""
    end = time.monotonic() + options.seconds
    pairs = [DiskPair(options, shape, work) for shape in options.shapes.split(",")]
    # Servers end before the pool does, so that an end from outside waits for none.
    with ThreadPoolExecutor(len(pairs)) as pool, ExitStack() as stack:
        ready = started(pairs, stack, pool)
        fine = len(ready) == len(pairs)
        for pair in pairs:
            if pair not in ready:
                keep_logs(pair)
        jobs = [(part, pair) for part in PARTS[options.part] for pair in ready]
        for number, (part, pair) in enumerate(jobs):
            # What is left of the time is shared by the jobs that wait.
            now = time.monotonic()
            until = now + max(0.0, end - now) / (len(jobs) - number)
            fine &= played(part, pair, until)
    return fine


def played(part: str, pair: DiskPair, until: float) -> bool:
    """Do one part with one shape; whether it went well."""
    restarts = Restarts(pair) if part == "restart" else None
    try:
        if restarts is None:
            pair.play(pair.options.pairs, until)
        else:
            restarts.play(until)
    except Exception as error:
        traceback.print_exc()
        if restarts is not None:
            restarts.rows["failed"].append(repr(error))
        return False
    finally:
        (pair if restarts is None else restarts).save()
        keep_logs(pair)
    return True


def keep_logs(pair: DiskPair) -> None:
    for seat in pair.seats:
        seat.keep_log()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the figures; 0, or 1 where a part failed."""
    words = gpu_run.parser("gpu_disk", __doc__, 270.0, [DENSE, HYBRID])
    words.add_argument("--part", choices=PARTS, default="both")
    words.add_argument("--pairs", type=int, default=24, help="rounds of decoding")
    words.add_argument("--pair-tokens", type=int, default=48, help="a reply in turn")
    words.add_argument("--prompt", type=int, default=2000, help="what is to be written")
    words.add_argument("--rounds", type=int, default=5, help="rounds of restarts")
    words.add_argument("--turns", type=int, default=12, help="of the restarted session")
    words.add_argument("--system", type=int, default=2000)
    words.add_argument("--user", type=int, default=480)
    words.add_argument("--reply", type=int, default=60)
    words.add_argument("--from-medium", action="store_true", help="no page cache")
    words.add_argument(
        "--sham", action="store_true", help="decode: no disk tier either"
    )
    small = {"pairs": 8, "pair_tokens": 24, "prompt": 400, "rounds": 2}
    options = gpu_run.parse(words, arguments, **SMALL, **small)
    options.other = PLUS + (TWIN if options.sham else DISK)
    return gpu_run.run(options, measure, lambda out: report(out, options.other))


if __name__ == "__main__":
    raise SystemExit(main())
