"""One reuse record, its log line, and the totals over records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Source = Literal["ram", "disk", "none"]
Finish = Literal["stop", "length", "cancel", "error", "unknown"]


@dataclass(frozen=True)
class Drafter:
    """What is known of the draft model.

    Attributes:
        restored: its part of the restored prefix came from the cache.
        primed: it had read the whole prompt before its first draft, restored or not.
        reason: why it was not; or why it was not restored where the target could have been.
        batching: `merged` where it shared verify steps with other rows, `turns` where others had theirs beside it,
            `alone` where nobody did; None where speculative-merge is off.
        batching_reason: why turns.
    """

    loaded: bool = False
    kind: str | None = None
    restored: bool = False
    primed: bool = False
    reason: str | None = None
    # As stock counts them: rounds are batch-wide, so they are exact for one request at a time.
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    batching: str | None = None
    batching_reason: str | None = None

    @property
    def state(self) -> str:
        """`restored`, `primed` (it read the prompt itself), or `cold`."""
        if self.restored:
            return "restored"
        return "primed" if self.primed else "cold"


@dataclass(frozen=True)
class Shortfall:
    """Tokens that an earlier request had in common and that were not restored, and why."""

    tokens: int
    reason: str


@dataclass(frozen=True)
class ReuseRecord:
    """What one request reused, read and left behind. All counts are tokens; docs/REPORT.md is the reference."""

    id: str
    uid: int
    time: float
    model: str
    endpoint: str | None
    prompt: int
    restored: int
    source: Source
    prefilled: int
    new: int
    generated: int
    committed: int
    reason: str | None
    finish: Finish
    common: int = 0
    divergence: int | None = None
    shortfall: Shortfall | None = None
    error: str | None = None
    drafter: Drafter = field(default_factory=Drafter)

    @property
    def re_read(self) -> int:
        """Prefilled tokens that were not new."""
        return max(0, self.prefilled - self.new)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "re_read": self.re_read}

    def line(self) -> str:
        """One line, key=value, for the log. Free text comes last, in quotes."""
        restored = f"{self.restored} ({self.source})" if self.restored else "0"
        parts = [
            f"cacheplus: request={self.id} prompt={self.prompt} restored={restored}",
            f"prefilled={self.prefilled} new={self.new} generated={self.generated}",
            f"committed={self.committed} finish={self.finish}",
        ]
        if self.drafter.loaded:
            parts.append(
                f"drafter={self.drafter.kind or 'loaded'}:{self.drafter.state}"
            )
            if self.drafter.reason:
                parts.append(f'drafter_reason="{self.drafter.reason}"')
            if self.drafter.batching:
                parts.append(f"batching={self.drafter.batching}")
            if self.drafter.batching_reason:
                parts.append(f'batching_reason="{self.drafter.batching_reason}"')
        if self.reason:
            parts.append(f'not_committed="{self.reason}"')
        if self.shortfall:
            parts.append(
                f'short={self.shortfall.tokens} because="{self.shortfall.reason}"'
            )
        return " ".join(parts)


@dataclass
class Totals:
    """Sums over every record since the server started; they only grow."""

    requests: int = 0
    prompt: int = 0
    restored: int = 0
    prefilled: int = 0
    new: int = 0
    re_read: int = 0
    generated: int = 0
    committed: int = 0
    finish: dict[str, int] = field(default_factory=dict)
    source: dict[str, int] = field(default_factory=dict)

    COUNTS = (
        "prompt",
        "restored",
        "prefilled",
        "new",
        "re_read",
        "generated",
        "committed",
    )

    def add(self, record: ReuseRecord) -> None:
        self.requests += 1
        for name in self.COUNTS:
            setattr(self, name, getattr(self, name) + getattr(record, name))
        self.finish[record.finish] = self.finish.get(record.finish, 0) + 1
        self.source[record.source] = self.source.get(record.source, 0) + 1

    def as_dict(self) -> dict[str, Any]:
        """re_read_ratio is prefilled / new; null while nothing was new."""
        ratio = round(self.prefilled / self.new, 4) if self.new else None
        return {**asdict(self), "re_read_ratio": ratio}
