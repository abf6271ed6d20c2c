"""One session with a draft model and the prefix cache, on stock and on plus.

    python -m tests.bench.gpu_drafts --gpu 0 --seconds 300 --out DIR
    python -m tests.bench.gpu_drafts --small --out DIR    # the mechanics, on a CPU

Two models with a drafter each, of real shape and with random weights: a gemma4 whose
layers all have full attention with an EAGLE3 drafter, a Qwen3.5 hybrid with an MTP
drafter.  Replies and acceptance are planted (see ``gpu_chain``), so that every side
writes the same tokens and no sampler is involved.  One process of each model is each
side in turn (see ``gpu_switch``):

    no cache + drafter      stock, what its users with a drafter have without a cache
    stock 40 GB             stock's prefix cache, no drafter
    stock 40 GB + drafter   both
    plus 40 GB + drafter    both, with the plugin
    plus 40 GB              the plugin's cache, no drafter; where time is left

Each side plays every prefill shape once before, then the session once from an empty
cache.  The two models load and warm up at the same time and are timed one at a time.
Rows are written after each session.

    python -m tests.bench.gpu_drafts --gpu 0 --twice --plans 8192 \
        --sides stock+drafter,plus+drafter,stock --turns 6 --reply 80 --out DIR

MLX's CUDA back-end makes a plan for each length of keys that several queries meet, which
takes longer than the attention itself (see ``gpu_attention``), and keeps 256 of them.
With ``--twice`` each side plays the whole session before it is timed, so that each such
length has been used, and ``--plans`` lets MLX keep them all.  The first plays are rows
too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.bench import gpu_tables
from tests.bench.gpu_asking import SwitchServer, joined, machine
from tests.bench.gpu_chain import make_chain
from tests.bench.gpu_drafts_report import report
from tests.bench.gpu_inputs import Plan, make_drafted, make_plan
from tests.bench.gpu_pairs import Seat, become, keep_log, place, prepare
from tests.bench.gpu_session import HTTP, Session, note, reset, seen
from tests.bench.gpu_switch import DRAFTER, OFF, PLUS, STOCK

SHAPES = ("gemma7b", "hybrid4b")
SIDES = (OFF + DRAFTER, STOCK, STOCK + DRAFTER, PLUS + DRAFTER, PLUS)
NAMES = {
    side.replace(" 40 GB", "").replace(" ", ""): side for side in SIDES
}  # nocache+drafter, stock, stock+drafter, plus+drafter, plus
# Played once before anything is timed; the others have no prefill shapes of their own
# but those of the first turn.
WARMED = (OFF + DRAFTER, STOCK + DRAFTER, PLUS + DRAFTER)
FIRST = -1  # the round of a play that only makes plans
SHORT = 6  # tokens of a reply that only follows a prefill of interest


class Drafted(Session):
    """One model's server and its rows."""

    def __init__(self, options: argparse.Namespace, shape: str, work: Path):
        o = options
        plan = make_plan(o.turns, o.system, o.user, 2)
        chain = make_chain(o.reply, o.wrong)
        said = Plan(plan.system, plan.users, [chain["text"]] * o.turns)
        self.folder, drafter = make_drafted(shape, work / shape, chain, o.small)
        super().__init__(said, argparse.Namespace(**vars(o), folder=str(self.folder)))
        self.shape, self.work = shape, work
        self.rows = {
            name: [] for name in ("starts", "turns", "memory", "first", "failed")
        }
        self.longest: dict[bool, float] = {}
        words = ("--draft-model", str(drafter), "--draft-block-size", str(o.block))
        home = work / f"{shape}-home"
        server = SwitchServer(str(self.folder), home, False, words)
        server.kernels = str(o.kernels / f"{shape.replace('gemma', 'dense')}-0")
        server.wait_seconds = 240.0
        self.seat = Seat(self, server, home)  # type: ignore[arg-type]
        self.base = self.side = ""

    def save(self) -> None:
        """Write all rows."""
        options = {k: v for k, v in vars(self.options).items() if k != "out"}
        text = gpu_tables.as_json(self.rows, options)
        file = self.options.out / f"{self.shape}-drafts.json"
        file.write_text(text, encoding="utf-8")

    def start(self, stack: ExitStack) -> None:
        """Load it and play every shape once."""
        began = time.monotonic()
        stack.callback(self.seat.server.stop)
        self.seat.server.__enter__()
        up = time.monotonic() - began
        self.base = self.seat.server.base
        # A session that is played before it is timed warms up by itself.
        for side in () if self.options.twice else self.options.sides:
            try:
                self.warm_side(side)
            except Exception as error:
                self.failed(side, "warm-up", error)
        place(self.seat)
        ready = time.monotonic() - began
        around = machine(self.options.gpu or "0")
        self.rows["starts"].append({"up": up, "ready": ready, "before": around})
        self.save()
        note(f"  {self.shape}: up {up:.1f} s, ready {ready:.1f} s")

    def failed(self, side: str, what: str, error: Exception) -> None:
        """Note it and go on with the other sides."""
        traceback.print_exc()
        self.rows["failed"].append({"side": side, "what": what, "error": repr(error)})

    def warm_side(self, side: str) -> None:
        """Compile this side's shapes.

        Stock keeps no replies, so its prompts have the same shapes after short ones.
        """
        become(self.seat, side)
        reset(self.base)
        turns = range(len(self.plan.users)) if side in WARMED else range(2)
        began = time.monotonic()
        for turn in turns:
            most = {} if side.startswith(PLUS) else {"max_tokens": SHORT}
            self.turn("w", self.plan.replies[:turn], **most)
        reset(self.base)
        seen(self.base)
        note(f"  {self.shape}: {side} warm after {time.monotonic() - began:.1f} s")

    def turn(self, marker: str, said: Sequence[str], **more: Any) -> dict[str, Any]:
        """The turn after these replies, greedy."""
        body = {"temperature": 0, "max_tokens": self.options.reply + 8, **more}
        return self.ask(self.base, self.plan.messages(marker, said), **body)

    def played(self, side: str, number: int) -> float:
        """One session from an empty cache; its rows are kept; seconds."""
        become(self.seat, side)
        reset(self.base)
        self.ask(self.base, [{"role": "user", "content": "."}], max_tokens=4)
        reset(self.base)
        seen(self.base)
        before = HTTP.get(f"{self.base}/bench/memory").json()
        said: list[str] = []
        asked = []
        for _ in self.plan.users:
            asked.append(self.turn("a", said))
            said.append(asked[-1]["text"])
        requests = seen(self.base)
        after = HTTP.get(f"{self.base}/bench/memory").json()
        drafted = [request["drafted"] for request in requests]
        rows = joined(asked, requests)
        kept = self.rows["first" if number == FIRST else "turns"]
        for turn, (row, counts) in enumerate(zip(rows, drafted, strict=True), 1):
            lead = {"side": side, "round": number, "turn": turn, "drafted": counts}
            kept.append({**lead, **row})
        if number != FIRST:
            memory = {"before": before["active"], "peak": after["peak"]}
            memory["after"] = after["active"]
            self.rows["memory"].append({"side": side, "round": number, **memory})
        reset(self.base)
        self.save()
        seconds: float = sum(row["seconds"] for row in rows)
        what = "first play" if number == FIRST else f"round {number}"
        note(f"  {self.shape}: {side}: {what}: session {seconds:.2f} s")
        return seconds

    def play(self, sides: Sequence[str], number: int, end: float) -> None:
        """A session of each side, while one more fits."""
        first = self.options.twice and number == 0
        for side in sides:
            began = time.monotonic()
            if began + self.longest.get(first, 0.0) > end:
                note(f"  {self.shape}: no time for {side}, round {number}")
                continue
            try:
                if first:
                    self.played(side, FIRST)
                self.played(side, number)
            except Exception as error:
                self.failed(side, "session", error)
                self.side = ""  # whatever it is now, switch again
            spent = time.monotonic() - began
            self.longest[first] = max(self.longest.get(first, 0.0), spent)
        self.save()


