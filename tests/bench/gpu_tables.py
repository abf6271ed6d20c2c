"""Raw rows of a session's sides to tables, ratios and where the time to first token goes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from statistics import median, quantiles
from typing import Any

from mlx_vlm_cacheplus.replay.tokens import common_prefix

SIDES = ("no cache", "stock", "stock 40 GB", "plus 40 GB")
NO_CACHE, STOCK, STOCK_40, PLUS = SIDES
DRAFTER = " + drafter"  # ends the name of a side that drafts
Rows = dict[str, list[Any]]
PREFILL = {"prompt_step": "p", "generate": "g", "store_checkpoint": "s"}
STEPS = (*PREFILL, "commit", "merge_rows")
# What a side's line says: its heading, name in ``sums``, form.
COLUMNS = (
    ("sessions", "sessions", ".0f"),
    ("session s", "session", ".2f"),
    ("to the first tokens s", "first", ".2f"),
    ("TTFT p50, later turns", "later", ".3f"),
    ("TTFT, last turn", "last", ".3f"),
    ("the same turn cold", "cold", ".3f"),
    ("prefilled / new", "reread", ".3f"),
    ("written", "written", ".0f"),
    ("tok/s while writing", "speed", ".1f"),
    ("ms a decode step: lower quartile", "quartile", ".1f"),
    ("median", "step", ".1f"),
    ("accepted / drafted", "accepted", ".3f"),
    ("tokens a round", "block", ".2f"),
    ("peak GB", "peak", ".2f"),
    ("above the model GB", "above", ".2f"),
)


# -- rows ------------------------------------------------------------------------------
def join_seen(rows: Sequence[dict[str, Any]], seen: Sequence[dict[str, Any]]) -> None:
    """Add what the server saw: new tokens, a hash of the ids, and where the time went."""
    assert len(rows) == len(seen), f"{len(rows)} requests sent, {len(seen)} seen"
    known: list[list[int]] = []
    for row, request in zip(rows, seen, strict=True):
        ids, reply = request["prompt"], request["reply"]
        row["new"] = len(ids) - max((common_prefix(ids, k) for k in known), default=0)
        row["ids"] = sha256(json.dumps([ids, reply]).encode()).hexdigest()[:12]
        row["prefilled"] = row["prompt"] - row["restored"]
        known.append([*ids, *reply])
        # Tokens as the generation thread emits them: one without a text of its own
        # sends nothing to the client.
        gaps = [
            after - before for before, after in itertools.pairwise(request["times"])
        ]
        row["speed"] = len(gaps) / max(1e-9, sum(gaps))
        row["ms"] = [round(1000 * gap, 2) for gap in gaps]
        row["way"] = way(row, request)
        first = request["times"][0]
        row["steps"] = [
            [name, round(began - row["sent"], 4), round(seconds, 4)]
            for name, began, seconds in request["seams"]
            if name in STEPS and began < first
        ]
        if "drafted" in request:
            row["drafted"] = request["drafted"]


def way(row: dict[str, Any], request: dict[str, Any]) -> dict[str, float]:
    """Seconds from sending to the first delta, seam by seam; a seam may hold others."""
    first = request["times"][0]
    sent = row["sent"]
    out = {"arrived": request["arrived"] - sent, "admitted": request["admitted"] - sent}
    for name, began, seconds in request["seams"]:
        # The row's end comes after its first token; it is kept under a name of its own.
        label = name if began < first else f"{name} (after)"
        out[label] = out.get(label, 0.0) + seconds
    out["first token"] = first - sent
    out["first delta"] = row["ttft"] or 0.0
    return {name: round(value, 5) for name, value in out.items()}


def as_json(rows: Rows, options: dict[str, Any]) -> str:
    """Everything that was measured, one row a line."""
    left_out = ("json", "folder", "out")
    kept = {key: value for key, value in options.items() if key not in left_out}
    parts = [f' "options": {json.dumps(kept, default=str)}']
    for name, items in rows.items():
        lines = ",\n".join("  " + json.dumps(short(item)) for item in items)
        parts.append(f' "{name}": [\n{lines}\n ]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def short(item: Any) -> Any:
    """A row without texts and clock readings, numbers at a tenth of a millisecond."""
    if isinstance(item, dict):
        left_out = ("text", "sent")
        return {k: short(v) for k, v in item.items() if k not in left_out}
    return round(item, 4) if isinstance(item, float) else item


def of(rows: Rows, part: str, side: str, **where: Any) -> list[dict[str, Any]]:
    """Rows of one side."""
    return [
        row
        for row in rows.get(part, [])
        if row["side"] == side
        and all(row[key] == value for key, value in where.items())
    ]


def sides_of(rows: Rows) -> list[str]:
    """Sides that played, in the order in which they came."""
    return list(dict.fromkeys(row["side"] for row in rows["turns"]))


def differences(rows: Rows) -> list[str]:
    """Turns whose prompts or replies are not the same ids on every side."""
    by_turn: dict[tuple[int, int], set[str]] = {}
    for row in rows["turns"]:
        by_turn.setdefault((row["round"], row["turn"]), set()).add(row["ids"])
    return [f"round {r}, turn {t}" for (r, t), ids in by_turn.items() if len(ids) > 1]


# -- a side's figures ------------------------------------------------------------------
def speed(turns: Sequence[dict[str, Any]]) -> float:
    """Tokens a second while a session writes."""
    writing = sum((r["generated"] - 1) / r["speed"] for r in turns if r["speed"])
    return (sum(r["generated"] for r in turns) - len(turns)) / max(writing, 1e-9)


def decode_steps(turns: Sequence[dict[str, Any]]) -> list[float]:
    """Milliseconds of each decode step: with a drafter, of each verified block.

    The tokens of a block come at once, so a reply of so many rounds has so many long
    gaps; the others are next to nothing.
    """
    out: list[float] = []
    for row in turns:
        ms = sorted(row.get("ms", []))
        out += ms[-(row.get("drafted", [0])[0] or len(ms)) :]
    return out


def sums(rows: Rows, side: str) -> dict[str, float]:
    """A side's figures: of sessions the median; what was not measured is left out."""
    turns, memory = of(rows, "turns", side), of(rows, "memory", side)
    numbers = dict.fromkeys(row["round"] for row in turns)
    played = [of(rows, "turns", side, round=number) for number in numbers]
    out: dict[str, float] = {
        "sessions": len(played),
        "session": median(sum(row["seconds"] for row in s) for s in played),
        "first": median(sum(row["ttft"] for row in s) for s in played),
        "last": median(s[-1]["ttft"] for s in played),
        "speed": median(map(speed, played)),
        "later": median(row["ttft"] for row in turns if row["turn"] > 1),
        "reread": sum(r["prefilled"] for r in turns) / sum(r["new"] for r in turns),
        "written": sum(row["generated"] for row in played[0]),
    }
    if cold := [row["ttft"] for row in of(rows, "cold", side)]:
        out["cold"] = median(cold)
    # The speed of a core changes by up to a factor of two; the quartile is closer to
    # what the work itself takes.
    if len(steps := decode_steps(turns)) > 1:
        out |= {"quartile": quantiles(steps, n=4)[0], "step": median(steps)}
    counts = [row["drafted"] for row in turns if row.get("drafted", [0])[0]]
    if counts:
        rounds, accepted, drafted = map(sum, zip(*counts, strict=True))
        out |= {"accepted": accepted / drafted, "block": accepted / rounds + 1}
    if memory:
        out["peak"] = max(row["peak"] for row in memory) / 1e9
        out["above"] = max(row["peak"] - row["before"] for row in memory) / 1e9
    return out


