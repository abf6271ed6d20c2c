"""Raw rows of ``gpu_disk`` to ratios and tables.

python -m tests.bench.gpu_disk_report DIR     # of a folder with rows
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from tests.bench import gpu_tables
from tests.bench.gpu_tables import NO_CACHE, PLUS, STOCK_40
from tests.bench.gpu_turns import SKIPPED, Estimate, crossed, estimate, round_log

DISK = " + disk"
COLD = NO_CACHE
SIDES = (COLD, STOCK_40 + DISK, PLUS + DISK)
TARGET, WANTED = 0.97, 20
FEWEST = 3  # turns of a round that make a ratio

Row = dict[str, Any]
Turns = Callable[[Row, str], Sequence[int]]


def report(folder: Path, other: str = PLUS + DISK) -> str:
    """Everything that the files of a run say."""
    parts = []
    for file in sorted(folder.glob("*-decode.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))
        parts += [f"## {file.stem}", decode(rows["rounds"], other)]
    for file in sorted(folder.glob("*-restart.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))
        parts += [f"## {file.stem}", restart(rows)]
    return "\n\n".join(parts)


# -- decoding --------------------------------------------------------------------------
def usable(rows: Sequence[Row], other: str) -> list[Row]:
    """Rounds in which both sides read and wrote as much, in turn.

    The same prompt; which tokens a reply of free greedy choice has, a model with random
    weights says anew in each process (near ties), and they cost the same.
    """

    def work(row: Row, side: str) -> tuple[Any, ...]:
        one = row[side]
        return one["prompt"], one["restored"], one["generated"], len(one["ms"])

    return [
        row
        for row in rows
        if not row["lost"]
        and work(row, PLUS) == work(row, other)
        and len(row[PLUS]["ms"]) > SKIPPED + 3
    ]


def writing(row: Row, other: str) -> list[bool]:
    """Of each turn: whether something waited to be written, or was handed over."""
    disk = row[other]["disk"]
    handed = {said - 1 for said, *_ in disk["handed"]}
    return [
        waits > 0 or number in handed
        for number, waits in enumerate(disk["waiting"][: len(row[other]["ms"])])
    ]


def middle(row: Row, other: str) -> Sequence[int]:
    """Turns without the start of the reply and its end."""
    return range(SKIPPED, len(row[other]["ms"]) - 1)


def begun(row: Row, other: str) -> Sequence[int]:
    """All turns but the last: the start is where a prompt is handed over."""
    return range(len(row[other]["ms"]) - 1)


def whole(row: Row, other: str) -> Sequence[int]:
    """All turns: the last holds the end of the reply."""
    return range(len(row[other]["ms"]))


def while_writing(turns: Turns) -> Turns:
    """Those of them in which something waited to be written."""

    def some(row: Row, other: str) -> Sequence[int]:
        busy = writing(row, other)
        return [number for number in turns(row, other) if busy[number]]

    return some


WINDOWS: tuple[tuple[str, Turns], ...] = (
    ("all but the first two turns and the last", middle),
    ("all but the last", begun),
    ("all", whole),
    ("those of the first line while something waits", while_writing(middle)),
    ("those of the second line while something waits", while_writing(begun)),
)


def sum_log(row: Row, other: str, turns: Sequence[int], name: str = "ms") -> float:
    """Logarithm of how much faster the side with a disk tier is over these turns."""
    sums = [sum(row[side][name][n] for n in turns) for side in (PLUS, other)]
    return math.log(sums[0] / sums[1])


def decode(rows: Sequence[Row], other: str = PLUS + DISK) -> str:
    """Ratios by sums of turns and by their medians; what was written meanwhile."""
    good = usable(rows, other)
    lines = [f"{other} beside {PLUS}: {len(rows)} rounds, {left_out(rows, good)}"]
    lines.append("speed, by the sums of a round's turns:")
    for words, turns in WINDOWS:
        chosen = [(row, turns(row, other)) for row in good]
        chosen = [(row, some) for row, some in chosen if len(some) >= FEWEST]
        logs = [sum_log(row, other, some) for row, some in chosen]
        lines.append(f"- {words}: {ratio([row for row, _ in chosen], logs)}")
    lines.append("speed, by the median of a round's differences, and by CPU time:")
    for name in ("ms", "cpu"):
        logs = [round_log(row, other, PLUS, name) for row in good]
        lines.append(f"- {name}: {ratio(good, logs)}")
    if len(good) > 1:
        lines += [first_tokens(good, other)] + steps(good, other) + written(good, other)
    return "\n".join(lines)


def left_out(rows: Sequence[Row], good: Sequence[Row]) -> str:
    lost = sum(bool(row["lost"]) for row in rows)
    unlike = len(rows) - len(good) - lost
    return f"left out {lost} that lost the turn, {unlike} of unlike work"


def ratio(rows: Sequence[Row], logs: Sequence[float]) -> str:
    """The ratio, and whether it meets the target."""
    try:
        found: Estimate = crossed(rows, logs)
    except ValueError as error:
        return f"{len(logs)} rounds, no figure: {error}"
    met = found.low >= TARGET and found.count >= WANTED
    verdict = f"{TARGET} is {'met' if met else 'not shown'}"
    return f"{found}, {found.count} rounds of {100 * stdev(logs):.1f} %; {verdict}"


def first_tokens(rows: Sequence[Row], other: str) -> str:
    """Time to the first token: a hand-over before it is in no turn."""
    first = {side: [row[side]["first"] for row in rows] for side in (PLUS, other)}
    logs = [math.log(b / a) for a, b in zip(*first.values(), strict=True)]
    words = ", ".join(f"{s} {1000 * median(v):.1f} ms" for s, v in first.items())
    return f"- to the first token: {words}, {estimate(logs)} as long"


def steps(rows: Sequence[Row], other: str) -> list[str]:
    """Turns of each side, and the longest; where the prompt was handed over."""
    lines = []
    for side in (PLUS, other):
        turns = [row[side]["ms"][n] for row in rows for n in middle(row, other)]
        longest = [max(row[side]["ms"][:-1]) for row in rows]
        first = median(row[side]["ms"][0] for row in rows)
        last = median(row[side]["ms"][-1] for row in rows)
        lines.append(
            f"- {side}: a turn {fmean(turns):.2f} ms, median {median(turns):.2f}; "
            f"longest of a round {median(longest):.1f}, of all {max(longest):.1f}; "
            f"first {first:.1f}, last {last:.1f}"
        )
    handed = [one for row in rows for one in row[other]["disk"]["handed"]]
    if handed:
        by_token: dict[int, list[float]] = {}
        for said, ms, _ in handed:
            by_token.setdefault(said, []).append(ms)
        words = ", ".join(
            f"{len(ms)} x after token {said}: {median(ms):.1f} ms (most {max(ms):.1f})"
            for said, ms in sorted(by_token.items())
        )
        lines.append(f"- handed over to the writer: {words}")
    return lines


def written(rows: Sequence[Row], other: str) -> list[str]:
    """How much of a reply had something to write, and what that does to the other."""
    if not any(any(writing(row, other)) for row in rows):
        return ["- nothing was written"]
    busy = [[writing(row, other)[n] for n in begun(row, other)] for row in rows]
    tokens = [sum(one) for one in busy]
    still = sum(row[other]["disk"]["waiting"][-2] > 0 for row in rows)
    key = "disk_written_bytes"
    counts = [row[other]["disk"]["bytes"] for row in rows]
    before = [row["before"][key] for row in rows]
    parts = {
        "until the first turn": [c[0] - b for c, b in zip(counts, before, strict=True)],
        "until the last": [c[-2] - c[0] for c in counts],
        "in all": [r["written"][key] - b for r, b in zip(rows, before, strict=True)],
    }
    lines = [
        f"- something waited to be written in {100 * fmean(map(fmean, busy)):.0f} % of "
        f"the turns but the last ({min(tokens)} to {max(tokens)} a round, median "
        f"{median(tokens):.0f}), and still when the last began in {still} rounds",
        "- MB written in a round, medians: "
        + ", ".join(f"{median(n) / 1e6:.2f} {what}" for what, n in parts.items()),
    ]
    logs = []
    for row in rows:
        busy = writing(row, other)
        ms = row[PLUS]["ms"]
        turns = middle(row, other)
        while_, not_ = ([ms[n] for n in turns if busy[n] is b] for b in (True, False))
        if min(len(while_), len(not_)) >= FEWEST:
            logs.append(math.log(fmean(not_) / fmean(while_)))
    if len(logs) > 1:
        lines.append(
            f"- {PLUS} itself, while the other writes beside while not: speed "
            f"{estimate(logs)}, {len(logs)} rounds (what both bear is not in the ratios)"
        )
    return lines


# -- restarts --------------------------------------------------------------------------
def restart(rows: dict[str, list[Row]]) -> str:
    """TTFT of the last turn after a restart: table, where it goes, what was filled."""
    lines = [
        f"{f['side']}: folder {f['size'] / 1e9:.3f} GB, filled in {f['seconds']:.1f} s"
        for f in rows["filled"]
    ]
    lines += [f"FAILED: {error}" for error in rows["failed"]]
    played = complete(rows["turns"])
    if not played:
        return "\n".join([*lines, "No round of restarts was played to its end."])
    parts = ["\n".join(lines), restart_table(played)]
    if len({row["ids"] for row in played}) > 1:
        parts.append("No ratios: prompts or replies have other ids.")
    return "\n\n".join([*parts, gpu_tables.way_table({"turns": played})])


def complete(rows: Sequence[Row]) -> list[Row]:
    """Rows of the rounds that every side has played."""
    sides: dict[int, set[str]] = {}
    for row in rows:
        sides.setdefault(row["round"], set()).add(row["side"])
    return [row for row in rows if sides[row["round"]] == set(SIDES)]


def restart_table(rows: Sequence[Row]) -> str:
    """One line a side; ratios where all ids are the same."""
    of = {side: [r for r in rows if r["side"] == side] for side in SIDES}
    ttft = {side: [1000 * row["ttft"] for row in same] for side, same in of.items()}
    equal = len({row["ids"] for row in rows}) == 1
    lines = []
    for side, same in of.items():
        found = median(ttft[side])
        ratios = [
            f"{found / median(ttft[base]):.3f}" if equal else "other work"
            for base in SIDES[:2]
        ]
        opened = [1000 * r["opened"] for r in same if r["opened"] is not None]
        lines.append(
            [
                *(side, len(same), values(same, "prompt"), values(same, "prefilled")),
                values([{"n": from_disk(row)} for row in same], "n"),
                f"{found:.1f}",
                f"{min(ttft[side]):.1f} to {max(ttft[side]):.1f}",
                *ratios,
                f"{median(opened):.0f}" if opened else "–",
            ]
        )
    header = ["side", "rounds", "prompt", "prefilled", "restored from disk"]
    header += ["TTFT ms, median", "range", "of cold", "of stock", "opened in ms"]
    return gpu_tables.table(header, lines)


def values(rows: Sequence[Row], name: str) -> str:
    return ", ".join(map(str, sorted({row[name] for row in rows})))


def from_disk(row: Row) -> int:
    """Tokens that this turn had from disk, as the cache's own numbers say.

    Stock counts hits and, of all sources, matched tokens: without a hit it is zero.
    """
    before, after = row["before"], row["after"]

    def more(name: str) -> int:
        return int(after.get(name, 0) - before.get(name, 0))

    if row["side"].startswith(PLUS):
        return more("disk_restored_tokens")
    return more("matched_tokens") if more("disk_hits") else 0


if __name__ == "__main__":
    print(report(Path(sys.argv[1])))
