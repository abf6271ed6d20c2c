"""Raw rows of ``gpu_session`` to tables, ratios and a breakdown of the time to first token."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import isnan, nan
from statistics import mean, median
from typing import Any

SIDES = ("no cache", "stock", "stock 40 GB", "plus 40 GB")
NO_CACHE, STOCK, STOCK_40, PLUS = SIDES
Rows = dict[str, list[Any]]


def join_seen(rows: Sequence[dict[str, Any]], seen: Sequence[dict[str, Any]]) -> None:
    """Add what the server saw: new tokens, a hash of the ids, and where the time went."""
    assert len(rows) == len(seen), f"{len(rows)} requests sent, {len(seen)} seen"
    known: list[list[int]] = []
    for row, request in zip(rows, seen, strict=True):
        ids, reply = request["prompt"], request["reply"]
        row["new"] = len(ids) - max((shared(ids, old) for old in known), default=0)
        row["ids"] = sha256(json.dumps([ids, reply]).encode()).hexdigest()[:12]
        row["prefilled"] = row["prompt"] - row["restored"]
        known.append([*ids, *reply])
        # Tokens as the generation thread emits them: one without a text of its own
        # sends nothing to the client.
        times = request["times"]
        gaps = [after - before for before, after in itertools.pairwise(times)]
        row["speed"] = len(gaps) / max(1e-9, sum(gaps))
        row["gap"] = median(gaps)
        row["gaps"] = gaps
        row["way"] = way(row, request)


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))


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
    kept = {
        key: value for key, value in options.items() if key not in ("json", "folder")
    }
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


@dataclass(frozen=True)
class Report:
    """The tables, and whether all sides did the same work."""

    text: str
    equal: bool


def report(rows: Rows) -> Report:
    """Everything for people; ratios only where the work was equal."""
    unequal = differences(rows)
    parts = []
    if rows["turns"]:
        parts = [turn_table(rows), sum_table(rows), way_table(rows)]
    if unequal:
        parts.append("No ratios, the sides did different work: " + "; ".join(unequal))
    elif rows["turns"]:
        parts.append(verdicts(rows))
    if rows["pairs"] and not unequal:
        parts.append("\n".join(f"- {line}" for line in decode_lines(rows["pairs"])))
    return Report("\n\n".join(part for part in parts if part), not unequal)


def differences(rows: Rows) -> list[str]:
    """Turns whose prompts or replies are not the same ids on every side."""
    out = []
    by_turn: dict[tuple[int, int], set[str]] = {}
    for row in rows["turns"]:
        by_turn.setdefault((row["round"], row["turn"]), set()).add(row["ids"])
    out += [f"round {r}, turn {t}" for (r, t), ids in by_turn.items() if len(ids) > 1]
    for number, pair in enumerate(rows["pairs"]):
        counts = {(row["prompt"], row["generated"]) for row in pair.values()}
        if len(counts) > 1:
            out.append(f"pair {number}: {sorted(counts)}")
    return out


def of(rows: Rows, part: str, side: str, **where: Any) -> list[dict[str, Any]]:
    """Rows of one side."""
    return [
        row
        for row in rows[part]
        if row["side"] == side
        and all(row[key] == value for key, value in where.items())
    ]


def table(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    out = [header, ["---:"] * len(header), *lines]
    return "\n".join(
        "| " + " | ".join(str(cell) for cell in line) + " |" for line in out
    )


def turn_table(rows: Rows) -> str:
    """One line a turn: counts, then TTFT and speed of each side, medians over rounds."""
    sides = [side for side in SIDES if of(rows, "turns", side)]
    header = ["turn", "prompt", "new"]
    header += [f"{side}: prefilled, TTFT s, tok/s" for side in sides]
    lines = []
    for turn in sorted({row["turn"] for row in rows["turns"]}):
        line: list[Any] = [turn]
        for side in sides:
            same = of(rows, "turns", side, turn=turn)
            if len(line) == 1:
                line += [same[0]["prompt"], same[0]["new"]]
            ttft = median(row["ttft"] for row in same)
            speed = median(row["speed"] for row in same)
            line.append(f"{same[0]['prefilled']}, {ttft:.3f}, {speed:.1f}")
        lines.append(line)
    return table(header, lines)


def sums(rows: Rows, side: str) -> dict[str, float]:
    """A side's totals: medians over its rounds."""
    turns = of(rows, "turns", side)
    last = max(row["turn"] for row in turns)
    sessions: dict[int, float] = {}
    for row in turns:
        sessions[row["round"]] = sessions.get(row["round"], 0.0) + row["seconds"]
    memory = of(rows, "memory", side)
    return {
        "session": median(sessions.values()),
        "later": median(row["ttft"] for row in turns if row["turn"] > 1),
        "warm": median(row["ttft"] for row in turns if row["turn"] == last),
        "cold": median([row["ttft"] for row in of(rows, "cold", side)] or [nan]),
        "prefilled": sum(r["prefilled"] for r in turns) / len(sessions),
        "new": sum(r["new"] for r in turns) / len(sessions),
        "peak": max((row["peak"] for row in memory), default=0),
        "above": max((row["peak"] - row["before"] for row in memory), default=0),
        "kept": max((row["after"] - row["before"] for row in memory), default=0),
    }


