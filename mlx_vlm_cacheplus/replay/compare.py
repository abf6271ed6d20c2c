"""The same session on stock and on stock with the plugin, one resident server at a time.

Rounds alternate the order.  A ratio between the sides is given only when both processed the same work: the same
number of requests, and in each the same number of prompt and of generated tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import client
from .rows import ESTIMATE, Row, Totals, total
from .session import Session
from .tokens import NewCounter, Renderer

STOCK, PLUS = "stock", "plus"


class UnequalWork(ValueError):
    """The sides did different work; the message names the first turn that differs."""


@dataclass
class Comparison:
    """Raw rows of both sides, round after round."""

    name: str
    rows: dict[str, list[list[Row]]] = field(
        default_factory=lambda: {STOCK: [], PLUS: []}
    )

    def side(self, label: str) -> list[Row]:
        """All rows of one side, in the order of rounds, sessions and turns."""
        return [
            row
            for rows in self.rows[label]
            for row in sorted(rows, key=lambda row: (row.session, row.turn))
        ]

    def totals(self, label: str) -> Totals:
        return total(self.side(label))

    def as_json(self) -> str:
        """Everything that was measured."""
        sides = {
            label: [[row.as_dict() for row in rows] for rows in rounds]
            for label, rounds in self.rows.items()
        }
        return (
            json.dumps({"name": self.name, **sides}, indent=1, ensure_ascii=False)
            + "\n"
        )


def order(rounds: int) -> Iterator[str]:
    """stock, plus, plus, stock, stock, plus ...: each round starts with the side that ended the one before."""
    for number in range(rounds):
        yield from (STOCK, PLUS) if number % 2 == 0 else (PLUS, STOCK)


def measure(
    session: Session,
    options: client.Options,
    renderer: Renderer | None,
    on_row: Callable[[Row], None] | None = None,
    warm: bool = False,
) -> list[Row]:
    """Rows of one session on one server.

    warm: replay it once before, with another marker, so that every shape is compiled when it is timed. The first prompt
    then shares the template's opening with an earlier one, and has that many fewer new tokens.
    """
    if warm:
        client.run(session, replace(options, marker="warm-up"))
    return client.run(session, options, NewCounter(renderer), on_row).rows


def check_equal_work(stock: Sequence[Row], plus: Sequence[Row]) -> None:
    """Raise UnequalWork unless both sides processed the same numbers of tokens in each request."""
    if len(stock) != len(plus):
        raise UnequalWork(f"stock answered {len(stock)} requests, plus {len(plus)}")
    for left, right in zip(stock, plus, strict=False):
        for what in ("prompt", "generated"):
            ours, theirs = getattr(left, what), getattr(right, what)
            if ours != theirs:
                place = f"session {left.session}, turn {left.turn}"
                raise UnequalWork(
                    f"{place}: {what} tokens differ, stock {ours}, plus {theirs}"
                )


def prefilled_ratio(stock: Sequence[Row], plus: Sequence[Row]) -> float:
    """Tokens prefilled by stock / by plus; UnequalWork when that would compare different work."""
    check_equal_work(stock, plus)
    return total(stock).prefilled / max(1, total(plus).prefilled)


def share_new(stock: Sequence[Row], plus: Sequence[Row]) -> None:
    """What is new in a prompt does not depend on the side: take the better known figure for both."""
    check_equal_work(stock, plus)
    for left, right in zip(stock, plus, strict=False):
        if left.text != right.text or left.new_from == right.new_from:
            continue
        if left.new_from == ESTIMATE:
            left.new, left.new_from, left.note = right.new, right.new_from, ""
        elif right.new_from == ESTIMATE:
            right.new, right.new_from, right.note = left.new, left.new_from, ""


def differing_replies(stock: Sequence[Row], plus: Sequence[Row]) -> list[str]:
    """Where the two sides wrote something else, as session and turn."""
    pairs = zip(stock, plus, strict=False)
    return [f"session {a.session}, turn {a.turn}" for a, b in pairs if a.text != b.text]


def rereads(rows: Sequence[Row], slack: int) -> list[str]:
    """Turns that computed more than their new tokens and ``slack``."""
    return [
        f"turn {row.turn}: {row.prefilled} prefilled, {row.new} new"
        for row in rows
        if row.prefilled > row.new + slack
    ]


@dataclass(frozen=True)
class Verdict:
    """Whether the claim is met, in one line of plain words with figures, and why not."""

    met: bool
    line: str
    reasons: tuple[str, ...] = ()


def judge(comparison: Comparison, slack: int) -> Verdict:
    """The claim: equal replies, plus computes at most new + slack tokens a turn, and fewer than stock."""
    stock, plus = comparison.side(STOCK), comparison.side(PLUS)
    other = differing_replies(stock, plus)
    reasons = [f"the replies differ: {', '.join(other)}"] if other else []
    try:
        share_new(stock, plus)
        ratio = prefilled_ratio(stock, plus)
    except UnequalWork as error:
        return Verdict(
            False, f"{comparison.name}: no comparison, {error}", tuple(reasons)
        )
    again = rereads(plus, slack)
    if again:
        reasons.append(f"plus reads again: {'; '.join(again)}")
    ours, theirs = total(stock), total(plus)
    if theirs.prefilled >= ours.prefilled:
        reasons.append(
            f"plus prefilled {theirs.prefilled} tokens, stock {ours.prefilled}"
        )
    line = (
        f"{comparison.name}: {_new(theirs)} of {theirs.prompt} prompt tokens were new. "
        f"Stock prefilled {_read(ours)}, plus {_read(theirs)}: "
        f"stock {ratio:.2f} times as many. "
        f"{len(plus) - len(other)} of {len(plus)} replies are identical."
    )
    return Verdict(not reasons, line, tuple(reasons))


def _new(sums: Totals) -> str:
    return f"{'~' if sums.estimated else ''}{sums.new}"


def _read(sums: Totals) -> str:
    mark = "~" if sums.estimated else ""
    ratio = f"re-read ratio {mark}{sums.ratio or 0:.2f}"
    return f"{sums.prefilled}, {mark}{sums.reread} of them again ({ratio})"


def write(path: str | Path, comparisons: Sequence[Comparison]) -> None:
    """Raw rows of all comparisons as a JSON list."""
    parts = ",\n".join(comparison.as_json().rstrip("\n") for comparison in comparisons)
    Path(path).write_text(f"[\n{parts}\n]\n", encoding="utf-8")
