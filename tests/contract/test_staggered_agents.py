"""The bench of staggered agents compares sides only where they did the same work."""

from __future__ import annotations

from tests.bench import staggered_agents as bench


def played(ttft, rate, work="the same"):
    return {
        "ttft": ttft,
        "worst": 2 * ttft,
        "rate": rate,
        "steps": 30,
        "worked": 4,
        "work": work,
    }


def test_ratios_are_to_stock_with_the_drafter():
    round_ = {
        bench.STOCK: played(0.4, 50),
        bench.ALONE: played(0.2, 60),
        bench.TURNS: played(0.2, 50),
        bench.JOINED: played(0.2, 70),
        bench.PLUS: played(0.1, 80),
    }
    rows = bench.rows_of("mtp", [round_, round_])
    assert [row[1] for row in rows] == list(bench.SIDES)
    columns = {row[1]: " ".join(row[2:]) for row in rows}
    assert columns == {
        bench.STOCK: "400 800  30 4.0 50 ",
        bench.ALONE: "200 400 0.50 30 4.0 60 1.20",
        bench.TURNS: "200 400 0.50 30 4.0 50 1.00",
        bench.JOINED: "200 400 0.50 30 4.0 70 1.40",
        bench.PLUS: "100 200 0.25 30 4.0 80 1.60",
    }


def test_other_work_has_no_ratio():
    round_ = {side: played(0.1, 50, work=side) for side in bench.SIDES}
    for row in bench.rows_of("mtp", [round_])[1:]:
        assert row[4] == row[8] == "other work"
