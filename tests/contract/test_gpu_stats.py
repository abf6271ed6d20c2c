"""The benchmark's statistics find a planted slow-down, and what starts have in common."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest

from tests.bench import gpu_cores, gpu_report
from tests.bench.gpu_stats import compare, estimate, student

STOCK, PLUS = "no cache", "plus 40 GB"


def rounds(seed, ratio, starts=5, each=14, noise=0.02, process=0.1, own=0.0):
    """Rows whose processes differ by ``process``; ``own``: by start, in the ratio."""
    rng = random.Random(seed)
    rows = []
    for start in range(starts):
        speed = 150 * math.exp(rng.gauss(0, process))
        drift = rng.gauss(0, own)
        for _ in range(each):
            factor = ratio * math.exp(rng.gauss(drift, noise))
            rows.append(
                {
                    "start": start,
                    STOCK: {"speed": speed, "prompt": 9, "generated": 4},
                    PLUS: {"speed": speed * factor, "prompt": 9, "generated": 4},
                }
            )
    return rows


def test_a_slow_down_of_five_percent_is_found_beside_processes_that_differ_by_ten():
    found = compare(rounds(1, 0.95), PLUS, STOCK)
    assert found.rounds.ratio == pytest.approx(0.95, abs=0.01)
    assert found.rounds.high < 0.97
    assert found.low < 0.95 < found.starts.high


def test_equal_sides_are_shown_to_be_equal():
    found = compare(rounds(2, 1.0), PLUS, STOCK)
    assert found.low > 0.97
    assert found.rounds.ratio == pytest.approx(1, abs=0.01)


def test_intervals_hold_the_truth_as_often_as_they_say():
    held = [compare(rounds(seed, 0.95, noise=0.1), PLUS, STOCK) for seed in range(200)]
    shares = [
        fmean(e.low < 0.95 < e.high for e in estimates)
        for estimates in ([c.rounds for c in held], [c.starts for c in held])
    ]
    assert all(0.9 <= share <= 0.99 for share in shares), shares


def test_the_bound_is_that_of_the_starts_where_starts_differ():
    found = compare(rounds(3, 1.0, own=0.05), PLUS, STOCK)
    assert found.starts.high - found.starts.low > found.rounds.high - found.rounds.low
    assert found.low == found.starts.low


def test_two_starts_give_no_interval_of_starts():
    found = compare(rounds(4, 1.0, starts=2), PLUS, STOCK)
    assert found.starts is None
    assert found.low == found.rounds.low
    assert len(found.means) == 2


def test_noise_is_that_of_a_round_within_its_start():
    found = compare(rounds(5, 1.0, noise=0.08, own=0.5), PLUS, STOCK)
    assert found.noise == pytest.approx(0.08, rel=0.3)


def test_student_takes_the_wider_of_two_entries():
    assert student(11) == student(10) > student(12)
    assert estimate([0.0, 0.0, 0.0]).low == 1.0


def test_a_report_leaves_out_rounds_whose_replies_differ():
    rows = {"pairs": rounds(6, 0.95)}
    for row in rows["pairs"]:
        for side in (STOCK, PLUS):
            row[side]["gap"] = 1 / row[side]["speed"]
    rows["pairs"][0][PLUS] = {**rows["pairs"][0][PLUS], "generated": 3, "speed": 1.0}
    text = gpu_report.decode(rows, PLUS)
    assert "70 rounds, 1 unequal left out" in text
    assert "0.97 is not shown" in text
    assert "met" not in text


def test_shares_of_cores_are_whole_and_disjoint(monkeypatch):
    monkeypatch.setattr(gpu_cores, "siblings", lambda core: {core % 4, core % 4 + 4})
    cores = set(range(8))
    first, second = (gpu_cores.share(cores, n, 2) for n in (1, 2))
    assert (first, second) == ([0, 1, 4, 5], [2, 3, 6, 7])
    assert gpu_cores.parse("0-2,8\n") == {0, 1, 2, 8}
