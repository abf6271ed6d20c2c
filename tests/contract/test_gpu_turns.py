"""Replies written in turn: the turns alternate, and the ratio is the one planted."""

from __future__ import annotations

import itertools
import math
import os
import random
import threading
from statistics import fmean

import pytest

from tests.bench.gpu_chain import make_chain
from tests.bench.gpu_pairs import figures
from tests.bench.gpu_turns import (
    Turns,
    crossed,
    differences,
    estimate,
    round_log,
    student,
)

STOCK, PLUS = "no cache", "plus 40 GB"


def rounds(seed, ratio, count=22, tokens=24, servers=0.1):
    """Rows of two servers that differ by ``servers``, on a core that changes its speed."""
    rng = random.Random(seed)
    state, rows = 1.0, []
    for number in range(count):
        seat = number // 3 % 2
        leader = (STOCK, PLUS)[number % 2]
        follower = (PLUS, STOCK)[number % 2]
        times = {STOCK: [], PLUS: []}
        for _, side in itertools.product(range(tokens), (leader, follower)):
            if rng.random() < 0.05:
                state = rng.choice((1.0, 1.8))
            own = 1 + servers if (side == PLUS) == bool(seat) else 1.0
            slower = 1 / ratio if side == PLUS else 1.0
            times[side].append(6 * state * own * slower * math.exp(rng.gauss(0, 0.03)))
        row = {"seat": seat, "leader": leader, "lost": False}
        for side, ms in times.items():
            row[side] = {"prompt": 9, "generated": tokens, "ms": ms, "cpu": ms}
        rows.append(row)
    return rows


@pytest.mark.parametrize("ratio", [1.0, 0.95])
def test_the_ratio_is_found_though_servers_differ_by_ten_percent(ratio):
    rows = rounds(1, ratio)
    found = crossed(rows, [round_log(row, PLUS, STOCK, "ms") for row in rows])
    assert found.ratio == pytest.approx(ratio, abs=0.01)
    assert 0.96 * ratio < found.low < ratio < found.high < 1.04 * ratio


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng, kinds = random.Random(5), [{"seat": number // 3 % 2} for number in range(22)]
    draws = [[rng.gauss(0.05, 0.1) for _ in kinds] for _ in range(400)]
    for found in (estimate, lambda logs: crossed(kinds, logs)):
        held = [e.low < math.exp(0.05) < e.high for e in map(found, draws)]
        assert 0.92 <= fmean(held) <= 0.98, fmean(held)


def test_student_takes_the_wider_of_two_entries():
    assert student(11) == student(10) > student(12)
    assert estimate([0.0, 0.0, 0.0]).low == 1.0


def test_a_round_of_unequal_replies_is_left_out():
    rows = rounds(6, 1.0)
    rows[0][PLUS] = {**rows[0][PLUS], "generated": 3}
    assert figures(rows, PLUS).startswith("22 rounds, 1 left out")


def test_the_target_is_met_by_equal_sides_and_missed_by_a_slower_one():
    assert "0.97 is met" in figures(rounds(2, 1.0), PLUS)
    assert "0.97 is not shown" in figures(rounds(2, 0.95), PLUS)


def test_a_drift_within_the_round_favours_nobody():
    steps = [math.exp(0.02 * i) for i in range(41)]
    assert differences(steps[0::2], steps[1::2]) == pytest.approx([0.0] * 20)


def test_rounds_that_lost_the_turn_are_left_out():
    rows = rounds(3, 1.0)
    rows[0]["lost"] = True
    assert figures(rows, PLUS).startswith("22 rounds, 1 left out")


def test_one_server_on_one_side_gives_no_figure():
    rows = [row for row in rounds(4, 1.0) if row["seat"] == 0]
    with pytest.raises(ValueError):
        crossed(rows, [0.0] * len(rows))


def test_two_threads_write_in_turn(tmp_path):
    pipes = [str(tmp_path / name) for name in "ab"]
    for pipe in pipes:
        os.mkfifo(pipe)
    turns, order, tokens = [Turns(), Turns()], [], 6
    for number, one in enumerate(turns):
        one.sit(pipes[number], pipes[1 - number], leads=number == 1)

    def reply(number):
        for said in range(1, tokens + 1):
            order.append(number)
            turns[number].after(said, tokens)

    threads = [threading.Thread(target=reply, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    # The first tokens come as the prompts are read; from then on it is the leader's turn.
    assert sorted(order[:2]) == [0, 1]
    assert order[2:] == [1, 0] * (tokens - 1)


def test_a_reply_whose_partner_is_gone_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.bench.gpu_turns.FIRST_SECONDS", 0.01)
    pipes = [str(tmp_path / name) for name in "ab"]
    for pipe in pipes:
        os.mkfifo(pipe)
    one = Turns()
    one.sit(*pipes, leads=1)
    assert one.after(1, 9) == (0.0, 0.0)
    assert one.after(2, 9) > (0.0, 0.0)


def test_a_chain_has_its_length_and_its_share_of_errors():
    plan = make_chain(41, 0.2)
    begin, *said = plan["chain"]
    assert len(said) == 41 and len(set(plan["chain"])) == 42
    assert len(plan["wrong"]) == 8 and set(plan["wrong"]) <= {begin, *said[:-1]}
    with pytest.raises(ValueError):
        make_chain(1000, 0.2)
