"""Rows and totals as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .rows import ESTIMATE, Row, Totals, total

_COLUMNS = (
    "prompt",
    "restored",
    "prefilled",
    "new",
    "generated",
    "TTFT s",
    "tok/s",
    "re-read",
)


def console() -> Console:
    """Standard output; wide enough for every column when it is not a terminal."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=110)


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def speed(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def ratio(prefilled: int, new: int, estimated: bool = False) -> str:
    """Re-read ratio, marked with ~ when ``new`` is an estimate."""
    mark = "~" if estimated else ""
    return f"{mark}{prefilled / new:.2f}" if new else "-"


def rows_table(rows: Sequence[Row], title: str = "") -> Table:
    """One line a turn and one in total; a session column when there are several."""
    several = len({row.session for row in rows}) > 1
    table = Table(
        title=title or None, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    if several:
        table.add_column("session", justify="right")
    for name in ("turn", *_COLUMNS):
        table.add_column(name, justify="right")
    for row in sorted(rows, key=lambda row: (row.session, row.turn)):
        lead = [str(row.session)] if several else []
        table.add_row(*lead, str(row.turn), *_cells(row))
    sums = total(rows)
    table.add_section()
    table.add_row(
        *(["all"] if several else []), "total", *_total_cells(sums), style="bold"
    )
    return table


def _cells(row: Row) -> list[str]:
    estimated = row.new_from == ESTIMATE
    counts = [row.prompt, row.restored, row.prefilled]
    new = f"{'~' if estimated else ''}{row.new}"
    timing = [seconds(row.ttft), speed(row.speed)]
    return [
        *map(str, counts),
        new,
        str(row.generated),
        *timing,
        ratio(row.prefilled, row.new, estimated),
    ]


def _total_cells(sums: Totals) -> list[str]:
    counts = [sums.prompt, sums.restored, sums.prefilled]
    new = f"{'~' if sums.estimated else ''}{sums.new}"
    timing = [seconds(sums.ttft), speed(sums.speed)]
    return [
        *map(str, counts),
        new,
        str(sums.generated),
        *timing,
        ratio(sums.prefilled, sums.new, sums.estimated),
    ]
