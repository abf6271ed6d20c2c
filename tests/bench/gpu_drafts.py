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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench import gpu_run
from tests.bench.gpu_chain import make_chain
from tests.bench.gpu_drafts_report import report
from tests.bench.gpu_inputs import HYBRID, Plan, make_drafted, make_plan
from tests.bench.gpu_sides import Played, measure
from tests.bench.gpu_tables import DRAFTER, NO_CACHE, PLUS, STOCK_40

SIDES = (NO_CACHE + DRAFTER, STOCK_40, STOCK_40 + DRAFTER, PLUS + DRAFTER, PLUS)
NAMES = {
    side.replace(" 40 GB", "").replace(" ", ""): side for side in SIDES
}  # nocache+drafter, stock, stock+drafter, plus+drafter, plus
# Played once before anything is timed; the others have no prefill shapes of their own
# but those of the first turn.
WARMED = (NO_CACHE + DRAFTER, STOCK_40 + DRAFTER, PLUS + DRAFTER)


class Drafted(Played):
    """One model and its drafter."""

    kind = "drafts"

    def __init__(self, options: argparse.Namespace, shape: str, work: Path):
        o = options
        plan = make_plan(o.turns, o.system, o.user, 2)
        chain = make_chain(o.reply, o.wrong)
        said = Plan(plan.system, plan.users, [chain["text"]] * o.turns)
        folder, drafter = make_drafted(shape, work / shape, chain, o.small)
        words = ("--draft-model", str(drafter), "--draft-block-size", str(o.block))
        super().__init__(said, o, folder, work / f"{shape}-home", words)
        self.shape = shape

    def warmed(self, side: str) -> range:
        """All turns, or the first two where the others' shapes are another side's."""
        return range(len(self.plan.users)) if side in WARMED else range(2)

    def turn(self, marker: str, said: Sequence[str], **more: Any) -> dict[str, Any]:
        """The turn after these replies, greedy."""
        body = {"temperature": 0, "max_tokens": self.options.reply + 8, **more}
        return self.ask(self.plan.messages(marker, said), **body)


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


def drafted(options: argparse.Namespace, work: Path) -> bool:
    """Play the session with each model."""
    shapes = options.shapes.split(",")
    models = [Drafted(options, shape, work) for shape in shapes]
    return measure(models, groups(options.sides))


def parser() -> argparse.ArgumentParser:
    """Arguments; the defaults are those of docs/BENCHMARKS.md."""
    out = gpu_run.parser("gpu_drafts", __doc__, 300.0, ["gemma7b", HYBRID])
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
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables; 0, or 1 where a part failed."""
    small = {"turns": 4, "system": 200, "user": 60, "reply": 40}
    options = gpu_run.parse(parser(), arguments, **small)
    if options.plans:
        os.environ["MLX_CUDA_SDPA_CACHE_SIZE"] = str(options.plans)
    return gpu_run.run(options, drafted, report)


if __name__ == "__main__":
    raise SystemExit(main())
