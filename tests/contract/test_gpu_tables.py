"""The benchmark's tables: what is new, what is compared, and when no ratio is given."""

from __future__ import annotations

import copy

from tests.bench import gpu_tables
from tests.bench.gpu_tables import SIDES


def seen(prompt, reply, start=0.0):
    times = [start + 1.0 + 0.5 * n for n in range(len(reply))]
    return {
        "prompt": prompt,
        "reply": reply,
        "times": times,
        "arrived": start + 0.1,
        "admitted": start + 0.2,
        "seams": [["lookup", start + 0.3, 0.05], ["commit", start + 2.0, 0.25]],
    }


def row(prompt, restored=0):
    base = {"prompt": prompt, "restored": restored, "generated": 3, "ttft": 1.1}
    return {**base, "seconds": 2.5, "sent": 0.0, "text": "x"}


def two_turns():
    rows = [row(4), row(9, restored=7)]
    requests = [
        seen([1, 2, 3, 4], [5, 6, 7]),
        seen([1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 6, 7]),
    ]
    gpu_tables.join_seen(rows, requests)
    return rows


def all_sides():
    rows = {"turns": [], "cold": [], "memory": []}
    for side in SIDES:
        for turn, one in enumerate(two_turns(), 1):
            rows["turns"].append({"side": side, "round": 0, "turn": turn, **one})
        rows["cold"].append({"side": side, "round": 0, **two_turns()[1]})
        memory = {"before": 10, "peak": 20, "after": 12}
        rows["memory"].append({"side": side, "round": 0, **memory})
    return rows


def test_new_tokens_are_those_that_no_earlier_prompt_and_reply_had():
    first, second = two_turns()
    assert (first["new"], second["new"]) == (4, 2)
    assert (first["prefilled"], second["prefilled"]) == (4, 2)
    assert second["speed"] == 2.0


def test_a_seam_behind_the_first_token_is_told_apart():
    way = two_turns()[0]["way"]
    assert way["lookup"] == 0.05 and way["commit (after)"] == 0.25
    assert way["first token"] == 1.0


def test_equal_work_gives_ratios_and_verdicts():
    report = gpu_tables.report(all_sides())
    assert report.equal and "warm TTFT of stock: x 1.000 (MISSED: 0.25)" in report.text
    assert "session of no cache: x 1.000 (MISSED: 1)" in report.text
    assert "peak memory of stock: x 1.000 (met: 1.1)" in report.text


def test_no_ratio_where_one_side_saw_other_ids():
    rows = copy.deepcopy(all_sides())
    rows["turns"][-1]["ids"] = "another"
    report = gpu_tables.report(rows)
    assert not report.equal and "round 0, turn 2" in report.text
    assert "warm TTFT" not in report.text