# -- tables ----------------------------------------------------------------------------
def table(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    out = [header, ["---:"] * len(header), *lines]
    return "\n".join(
        "| " + " | ".join(str(cell) for cell in line) + " |" for line in out
    )


def turn_table(rows: Rows) -> str:
    """One line a turn: counts, then TTFT and speed of each side, medians over rounds."""
    sides = sides_of(rows)
    lines = []
    for turn in sorted({row["turn"] for row in rows["turns"]}):
        cells = []
        for side in sides:
            same = of(rows, "turns", side, turn=turn)
            ttft = median(row["ttft"] for row in same)
            tokens = median(row["speed"] for row in same)
            cells.append(f"{same[0]['prefilled']}, {ttft:.3f}, {tokens:.1f}")
        lines.append([turn, same[0]["prompt"], same[0]["new"], *cells])
    header = ["turn", "prompt", "new"]
    return table([*header, *(f"{s}: prefilled, TTFT s, tok/s" for s in sides)], lines)


def sum_table(rows: Rows) -> str:
    """One line a side, with the columns that any side has a figure for."""
    side = {name: sums(rows, name) for name in sides_of(rows)}
    shown = [c for c in COLUMNS if any(c[1] in figures for figures in side.values())]
    lines = [
        [name, *(f"{f[key]:{form}}" if key in f else "–" for _, key, form in shown)]
        for name, f in side.items()
    ]
    return table(["side", *(heading for heading, _, _ in shown)], lines)


def way_table(rows: Rows) -> str:
    """Where the last turn's time to first token goes, in milliseconds; medians."""
    last = max(row["turn"] for row in rows["turns"])
    columns = {
        side: [row["way"] for row in of(rows, "turns", side, turn=last)]
        for side in sides_of(rows)
    }
    names = dict.fromkeys(name for ways in columns.values() for w in ways for name in w)
    lines = [
        [name]
        + [
            f"{1000 * median(w.get(name, 0.0) for w in ways):.1f}"
            for ways in columns.values()
        ]
        for name in names
    ]
    return table(["last turn, ms", *columns], lines)


def step_table(rows: Rows) -> str:
    """Prefill steps and what was stored between them, in milliseconds, turn by turn."""
    sides = sides_of(rows)
    lines = []
    for turn in sorted({row["turn"] for row in rows["turns"]}):
        same = [of(rows, "turns", side, turn=turn) for side in sides]
        lines.append([turn, *("; ".join(map(step_words, rows_)) for rows_ in same)])
    return table(["turn", *(f"{side}: steps ms" for side in sides)], lines)


def step_words(row: dict[str, Any]) -> str:
    """A row's steps in short."""
    return " ".join(
        f"{PREFILL.get(name, name)}{1000 * seconds:.0f}"
        for name, _, seconds in row["steps"]
        if name in PREFILL or seconds > 0.001
    )


# -- the report ------------------------------------------------------------------------
@dataclass(frozen=True)
class Report:
    """The tables, and whether all sides did the same work."""

    text: str
    equal: bool


def report(rows: Rows) -> Report:
    """Everything for people; ratios only where the work was equal."""
    if not rows["turns"]:
        return Report("No session was played.", False)
    parts = [turn_table(rows), sum_table(rows)]
    for key, make in (("way", way_table), ("steps", step_table)):
        if all(key in row for row in rows["turns"]):
            parts.append(make(rows))
    if unequal := differences(rows):
        parts.append("No ratios, the sides did different work: " + "; ".join(unequal))
    elif PLUS in sides_of(rows):
        parts.append(verdicts(rows))
    return Report("\n\n".join(parts), not unequal)


def verdicts(rows: Rows) -> str:
    """The targets, one line each."""
    side = {name: sums(rows, name) for name in SIDES if of(rows, "turns", name)}
    plus, lines = side[PLUS], []
    caches = [stock for stock in (STOCK, STOCK_40) if stock in side]
    for stock in caches:
        share = plus["last"] / side[stock]["last"]
        lines.append(
            f"warm TTFT of {stock}: x {share:.3f} ({mark(share <= 0.25)} 0.25)"
        )
    for name in (PLUS, NO_CACHE):
        if "cold" in side.get(name, {}):
            share = plus["last"] / side[name]["cold"]
            lines.append(f"cold TTFT, {name}: x {share:.3f} ({mark(share < 1)} 1)")
    for name in (NO_CACHE, *caches):
        if name in side:
            share = plus["session"] / side[name]["session"]
            lines.append(f"session of {name}: x {share:.3f} ({mark(share < 1)} 1)")
    for stock in caches:
        peak, above = (plus[k] / (side[stock][k] or 1e-9) for k in ("peak", "above"))
        lines.append(
            f"peak memory of {stock}: x {peak:.3f} ({mark(peak <= 1.1)} 1.1), "
            f"above the model x {above:.3f}"
        )
    return "plus 40 GB beside\n" + "\n".join(f"- {line}" for line in lines)


def mark(met: bool) -> str:
    return "met:" if met else "MISSED:"
