"""How noisy is a comparison? Tried on rows of one side, where the truth is 1.

    python -m tests.bench.gpu_resample docs/benchmarks/h200-*-sides.json

Two estimators see the same recorded times between tokens: replies one after the other,
as the rounds in these files were asked, and tokens in turn, as rounds of ``gpu_pairs``,
in which each second token is taken for the other side's.  Printed too is what the
recorded rounds themselves say of plus beside stock.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any

from tests.bench.gpu_tables import NO_CACHE, PLUS
from tests.bench.gpu_turns import SKIPPED, estimate, round_log, student

TOKENS, ROUNDS, DRAWN = 24, 22, 2000


def recorded(rows: dict[str, Any]) -> list[list[float]]:
    """Milliseconds between the tokens of each reply, without its ends."""
    replies = [row["ms"] for row in rows["placement"] + rows["turns"]]
    for pair in rows["pairs"]:
        replies += [row["ms"] for row in pair.values() if isinstance(row, dict)]
    return [reply[2:-1] for reply in replies]


def in_turn(replies: Sequence[Sequence[float]], rng: random.Random) -> list[float]:
    """Logarithms of rounds whose sides wrote every second token."""
    out = []
    for reply in replies:
        for begin in range(0, len(reply) - 2 * TOKENS + 1, 2 * TOKENS):
            part = list(reply[begin : begin + 2 * TOKENS])
            first = {"ms": [0.0] * SKIPPED + part[0::2] + [0.0]}
            second = {"ms": [0.0] * SKIPPED + part[1::2] + [0.0]}
            leader = rng.choice("ab")
            follower = "ab".replace(leader, "")
            row = {"leader": leader, leader: first, follower: second}
            out.append(round_log(row, "a", "b", "ms"))
    return out


def one_after_the_other(replies: Sequence[Sequence[float]]) -> list[float]:
    """Logarithms of rounds of whole replies."""
    sums = [sum(reply) / len(reply) for reply in replies]
    return [math.log(a / b) for a, b in zip(sums[::2], sums[1::2], strict=False)]


def lower_bounds(logs: Sequence[float], rng: random.Random) -> list[float]:
    """The lower 95 % bound of many runs of so many rounds, from small to large."""
    out = []
    for _ in range(DRAWN):
        # A sign at random: which side a round favours is chance here.
        drawn = [value * rng.choice((-1, 1)) for value in rng.choices(logs, k=ROUNDS)]
        half = student(ROUNDS - 2) * stdev(drawn) / math.sqrt(ROUNDS)
        out.append(math.exp(fmean(drawn) - half))
    return sorted(out)


def main(files: Sequence[str]) -> int:
    """Print both estimators' noise for each file."""
    for file in files:
        rows = json.loads(Path(file).read_text(encoding="utf-8"))
        replies = recorded(rows)
        ratios = [
            math.log(p[PLUS]["speed"] / p[NO_CACHE]["speed"]) for p in rows["pairs"]
        ]
        rng = random.Random(1)
        print(f"{Path(file).stem}: {len(replies)} replies")
        print(f"- {len(ratios)} rounds of plus beside stock: {estimate(ratios)}")
        for name, logs in (
            ("one after the other", one_after_the_other(replies)),
            ("in turn", in_turn(replies, rng)),
        ):
            bounds = lower_bounds(logs, rng)
            enough = sum(bound >= 0.97 for bound in bounds) / len(bounds)
            print(
                f"- {name}: a round {100 * pstdev(logs):.1f} %; {ROUNDS} rounds: lower "
                f"bound {bounds[DRAWN // 2]:.3f}, in one run of 40 below "
                f"{bounds[DRAWN // 40]:.3f}, at least 0.97 in {100 * enough:.1f} %"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
