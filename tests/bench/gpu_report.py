"""Raw rows of ``gpu_sides`` to figures; works on whatever a broken run has left."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from tests.bench import gpu_tables
from tests.bench.gpu_stats import Comparison, compare
from tests.bench.gpu_tables import NO_CACHE, table

TARGET = 0.97
WANTED = 20  # rounds


def report(folder: Path, other: str) -> str:
    """Everything that the files of a run say."""
    parts = []
    for file in sorted(folder.glob("*.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))
        parts.append(f"## {file.stem}")
        parts += [start_lines(rows), placement_lines(rows), decode(rows, other)]
        if rows.get("turns"):
            parts += [session(rows), step_table(rows)]
    return "\n\n".join(part for part in parts if part)


def start_lines(rows: dict[str, Any]) -> str:
    """One line a start."""
    lines = []
    for start in rows.get("starts", []):
        before, after = start["before"], start.get("after", start["before"])
        ticks = {k: after["ticks"][k] - v for k, v in before["ticks"].items()}
        busy = sum(ticks.values()) or 1
        lines.append(
            f"- start {start['start']}: up {start['up']:.1f} s, ready "
            f"{start['ready']:.1f} s, stolen {100 * ticks['steal'] / busy:.2f} %, "
            f"idle {100 * ticks['idle'] / busy:.0f} %, GPU {after.get('gpu', '')}"
        )
    return "\n".join(lines)


def placement_lines(rows: dict[str, Any]) -> str:
    """Speed and its spread by placement of the generation thread."""
    groups: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for row in rows.get("placement", []):
        groups.setdefault((row["mode"], row["streamed"]), []).append(row)
    lines = []
    for (mode, streamed), same in groups.items():
        speeds = [row["speed"] for row in same]
        lines.append(
            f"- {mode}, {'streamed' if streamed else 'not streamed'}: "
            f"{fmean(speeds):.1f} tok/s, spread {spread(speeds):.1f} %, "
            f"median gap {1000 * median(row['gap'] for row in same):.2f} ms, "
            + thread_words(same)
        )
    return "\n".join(lines)


def spread(values: Sequence[float]) -> float:
    return 100 * pstdev(values) / fmean(values)


def thread_words(same: Sequence[dict[str, Any]]) -> str:
    """What the generation thread did a token."""
    threads = [row["thread"] for row in same if row.get("thread")]
    if not threads:
        return ""
    cpu, waits, evicted, cores = (
        fmean(t[name] for t in threads) for name in ("cpu", "waits", "evicted", "cores")
    )
    return (
        f"CPU {1000 * cpu:.2f} ms, {waits:.2f} waits and {evicted:.2f} evictions a "
        f"token, {cores:.1f} cores a reply"
    )


def decode(rows: dict[str, Any], other: str) -> str:
    """The comparison of the pairs; none where they did different work."""
    pairs = rows.get("pairs", [])
    if len(pairs) < 2:
        return ""
    equal = [
        p
        for p in pairs
        if len({(p[s]["prompt"], p[s]["generated"]) for s in (NO_CACHE, other)}) == 1
    ]
    lines = [f"Decode, {len(pairs)} rounds, {len(pairs) - len(equal)} unequal left out"]
    inverse = [
        {
            "start": p["start"],
            **{side: {"gap": 1 / p[side]["gap"]} for side in (NO_CACHE, other)},
        }
        for p in equal
    ]
    for name, of in (("speed", equal), ("gap", inverse)):
        if len(of) > 1:
            lines += comparison_lines(name, compare(of, other, NO_CACHE, name))
    for side in (NO_CACHE, other):
        same = [p[side] for p in equal]
        speeds = [row["speed"] for row in same]
        lines.append(
            f"- {side}: {fmean(speeds):.1f} tok/s, spread {spread(speeds):.1f} %, "
            + thread_words(same)
        )
    return "\n".join(lines)


def comparison_lines(name: str, c: Comparison) -> list[str]:
    """Both intervals and the verdict."""
    what = "speed" if name == "speed" else "by the median gap"
    met = c.low >= TARGET and c.rounds.count >= WANTED
    lines = [
        f"- {what}, {c.rounds.count} rounds: {c.rounds}, noise of a round "
        f"{100 * c.noise:.1f} %",
        f"- {what}, {len(c.means)} starts: {c.starts or 'too few for an interval'}, "
        f"means {', '.join(f'{mean:.3f}' for mean in c.means)}",
    ]
    verdict = "met" if met else "not shown"
    return [*lines, f"- {what}: lower bound {c.low:.4f}, {TARGET} is {verdict}"]


def session(rows: dict[str, Any]) -> str:
    """The session's tables, as ``gpu_session`` has them."""
    rows = {**rows, "pairs": []}
    done = gpu_tables.report(rows)
    return done.text


def step_table(rows: dict[str, Any]) -> str:
    """Prefill steps of each turn on each side: how many, and their milliseconds."""
    sides = list(dict.fromkeys(row["side"] for row in rows["turns"]))
    turns = sorted({row["turn"] for row in rows["turns"]})
    lines = []
    for turn in turns:
        line: list[Any] = [turn]
        for side in sides:
            same = gpu_tables.of(rows, "turns", side, turn=turn)
            line.append("; ".join(steps(row) for row in same))
        lines.append(line)
    return table(["turn", *(f"{side}: steps ms" for side in sides)], lines)


def steps(row: dict[str, Any]) -> str:
    """A row's prefill steps and what was stored between them, in milliseconds."""
    short = {"prompt_step": "p", "generate": "g", "store_checkpoint": "s"}
    return " ".join(
        f"{short.get(name, name)}{1000 * seconds:.0f}"
        for name, _, seconds in row["steps"]
        if name in short or seconds > 0.001
    )