# -- the run ---------------------------------------------------------------------------
def measure(options: argparse.Namespace, work: Path) -> bool:
    """Both models; whether all went well."""
    end = time.monotonic() + options.seconds
    models = [Drafted(options, shape, work) for shape in options.shapes.split(",")]
    with ExitStack() as stack, ThreadPoolExecutor(len(models)) as pool:
        starts = [pool.submit(model.start, stack) for model in models]
        ready = []
        try:
            for model, start in zip(models, starts, strict=True):
                try:
                    start.result()
                    ready.append(model)
                except Exception as error:
                    model.failed("", "start", error)
            for sides in groups(options.sides):
                for number in range(options.rounds):
                    for model in ready:
                        turned = sides if number % 2 == 0 else sides[::-1]
                        model.play(turned, number, end)
        finally:
            for model in models:
                model.save()
                keep_log(model.seat.server, options.out)
    return len(ready) == len(models) and not any(m.rows["failed"] for m in models)


def groups(sides: Sequence[str]) -> list[Sequence[str]]:
    """What all models play before any plays the next; the last may be left out."""
    if sides == SIDES:
        return [SIDES[:-1], SIDES[-1:]]
    drafted = [side for side in sides if side.endswith(DRAFTER)]
    return [drafted, [side for side in sides if side not in drafted]]


