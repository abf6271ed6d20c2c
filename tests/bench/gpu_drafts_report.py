"""Raw rows of ``gpu_drafts`` to tables and ratios; medians over rounds.

python -m tests.bench.gpu_drafts_report DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.bench.gpu_tables import (
    DRAFTER,
    PLUS,
    Rows,
    differences,
    sides_of,
    sum_table,
    sums,
    turn_table,
)

RATIOS = {
    "session": "session",
    "first": "to the first tokens",
    "last": "TTFT of the last turn",
    "speed": "tok/s",
}


def report(folder: Path) -> str:
    """Everything that the files of a run say."""
    parts = []
    for file in sorted(folder.glob("*-drafts.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))
        parts.append(f"## {file.stem}")
        parts += [f"- failed: {row}" for row in rows["failed"]]
        if rows.get("first"):
            parts.append("First plays:\n\n" + sum_table({"turns": rows["first"]}))
        if rows["turns"]:
            parts += [turn_table(rows), sum_table(rows), equality(rows)]
    return "\n\n".join(parts)


def equality(rows: Rows) -> str:
    """Whether all sides read and wrote the same tokens; ratios of plus if so."""
    if unequal := differences(rows):
        return "No ratios, the sides did different work: " + "; ".join(unequal)
    side = {name: sums(rows, name) for name in sides_of(rows)}
    lines = ["The same tokens on all sides."]
    if plus := side.pop(PLUS + DRAFTER, None):
        for name, figures in side.items():
            ratios = (
                f"{what} x {plus[key] / figures[key]:.3f}"
                for key, what in RATIOS.items()
            )
            lines.append(f"- {PLUS + DRAFTER} beside {name}: " + ", ".join(ratios))
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(Path(sys.argv[1])))
