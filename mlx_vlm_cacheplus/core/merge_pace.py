"""Whether speculative batches are faster together: what their rounds have taken.

A round of a batch waits for the device once, where its walk reads what was accepted.  So
the time from its begin to its end is its cost, and taking it needs no wait of its own.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections import deque
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

# How batches are put together: by measured cost, wherever they can be, or never.
MODE = "MLX_VLM_DRAFT_MERGE"
MODES = ("auto", "always", "never")

# Weight of the newest round in an average.
NEWEST = 0.2
# What an older round of another width still counts, a round later.
FADING = 0.97
# The quickest of so many newest rounds is what a round costs: the first ones compile, and
# others use the machine.
QUICKEST_OF = 8
# Rounds of so many rows before they count.
ENOUGH = 6
# Slower is what reaches no more than this share of the other way's pace; a smaller
# difference is that of two measurements.
SHARE = 0.9
# What was found slower is tried again after so many refusals: lengths and loads change.
RETRY = 512


def mode() -> str:
    """How batches are put together; by measured cost, where nobody says."""
    return _known(os.environ.get(MODE) or "auto")


@functools.cache
def _known(word: str) -> str:
    """The mode that a word stands for.  Who writes another one does not get the default:
    "off" must not join."""
    try:
        return check_mode(word)
    except ValueError as error:
        logger.warning("%s: %s; batches take turns", MODE, error)
        return "never"


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
    """The rounds of one shape.

    Attributes:
        tokens: emitted in a round by all rows, a moving average.
        rounds: how many were seen.
        weight: the same, of late.
        times: what the newest took, in seconds.
    """

    tokens: float = 0.0
    rounds: int = 0
    weight: float = 0.0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=QUICKEST_OF))

    @property
    def seconds(self) -> float:
        """What a round costs."""
        return min(self.times)

    def add(self, seconds: float, tokens: int) -> None:
        """Enter one round."""
        self.rounds += 1
        self.weight += 1
        self.times.append(seconds)
        share = 1.0 if self.rounds == 1 else NEWEST
        self.tokens += share * (tokens - self.tokens)


class Pace:
    """What rounds take, by how many rows they verify and how many tokens of each.

    Widths change with acceptance and where a reply is about to end; a batch's pace is
    that of the widths it had of late.

    Attributes:
        averages: by rows, then by width, which counts the token that a round feeds first.
    """

    def __init__(self) -> None:
        self.averages: dict[int, dict[int, Average]] = {}
        self._refused = itertools.count(1)

    def add(self, rows: int, width: int, seconds: float, tokens: int) -> None:
        """Enter a round of so many rows, each of so many tokens."""
        widths = self.averages.setdefault(rows, {})
        for average in widths.values():
            average.weight *= FADING
        widths.setdefault(width, Average()).add(seconds, tokens)

    def rate(self, *batches: int) -> float | None:
        """Tokens per second of batches of so many rows that take turns; None if unknown."""
        rounds = [self._round(rows) for rows in batches]
        known = [one for one in rounds if one is not None]
        if len(known) < len(batches):
            return None
        return sum(tokens for _, tokens in known) / sum(seconds for seconds, _ in known)

    def _round(self, rows: int) -> tuple[float, float] | None:
        """(seconds, tokens) of a round of so many rows; None before it was seen enough."""
        widths = list(self.averages.get(rows, {}).values())
        if sum(average.rounds for average in widths) < ENOUGH:
            return None
        # The only round of a width may have been the one that compiled.
        widths = [average for average in widths if average.rounds > 1] or widths
        weight = sum(average.weight for average in widths)
        seconds = sum(average.weight * average.seconds for average in widths)
        tokens = sum(average.weight * average.tokens for average in widths)
        return seconds / weight, tokens / weight

    def slower_together(self, rows: int, others: int) -> str | None:
        """Why two batches are better apart; None where nothing says so.

        Args:
            rows, others: how many each has.
        """
        together, apart = self.rate(rows + others), self.rate(rows, others)
        if together is None or apart is None or together > SHARE * apart:
            return None
        if next(self._refused) % RETRY == 0:
            del self.averages[rows + others]
        return (
            f"{rows + others} rows were slower together: {together:.0f} tokens per second"
            f" in place of {apart:.0f}"
        )