def sum_table(rows: Rows) -> str:
    """One line a side."""
    header = ["side", "session s", "TTFT p50, later turns", "TTFT, last turn"]
    header += ["the same turn cold", "prefilled / new", "peak GB"]
    header += ["above the model", "kept GB"]
    lines = []
    for side in SIDES:
        if of(rows, "turns", side):
            s = sums(rows, side)
            ratio = s["prefilled"] / s["new"]
            times = [f"{s[name]:.3f}" for name in ("session", "later", "warm", "cold")]
            sizes = [f"{s[name] / 1e9:.2f}" for name in ("peak", "above", "kept")]
            lines.append([side, *times, f"{ratio:.3f}", *sizes])
    return table(header, lines)


def way_table(rows: Rows) -> str:
    """Where the last turn's time to first token goes, in milliseconds; medians."""
    last = max(row["turn"] for row in rows["turns"])
    names: dict[str, None] = {}
    columns = {}
    for side in SIDES:
        ways = [row["way"] for row in of(rows, "turns", side, turn=last)]
        if ways:
            columns[side] = ways
            names |= dict.fromkeys(name for way_ in ways for name in way_)
    lines = []
    for name in names:
        line = [name]
        for ways in columns.values():
            line.append(f"{1000 * median(w.get(name, 0.0) for w in ways):.1f}")
        lines.append(line)
    return table(["last turn, ms", *columns], lines)


def verdicts(rows: Rows) -> str:
    """The targets, one line each."""
    side = {name: sums(rows, name) for name in SIDES if of(rows, "turns", name)}
    plus, lines = side[PLUS], []
    caches = [stock for stock in (STOCK, STOCK_40) if stock in side]
    for stock in caches:
        share = plus["warm"] / side[stock]["warm"]
        lines.append(
            f"warm TTFT of {stock}: x {share:.3f} ({mark(share <= 0.25)} 0.25)"
        )
    for name in (PLUS, NO_CACHE):
        if isnan(side[name]["cold"]):
            continue
        share = plus["warm"] / side[name]["cold"]
        lines.append(f"cold TTFT, {name}: x {share:.3f} ({mark(share < 1)} 1)")
    for name in (NO_CACHE, *caches):
        share = plus["session"] / side[name]["session"]
        lines.append(f"session of {name}: x {share:.3f} ({mark(share < 1)} 1)")
    for stock in caches:
        share = plus["peak"] / max(1, side[stock]["peak"])
        above = plus["above"] / max(1, side[stock]["above"])
        lines.append(
            f"peak memory of {stock}: x {share:.3f} ({mark(share <= 1.1)} 1.1), "
            f"above the model x {above:.3f}"
        )
    return "plus 40 GB beside\n" + "\n".join(f"- {line}" for line in lines)


def decode_lines(pairs: Sequence[dict[str, Any]]) -> list[str]:
    """Decode speed of plus beside stock without a prefix cache."""
    lines = []
    for name, what in (("speed", "decode speed"), ("gap", "median time a token")):
        ratios = [pair[PLUS][name] / pair[NO_CACHE][name] for pair in pairs]
        ratios = [1 / r for r in ratios] if name == "gap" else ratios
        ratio, low, high = interval(ratios)
        both = [median(p[side][name] for p in pairs) for side in (NO_CACHE, PLUS)]
        both = [1 / value for value in both] if name == "gap" else both
        lines.append(
            f"{what}, {len(pairs)} pairs: {both[1]:.1f} beside {both[0]:.1f} tok/s, "
            f"x {ratio:.4f}, 95 % {low:.4f} to {high:.4f} ({mark(low >= 0.97)} 0.97)"
        )
    return lines


def mark(met: bool) -> str:
    return "met:" if met else "MISSED:"


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Mean with its bootstrapped 95 % interval."""
    rng = random.Random(1)
    drawn = sorted(mean(rng.choices(ratios, k=len(ratios))) for _ in range(10_000))
    return mean(ratios), drawn[250], drawn[-251]
