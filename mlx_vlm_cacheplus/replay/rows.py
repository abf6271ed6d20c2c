"""One row a request, and what a list of rows adds up to.

``new`` is a prompt's length less its longest common prefix with any earlier prompt + reply of the server.  The
*re-read ratio* is tokens prefilled / new tokens; 1.00 is the floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

REPORT, TOKENIZER, ESTIMATE = "report", "tokenizer", "estimate"


@dataclass
class Row:
    """One request; tokens and seconds.  ``new_from`` says how ``new`` was found."""

    session: int
    turn: int
    prompt: int
    restored: int
    generated: int
    new: int = 0
    new_from: str = ESTIMATE
    ttft: float | None = None  # request sent to first content, reasoning or tool delta
    decode_seconds: float | None = None  # first to last delta
    seconds: float = 0.0  # request sent to reply complete
    started: float = 0.0  # since the replay began
    finish_reason: str | None = None
    request_id: str | None = None
    text: str = ""  # the whole reply, for comparing two servers
    note: str = ""

    @property
    def prefilled(self) -> int:
        """Prompt tokens that the server computed."""
        return self.prompt - self.restored

    @property
    def reread(self) -> int:
        """Tokens computed although the server had seen them."""
        return max(0, self.prefilled - self.new)

    @property
    def speed(self) -> float | None:
        """Tokens a second after the first."""
        if not self.decode_seconds or self.generated < 2:
            return None
        return (self.generated - 1) / self.decode_seconds

    def as_dict(self) -> dict[str, Any]:
        """Raw row for --json."""
        return {**asdict(self), "prefilled": self.prefilled, "reread": self.reread}


@dataclass(frozen=True)
class Totals:
    """Sums over rows; ``speed`` is weighted by tokens, ``ttft`` is the median."""

    requests: int
    prompt: int
    restored: int
    prefilled: int
    new: int
    generated: int
    reread: int
    ttft: float | None
    speed: float | None
    estimated: bool

    @property
    def ratio(self) -> float | None:
        """Tokens prefilled / new tokens."""
        return self.prefilled / self.new if self.new else None


def total(rows: Sequence[Row]) -> Totals:
    """Add rows up."""
    timed = [row for row in rows if row.speed is not None]
    seconds = sum(row.decode_seconds or 0.0 for row in timed)
    waits = [row.ttft for row in rows if row.ttft is not None]
    return Totals(
        requests=len(rows),
        prompt=sum(row.prompt for row in rows),
        restored=sum(row.restored for row in rows),
        prefilled=sum(row.prefilled for row in rows),
        new=sum(row.new for row in rows),
        generated=sum(row.generated for row in rows),
        reread=sum(row.reread for row in rows),
        ttft=median(waits) if waits else None,
        speed=sum(row.generated - 1 for row in timed) / seconds if seconds else None,
        estimated=any(row.new_from == ESTIMATE for row in rows),
    )
