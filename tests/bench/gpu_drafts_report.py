"""Raw rows of ``gpu_drafts`` to tables and ratios; medians over rounds.

python -m tests.bench.gpu_drafts_report DIR
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tests.bench import gpu_tables
from tests.bench.gpu_switch import DRAFTER, PLUS
from tests.bench.gpu_tables import of, table

Rows = dict[str, list[Any]]


def report(folder: Path) -> str:
    """Everything that the files of a run say."""
    parts = []
    for file in sorted(folder.glob("*-drafts.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))
        parts.append(f"## {file.stem}")
        parts += [f"- failed: {row}" for row in rows["failed"]]
        if rows.get("first"):
            parts.append("First plays:\n\n" + first_table(rows))
        if rows["turns"]:
            parts += [turn_table(rows), sum_table(rows), equality(rows)]
    return "\n\n".join(parts)


def sides_of(rows: Rows, part: str = "turns") -> list[str]:
    return list(dict.fromkeys(row["side"] for row in rows[part]))


def sessions(rows: Rows, side: str, part: str = "turns") -> list[list[dict[str, Any]]]:
    """A side's turns, round by round."""
    turns = of(rows, part, side)
    numbers = dict.fromkeys(row["round"] for row in turns)
    return [[row for row in turns if row["round"] == n] for n in numbers]


def each(rows: Rows, side: str, what: Callable[[list[dict[str, Any]]], float]) -> float:
    """Median over a side's sessions."""
    return median(what(session) for session in sessions(rows, side))


def turn_table(rows: Rows) -> str:
    """One line a turn: prefilled tokens, TTFT and speed of each side."""
    sides = sides_of(rows)
    lines = []
    for turn in sorted({row["turn"] for row in rows["turns"]}):
        cells = []
        for side in sides:
            same = of(rows, "turns", side, turn=turn)
            if not same:
                cells.append("–")
                continue
            ttft = median(row["ttft"] for row in same)
            speed = median(row["speed"] for row in same)
            cells.append(f"{same[0]['prefilled']}, {ttft:.3f}, {speed:.0f}")
            prompt, new = same[0]["prompt"], same[0]["new"]
        lines.append([turn, prompt, new, *cells])
    header = ["turn", "prompt", "new"]
    return table([*header, *(f"{s}: prefilled, TTFT s, tok/s" for s in sides)], lines)


def spent(turns: Sequence[dict[str, Any]]) -> float:
    """Seconds of a session."""
    return sum(row["seconds"] for row in turns)


def first(turns: Sequence[dict[str, Any]]) -> float:
    """Seconds of it to the first tokens."""
    return sum(row["ttft"] for row in turns)


def last(turns: Sequence[dict[str, Any]]) -> float:
    """Seconds to the first token of the last turn."""
    ttft: float = turns[-1]["ttft"]
    return ttft


def speed(turns: Sequence[dict[str, Any]]) -> float:
    """Tokens a second while it writes."""
    writing = sum((r["generated"] - 1) / r["speed"] for r in turns if r["speed"])
    return (sum(r["generated"] for r in turns) - len(turns)) / max(writing, 1e-9)


def steps(turns: Sequence[dict[str, Any]]) -> list[float]:
    """Milliseconds of each decode step: with a drafter, of each verified block.

    The tokens of a block come at once, so a reply of so many rounds has so many long
    gaps; the others are next to nothing.
    """
    out: list[float] = []
    for row in turns:
        rounds = row["drafted"][0] or len(row["ms"])
        out += sorted(row["ms"])[-rounds:]
    return out


def step_cell(all_steps: Sequence[float]) -> str:
    """Lower quartile and median.

    The speed of a core changes by up to a factor of two; the quartile is closer to what
    the work itself takes.
    """
    if len(all_steps) < 2:
        return "–"
    return f"{quantiles(all_steps, n=4)[0]:.1f}, {median(all_steps):.1f}"


def first_table(rows: Rows) -> str:
    """What the same sessions took when each length of keys was new."""
    lines = []
    for side in sides_of(rows, "first"):
        (turns,) = sessions(rows, side, "first")
        line = [side, f"{spent(turns):.2f}", f"{first(turns):.2f}"]
        lines.append([*line, f"{speed(turns):.1f}", step_cell(steps(turns))])
    header = ["side", "session s", "to the first tokens s", "tok/s while writing"]
    return table([*header, "ms a decode step, quartile and median"], lines)


def sum_table(rows: Rows) -> str:
    """One line a side."""
    header = ["side", "sessions", "session s", "to the first tokens s"]
    header += ["TTFT p50, later turns", "TTFT, last turn", "prefilled / new"]
    header += [
        "written",
        "tok/s while writing",
        "ms a decode step, quartile and median",
    ]
    header += ["accepted / drafted", "tokens a round", "peak GB", "above the model"]
    lines = []
    for side in sides_of(rows):
        turns = of(rows, "turns", side)
        played = sessions(rows, side)
        memory = of(rows, "memory", side)
        rounds, accepted, drafted = (
            sum(row["drafted"][i] for row in turns) for i in range(3)
        )
        new = sum(row["new"] for row in turns)
        later = median(row["ttft"] for row in turns if row["turn"] > 1)
        line = [side, str(len(played)), f"{each(rows, side, spent):.2f}"]
        line += [f"{each(rows, side, first):.2f}", f"{later:.3f}"]
        line.append(f"{each(rows, side, last):.3f}")
        line.append(f"{sum(row['prefilled'] for row in turns) / new:.3f}")
        line.append(str(sum(row["generated"] for row in played[0])))
        line += [f"{each(rows, side, speed):.1f}", step_cell(steps(turns))]
        line.append(f"{accepted / drafted:.3f}" if drafted else "–")
        line.append(f"{(accepted + rounds) / rounds:.2f}" if rounds else "–")
        line.append(f"{max(row['peak'] for row in memory) / 1e9:.2f}")
        above = max(row["peak"] - row["before"] for row in memory)
        lines.append([*line, f"{above / 1e9:.2f}"])
    return table(header, lines)


def equality(rows: Rows) -> str:
    """Whether all sides read and wrote the same tokens; ratios of plus if so."""
    unequal = gpu_tables.differences({**rows, "pairs": []})
    if unequal:
        return "No ratios, the sides did different work: " + "; ".join(unequal)
    sides = sides_of(rows)
    plus = PLUS + DRAFTER
    lines = ["The same tokens on all sides."]
    for side in sides:
        if side == plus or plus not in sides:
            continue
        parts = []
        for name, what in (
            ("session", spent),
            ("to the first tokens", first),
            ("TTFT of the last turn", last),
            ("tok/s", speed),
        ):
            ratio = each(rows, plus, what) / each(rows, side, what)
            parts.append(f"{name} x {ratio:.3f}")
        lines.append(f"- {plus} beside {side}: " + ", ".join(parts))
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(Path(sys.argv[1])))
