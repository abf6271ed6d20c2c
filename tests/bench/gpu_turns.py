"""Two servers that decode in turn, one token each, and what the turns say.

The speed of one core here changes by up to a factor of two within tenths of a second,
and keeps each value for some tens of tokens.  Two replies one after the other hardly
ever meet the same speed: their ratio has a noise of 20 %.  Two neighbouring tokens do.

So both servers write at the same time, with their generation threads on the same core,
and each waits after each token until the other has written one.  The clock runs from
getting the turn to passing it on.  What a server launched on the GPU may still run in
the other's turn; as decoding waits for launches here, that is little, and it is the same
for both.  Which server is which side, and who begins, changes from round to round.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

FIRST_SECONDS, NEXT_SECONDS = 60.0, 5.0
SKIPPED = 2  # tokens whose turns hold the start of the reply


class Turns:
    """The server's part: waits in the generation thread; pipes carry the turn."""

    def __init__(self) -> None:
        self.mine = self.other = -1
        self.leads = False

    def sit(self, mine: str = "", other: str = "", leads: int = 0) -> dict[str, Any]:
        """Take turns from the next request on, through these two named pipes.

        ``leads``: whether this server writes the first token of its reply but one
        first.  Without pipes it stops taking turns.
        """
        for old in (self.mine, self.other):
            if old >= 0:
                os.close(old)
        self.mine = os.open(mine, os.O_RDWR) if mine else -1
        self.other = os.open(other, os.O_RDWR) if other else -1
        self.leads = bool(leads)
        while self.mine >= 0 and select.select([self.mine], [], [], 0)[0]:
            os.read(self.mine, 4096)
        return {"seated": self.mine >= 0}

    def after(self, said: int, most: int) -> tuple[float, float]:
        """Pass the turn on after this many tokens, wait for it.

        Returns the clock and the thread's CPU time (seconds) when it came back; zeros
        where it did not, and then this reply goes on without turns.
        """
        if self.mine >= 0:
            if said > 1 or not self.leads:
                os.write(self.other, b".")
            if said < most:
                limit = FIRST_SECONDS if said == 1 else NEXT_SECONDS
                if select.select([self.mine], [], [], limit)[0]:
                    os.read(self.mine, 1)
                else:
                    self.mine = -1
                    return 0.0, 0.0
        return time.perf_counter(), time.thread_time()


def turn_times(request: Mapping[str, Any]) -> dict[str, list[float]]:
    """Milliseconds of each turn after the first token, by the clock and of CPU."""
    out = {}
    for name, ends, begins in (
        ("ms", request["times"], [b[0] for b in request["began"]]),
        ("cpu", request["cpu"], [b[1] for b in request["began"]]),
    ):
        turns = zip(ends[1:], begins, strict=False)
        out[name] = [round(1000 * (end - began), 3) for end, began in turns]
    return out


# -- the ratio, and how sure it is -----------------------------------------------------
# 97.5 % quantiles of Student's t by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}
STUDENT |= {8: 2.306, 9: 2.262, 10: 2.228, 12: 2.179, 15: 2.131, 20: 2.086}
STUDENT |= {30: 2.042, 60: 2.0, 120: 1.98}


def student(freedom: int) -> float:
    """The quantile; between two entries the wider one."""
    return STUDENT[max(known for known in STUDENT if known <= freedom)]


@dataclass(frozen=True)
class Estimate:
    """A mean ratio and its 95 % interval."""

    ratio: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"x {self.ratio:.4f}, 95 % {self.low:.4f} to {self.high:.4f}"


def around(middle: float, half: float, count: int) -> Estimate:
    """From logarithms: the mean and half the interval's width."""
    low, high = math.exp(middle - half), math.exp(middle + half)
    return Estimate(math.exp(middle), low, high, count)


def estimate(logs: Sequence[float]) -> Estimate:
    """Of logarithms that are independent of each other; raises below two."""
    half = student(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return around(fmean(logs), half, len(logs))


def differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Logarithms of each turn of ``second`` beside the two of ``first`` around it."""
    logs = [math.log(value) for value in first]
    return [
        math.log(value) - (logs[i] + logs[i + 1]) / 2
        for i, value in enumerate(second[: len(logs) - 1])
    ]


def round_log(row: Mapping[str, Any], side: str, beside: str, name: str) -> float:
    """Logarithm of how much faster ``side`` wrote a token; the median of the round.

    The last turn is left out: it holds the end of the reply.
    """
    leads = row["leader"] == side
    first, second = (side, beside) if leads else (beside, side)
    turns = [row[s][name][SKIPPED:-1] for s in (first, second)]
    slower = median(differences(*turns))
    return slower if leads else -slower


def crossed(rows: Sequence[Mapping[str, Any]], values: Sequence[float]) -> Estimate:
    """The ratio, free of how the two servers differ.

    Rounds come in two kinds, by which server is which side.  Each kind has its own
    mean, their mean is the result, and the noise is that within the kinds.  Raises
    where a kind has fewer than two rounds.
    """
    kinds: dict[Any, list[float]] = {}
    for row, value in zip(rows, values, strict=True):
        kinds.setdefault(row["seat"], []).append(value)
    if len(kinds) != 2 or min(map(len, kinds.values())) < 2:
        raise ValueError("each server must be each side at least twice")
    means = {kind: fmean(same) for kind, same in kinds.items()}
    freedom = len(values) - 2
    left = sum((v - means[k]) ** 2 for k, same in kinds.items() for v in same)
    share = sum(1 / len(same) for same in kinds.values()) / 4
    half = student(freedom) * math.sqrt(left / freedom * share)
    return around(fmean(means.values()), half, len(values))


def endings(rows: Sequence[Mapping[str, Any]], side: str) -> list[float]:
    """How much longer the last turn is than the others (ms), where the side leads.

    The one that writes second may wait there for what the other left on the GPU.
    """
    return [
        row[side]["ms"][-1] - median(row[side]["ms"][SKIPPED:-1])
        for row in rows
        if row["leader"] == side
    ]
