"""The ratio of paired rounds, and how sure it is.

A round asks both sides once, one right after the other, in one server process; a start
is one process.  What slows a process slows both sides of its rounds, so a round's ratio
is free of it, but rounds of one start may still have more in common than rounds of two.
Two intervals are given: over all rounds, and over the means of the starts, which holds
whatever the rounds of a start share.  Both are of the mean logarithm, by Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

# 97.5 % quantiles of Student's t by degrees of freedom.
FREEDOM = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 30, 60, 120)
QUANTILES: tuple[float, ...] = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
)
QUANTILES += (2.179, 2.131, 2.086, 2.042, 2.0, 1.98)
STUDENT = dict(zip(FREEDOM, QUANTILES, strict=True))
FEW = 3  # starts below which their interval is not said


@dataclass(frozen=True)
class Estimate:
    """A mean ratio and its 95 % interval."""

    ratio: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"x {self.ratio:.4f}, 95 % {self.low:.4f} to {self.high:.4f}"


def student(freedom: int) -> float:
    """The quantile; between two entries the wider one."""
    return STUDENT[max(known for known in STUDENT if known <= freedom)]


def estimate(logs: Sequence[float]) -> Estimate:
    """Of logarithms that are independent of each other; raises below two."""
    middle = fmean(logs)
    half = student(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    low, high = math.exp(middle - half), math.exp(middle + half)
    return Estimate(math.exp(middle), low, high, len(logs))


@dataclass(frozen=True)
class Comparison:
    """Rounds of one side beside another.

    Attributes:
        rounds: interval over all rounds.
        starts: interval over the means of the starts, None below three of them.
        means: each start's mean ratio.
        noise: standard deviation of a round's logarithm within its start.
    """

    rounds: Estimate
    starts: Estimate | None
    means: tuple[float, ...]
    noise: float

    @property
    def low(self) -> float:
        """The lower 95 % bound: the lower one of the two."""
        return min(self.rounds.low, self.starts.low if self.starts else math.inf)


def compare(
    rounds: Sequence[Mapping[str, Any]], side: str, beside: str, name: str = "speed"
) -> Comparison:
    """Rows with a ``start`` and both sides, each with ``name``; larger is better."""
    by_start: dict[Any, list[float]] = {}
    for row in rounds:
        ratio = row[side][name] / row[beside][name]
        by_start.setdefault(row["start"], []).append(math.log(ratio))
    logs = [value for values in by_start.values() for value in values]
    means = [fmean(values) for values in by_start.values()]
    left = [
        (value - fmean(values)) ** 2 for values in by_start.values() for value in values
    ]
    freedom = max(1, len(logs) - len(means))
    return Comparison(
        rounds=estimate(logs),
        starts=estimate(means) if len(means) >= FEW else None,
        means=tuple(math.exp(mean) for mean in means),
        noise=math.sqrt(sum(left) / freedom),
    )
