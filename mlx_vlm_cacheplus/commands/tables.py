"""Tables that lose nothing in a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

# More than any table has; a line is as long as its table.
WIDEST = 1 << 16


def show(table: Table, title: str = "") -> None:
    """As wide as the terminal; where there is none, as wide as the table is.

    The title stands by itself: a table's own would be broken at the table's width.
    """
    from rich.console import Console

    if title:
        print(title)
    console = Console() if sys.stdout.isatty() else Console(width=WIDEST)
    console.print(table)
