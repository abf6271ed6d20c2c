"""The bench of restarts compares sides only where they gave the same reply."""

from __future__ import annotations

from mlx_vlm_cacheplus.replay import session as sessions
from tests.bench import restart as bench


def played(*texts):
    seconds = (0.4, 0.2, 0.1)
    return {
        side: bench.Asked(ttft, 1000, 0 if side == bench.COLD else 900, text)
        for side, ttft, text in zip(bench.SIDES, seconds, texts, strict=True)
    }


def test_ratios_are_to_the_cold_side_and_to_stock():
    rows = bench.rows_of("dense", [played("a", "a", "a")] * 3)
    assert [row[-2:] for row in rows] == [
        ["1.00", "2.00"],
        ["0.50", "1.00"],
        ["0.25", "0.50"],
    ]
    assert [row[3] for row in rows] == ["1000", "100", "100"], "prefilled"


def test_other_replies_have_no_ratio():
    for row in bench.rows_of("dense", [played("a", "a", "b")]):
        assert row[-2:] == ["other work"] * 2


def test_the_last_turn_goes_on_from_the_one_before():
    session = sessions.load("short")
    whole = bench.conversation(session)
    before = bench.conversation(session.first(len(session.turns) - 1))
    assert whole[: len(before)] == before
    other = bench.conversation(session, "another")
    assert other[0] != whole[0] and other[1:] == whole[1:]