def named(words: str) -> Sequence[str]:
    """Sides by their short names."""
    unknown = [word for word in words.split(",") if word not in NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown}: not of {', '.join(NAMES)}")
    return [NAMES[word] for word in words.split(",")]


def parser() -> argparse.ArgumentParser:
    """Arguments; the defaults are those of docs/BENCHMARKS.md."""
    out = argparse.ArgumentParser(prog="gpu_drafts", description=__doc__)
    out.formatter_class = argparse.RawDescriptionHelpFormatter
    out.add_argument("--out", type=Path, required=True, help="folder of the results")
    out.add_argument("--gpu", help="CUDA_VISIBLE_DEVICES of the servers")
    out.add_argument("--seconds", type=float, default=300.0, help="sessions end then")
    out.add_argument("--shapes", default=",".join(SHAPES))
    out.add_argument(
        "--sides", type=named, default=SIDES, help=f"of {', '.join(NAMES)}"
    )
    out.add_argument(
        "--twice", action="store_true", help="time a session that was played before"
    )
    out.add_argument("--rounds", type=int, default=1, help="timed sessions a side")
    out.add_argument("--plans", type=int, help="attention plans that MLX keeps")
    out.add_argument("--turns", type=int, default=9)
    out.add_argument("--system", type=int, default=2500)
    out.add_argument("--user", type=int, default=560)
    out.add_argument("--reply", type=int, default=110, help="tokens, the stop among")
    out.add_argument("--wrong", type=float, default=0.2, help="share of wrong drafts")
    out.add_argument("--block", type=int, default=4, help="--draft-block-size")
    out.add_argument("--kernels", type=Path, help="keeps compiled kernels")
    out.add_argument("--small", action="store_true", help="a short run for a CPU")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables; 0, or 1 where a part failed."""
    words = parser()
    options = words.parse_args(arguments)
    if options.small:
        words.set_defaults(turns=4, system=200, user=60, reply=40)
        options = words.parse_args(arguments)
    prepare(options)
    if options.plans:
        os.environ["MLX_CUDA_SDPA_CACHE_SIZE"] = str(options.plans)
    work = Path(tempfile.mkdtemp(prefix="gpu-drafts-"))
    options.kernels = options.kernels or work / "kernels"
    fine = False
    try:
        fine = measure(options, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        text = report(options.out)
        (options.out / "drafts.md").write_text(text, encoding="utf-8")
        print(text, flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
