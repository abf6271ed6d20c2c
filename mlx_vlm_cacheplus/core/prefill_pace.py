"""How much of a prompt is read at once while rows decode: what their gaps have been.

Rows that decode wait for every chunk of somebody else's prompt.  Small chunks keep their
gaps short.  But a chunk has costs of its own, whatever its length, and on some devices
these are most of it: then a larger chunk makes the gap hardly longer and the whole
prompt much faster.  Both are seen from one figure, the time between two rounds with a
chunk in between, which is taken where the rounds have waited for the device anyway.
"""

from __future__ import annotations

from collections import deque
from typing import Any

# Tokens of a chunk where nothing is known, and at the least.
CHUNK_BESIDE_ROWS = 512
# Seconds that rows may wait for a larger one.
LONGEST_GAP = 0.75
# A larger chunk is worth its gap where it reads so many times as many tokens a second.
GAIN = 1.25
# The newest gaps that count, of each size, and how many there must be: the first chunk
# of a size may compile.
NEWEST, ENOUGH = 4, 2


class PrefillPace:
    """Gaps of the running rows, by the size of the chunk that they waited for."""

    def __init__(self) -> None:
        self._gaps: dict[int, deque[float]] = {}
        self._since: float | None = None
        self._size = 0

    def chunk(self, size: int, most: int) -> int:
        """The size of the chunk to read next, in tokens.

        Args:
            size: the smallest.
            most: the largest.
        """
        while 2 * size <= most:
            now, then = self._gap(size), self._gap(2 * size)
            if now is None or 2 * now > LONGEST_GAP and then is None:
                break
            if then is not None and (then > LONGEST_GAP or GAIN * then > 2 * now):
                break
            size *= 2
        return min(size, most)

    def _gap(self, size: int) -> float | None:
        gaps = self._gaps.get(size, ())
        return min(gaps) if len(gaps) >= ENOUGH else None

    def rounds_ended(self, now: float, rows: int) -> None:
        """All running rows have had their round.

        Args:
            now: seconds, of any clock.
            rows: how many there are; those that wait for the next chunk.
        """
        if self._since is not None and self._size:
            gaps = self._gaps.setdefault(self._size, deque(maxlen=NEWEST))
            gaps.append(now - self._since)
        self._since = now if rows else None
        self._size = 0

    def chunk_read(self, tokens: int) -> None:
        """A chunk of so many tokens was read behind the rounds."""
        self._size = tokens


def pace_of(drafter: Any) -> PrefillPace:
    """The gaps beside the rows of this drafter's model; kept on the loaded drafter."""
    pace: PrefillPace | None = vars(drafter).get("prefill_pace")
    if pace is None:
        pace = PrefillPace()
        object.__setattr__(drafter, "prefill_pace", pace)
    return pace
