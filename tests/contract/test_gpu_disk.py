"""The disk tier's GPU benchmark: a long step is seen, and restarts are compared where work is equal."""

from __future__ import annotations

import math
import os
import random

import pytest

from tests.bench import gpu_disk
from tests.bench import gpu_disk_report as report
from tests.bench.gpu_disk_report import COLD, DISK, PLUS, SIDES

ON = PLUS + DISK
TOKENS = 48


def rounds(slower=1.0, step=0.0, writes=range(4, 20), count=24):
    """Rows whose disk side takes ``slower`` as long while it writes, and ``step`` ms once."""
    rng, rows = random.Random(3), []
    for number in range(count):
        row = {"seat": number // 3 % 2, "leader": (PLUS, ON)[number % 2], "lost": False}
        for side in (PLUS, ON):
            ms = [10 * math.exp(rng.gauss(0, 0.01)) for _ in range(TOKENS - 1)]
            if side == ON:
                ms = [t * slower if n in writes else t for n, t in enumerate(ms)]
                ms[7] += step
            waiting = [int(side == ON and n in writes) for n in range(TOKENS)]
            nbytes = [1000 * min(n, writes.stop) for n in range(TOKENS)]
            disk = {"waiting": waiting, "bytes": nbytes, "handed": [[0, 0.3, 9]]}
            row[side] = {"prompt": 9, "restored": 1, "generated": TOKENS, "first": 0.2}
            row[side] |= {"ms": ms, "cpu": ms, "disk": disk}
        row["before"] = {"disk_written_bytes": 0}
        row["written"] = {"disk_written_bytes": 30_000}
        rows.append(row)
    return rows


def lines(rows):
    """The report's lines by their first words."""
    made = [line.removeprefix("- ") for line in report.decode(rows).splitlines()]
    return {line.partition(":")[0]: line for line in made}


def figure(line):
    return float(line.partition(": x ")[2].partition(",")[0])


def test_equal_sides_meet_the_target_and_a_long_step_is_seen_by_the_sums_alone():
    middle = "all but the first two turns and the last"
    equal, stepped = lines(rounds()), lines(rounds(step=60.0))
    assert "0.97 is met" in equal[middle]
    assert "0.97 is not shown" in stepped[middle]
    assert figure(stepped[middle]) == pytest.approx(440 / 500, abs=0.01)
    assert figure(stepped["ms"]) == pytest.approx(1.0, abs=0.01)


def test_turns_while_something_waits_have_a_ratio_of_their_own():
    found = lines(rounds(slower=1.25))
    busy = "those of the first line while something waits"
    assert figure(found[busy]) == pytest.approx(0.8, abs=0.01)
    share = next(line for line in found.values() if line.startswith("something waited"))
    assert "35 % of the turns but the last (16 to 16" in share
    size = found["MB written in a round, medians"]
    assert "0.00 until the first turn, 0.02 until the last, 0.03 in all" in size


def test_a_prompt_that_is_handed_over_is_written_in_that_turn():
    (row,) = rounds(writes=range(0), count=1)
    row[ON]["disk"]["handed"] = [[0, 1.0, 9], [3, 1.0, 9]]
    busy = report.writing(row, ON)
    assert [n for n, one in enumerate(busy) if one] == [2]


def test_rounds_of_other_work_are_left_out():
    rows = rounds()
    rows[0][ON] = {**rows[0][ON], "restored": 3}
    rows[1]["lost"] = True
    assert "left out 1 that lost the turn, 1 of unlike work" in report.decode(rows)


def test_little_or_no_rows_give_no_figures():
    for count in (0, 1, 2):
        assert "no figure" in report.decode(rounds(count=count))


# -- restarts --------------------------------------------------------------------------
def restarted(*ids):
    rows = []
    for number in range(2):
        for side, ttft, one in zip(SIDES, (0.4, 0.2, 0.1), ids, strict=True):
            row = {"side": side, "round": number, "turn": 1, "ids": one, "ttft": ttft}
            row |= {"prompt": 100, "prefilled": 10, "opened": None, "way": {"x": 0.1}}
            row["before"] = {"disk_restored_tokens": 5, "matched_tokens": 7}
            row["after"] = {"disk_restored_tokens": 95, "matched_tokens": 87}
            row["after"]["disk_hits"] = 1
            rows.append(row)
    return {"filled": [], "failed": [], "turns": rows}


def test_restarts_have_ratios_where_all_ids_are_the_same():
    text = report.restart(restarted("a", "a", "a"))
    assert "| 100 | 10 | 90 | 100.0 | 100.0 to 100.0 | 0.250 | 0.500 |" in text
    assert "| 100 | 10 | 80 | 200.0 | 200.0 to 200.0 | 0.500 | 1.000 |" in text
    assert "other work" in report.restart(restarted("a", "a", "b"))


def test_a_round_that_was_not_played_to_its_end_is_left_out():
    rows = restarted("a", "a", "a")
    rows["turns"] = rows["turns"][:4]
    assert {row["round"] for row in report.complete(rows["turns"])} == {0}
    rows["turns"] = rows["turns"][:1]
    assert "No round" in report.restart(rows)


def test_a_copied_folder_shares_entries_and_nothing_else(tmp_path):
    (tmp_path / "a").mkdir()
    for name in ("entry.safetensors", "index.sqlite"):
        (tmp_path / "a" / name).write_text(name)
        gpu_disk.link(str(tmp_path / "a" / name), str(tmp_path / name))
    shared = {n: os.stat(tmp_path / n).st_nlink for n in os.listdir(tmp_path / "a")}
    assert shared == {"entry.safetensors": 2, "index.sqlite": 1}
    gpu_disk.drop(tmp_path)
    assert gpu_disk.size(tmp_path / "a") == 17 + 12


def test_the_order_of_the_sides_alternates():
    order = gpu_disk.Restarts.order
    assert order(0)[0] == order(1)[-1] == COLD
