"""Whether speculative batches are faster together: what their rounds have taken.

A round of a batch waits for the device once, where its walk reads what was accepted.  So
the time from its begin to its end is its cost, and taking it needs no wait of its own.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

# How batches are put together: by measured cost, wherever they can be, or never.
MODE = "MLX_VLM_SPECULATIVE_MERGE"
MODES = ("auto", "always", "never")

# Weight of the newest round in an average.
NEWEST = 0.2
# A round may count as so many times the average: a pause is not the batch's cost.
CEILING = 3.0
# Rounds of one shape before its average counts; the first ones may compile kernels.
ENOUGH = 6
# What was found slower is tried again after so many refusals: lengths and loads change.
RETRY = 512


def check_mode(mode: str) -> str:
    """Pass on how batches are put together.

    Raises:
        ValueError: for a word that is none of ``MODES``.
    """
    if mode not in MODES:
        raise ValueError(f"give one of {', '.join(MODES)}, not {mode!r}")
    return mode


@dataclass
class Average:
    """Moving averages over the rounds of one shape.

    Attributes:
        seconds: of a round; the first is not kept.
        tokens: emitted in a round, by all rows.
        rounds: how many were seen.
    """

    seconds: float = 0.0
    tokens: float = 0.0
    rounds: int = 0

    def add(self, seconds: float, tokens: int) -> None:
        """Enter one round."""
        self.rounds += 1
        if self.rounds <= 2:
            self.seconds, self.tokens = seconds, float(tokens)
            return
        self.seconds += NEWEST * (min(seconds, CEILING * self.seconds) - self.seconds)
        self.tokens += NEWEST * (tokens - self.tokens)


class Pace:
    """What rounds take, by how many rows they verify and how many tokens of each.

    Attributes:
        averages: by (rows, width); width counts the token that a round feeds first.
    """

    def __init__(self) -> None:
        self.averages: dict[tuple[int, int], Average] = {}
        self._newest: dict[int, Average] = {}
        self._refused = itertools.count(1)

    def add(self, rows: int, width: int, seconds: float, tokens: int) -> None:
        """Enter a round of so many rows, each of so many tokens."""
        average = self.averages.setdefault((rows, width), Average())
        average.add(seconds, tokens)
        if average.rounds >= ENOUGH:
            # Widths change with acceptance; the one in use tells what comes next.
            self._newest[rows] = average

    def rate(self, *batches: int) -> float | None:
        """Tokens per second of batches of so many rows that take turns; None if unknown."""
        found = [self._newest.get(rows) for rows in batches]
        known = [average for average in found if average is not None]
        if len(known) < len(batches):
            return None
        return sum(a.tokens for a in known) / sum(a.seconds for a in known)

    def slower_together(self, rows: int, others: int) -> str | None:
        """Why two batches are better apart; None where nothing says so.

        Args:
            rows, others: how many each has.
        """
        together, apart = self.rate(rows + others), self.rate(rows, others)
        if together is None or apart is None or together >= apart:
            return None
        if next(self._refused) % RETRY == 0:
            self._forget(rows + others)
        return (
            f"{rows + others} rows were slower together: {together:.0f} tokens per second"
            f" in place of {apart:.0f}"
        )

    def _forget(self, rows: int) -> None:
        del self._newest[rows]
        for shape in [shape for shape in self.averages if shape[0] == rows]:
            del self.averages[shape]
