"""What rounds have taken decides whether batches are better together."""

from __future__ import annotations

import pytest

from mlx_vlm_cacheplus.core import merge_pace
from mlx_vlm_cacheplus.core.merge_pace import (
    ENOUGH,
    QUICKEST_OF,
    RETRY,
    Average,
    Pace,
    check_mode,
)


def measured(*shapes):
    """A pace that has seen enough rounds of (rows, seconds, tokens)."""
    pace = Pace()
    for rows, seconds, tokens in shapes:
        for _ in range(ENOUGH):
            pace.add(rows, width=4, seconds=seconds, tokens=tokens)
    return pace


@pytest.mark.parametrize("known", [(), ((1, 0.01, 3),), ((2, 0.01, 3),)])
def test_what_was_not_measured_is_tried(known):
    assert measured(*known).slower_together(1, 1) is None


def test_fewer_rounds_than_enough_are_not_known():
    pace = measured((1, 0.01, 3))
    for _ in range(ENOUGH - 1):
        pace.add(rows=2, width=4, seconds=9, tokens=1)
    assert pace.slower_together(1, 1) is None
    pace.add(rows=2, width=4, seconds=9, tokens=1)
    assert pace.slower_together(1, 1) is not None


def test_a_round_for_two_that_is_cheaper_than_two_rounds():
    pace = measured((1, 0.010, 3), (2, 0.015, 5))
    assert pace.rate(1, 1) == pytest.approx(300)
    assert pace.rate(2) == pytest.approx(333.3, rel=1e-3)
    assert pace.slower_together(1, 1) is None


def test_fewer_accepted_tokens_can_cost_more_than_a_round_saves():
    pace = measured((1, 0.010, 3), (2, 0.018, 4))
    reason = pace.slower_together(1, 1)
    assert reason is not None and "222 tokens per second in place of 300" in reason


@pytest.mark.parametrize(("tokens", "joins"), [(5.5, True), (5.3, False)])
def test_a_small_difference_is_none(tokens, joins):
    pace = measured((1, 0.01, 3), (2, 0.02, tokens))
    assert (pace.slower_together(1, 1) is None) == joins


def test_batches_of_several_rows():
    pace = measured((1, 0.01, 3), (2, 0.012, 5), (3, 0.03, 7))
    assert pace.rate(2, 1) == pytest.approx(8 / 0.022)
    assert pace.slower_together(2, 1) is not None
    assert pace.slower_together(1, 1) is None


def test_what_was_slower_is_tried_again_after_a_while():
    pace = measured((1, 0.01, 3), (2, 0.1, 5))
    refused = [pace.slower_together(1, 1) is not None for _ in range(RETRY + 1)]
    assert refused == [True] * RETRY + [False]
    assert pace.rate(1) is not None and pace.rate(2) is None
    assert 2 not in pace.averages


def test_the_widths_of_late_count():
    pace = measured((1, 0.01, 3), (2, 0.1, 5))
    assert pace.slower_together(1, 1) is not None
    for _ in range(300):
        pace.add(rows=2, width=2, seconds=0.011, tokens=5)
    assert pace.slower_together(1, 1) is None
    assert pace.rate(2) == pytest.approx(5 / 0.011, rel=1e-2)
    assert pace.averages[2].keys() == {2, 4}


def test_the_last_round_of_a_reply_does_not_decide():
    pace = measured(*[(1, 0.01, 3)] * 5, (2, 0.012, 5))
    for _ in range(2):
        pace.add(rows=2, width=2, seconds=0.012, tokens=1)
    assert pace.slower_together(1, 1) is None


def test_a_pause_is_not_the_cost_of_a_round():
    average = Average()
    for seconds in (5.0, 0.011, 0.01, 60.0):
        average.add(seconds, 2)
    assert average.seconds == 0.01
    for _ in range(QUICKEST_OF):
        average.add(0.02, 2)
    assert average.seconds == 0.02, "it has become slower"


@pytest.mark.parametrize("compiled", [(9.0,), (9.0, 4.0, 9.0, 0.3, 0.012)])
def test_rounds_that_compile_do_not_keep_rows_apart(compiled):
    """Not for as long as they are apart, in which nothing new is learned of them."""
    pace = measured((1, 0.01, 3))
    for seconds in (*compiled, *[0.012] * (ENOUGH - len(compiled))):
        pace.add(rows=2, width=4, seconds=seconds, tokens=6)
    pace.add(rows=2, width=3, seconds=7.0, tokens=6)
    assert pace.rate(2) == pytest.approx(6 / 0.012)
    assert pace.slower_together(1, 1) is None


def test_modes():
    assert [check_mode(mode) for mode in merge_pace.MODES] == list(merge_pace.MODES)
    with pytest.raises(ValueError, match="auto, always, never"):
        check_mode("sometimes")


@pytest.mark.parametrize("word", ["off", "0", "Never"])
def test_a_word_that_is_no_mode_does_not_join(monkeypatch, caplog, word):
    """Where no option checks it at start; said once, not in every round."""
    monkeypatch.setenv(merge_pace.MODE, word)
    merge_pace._known.cache_clear()
    assert [merge_pace.mode() for _ in range(3)] == ["never"] * 3
    assert caplog.text.count("give one of auto, always, never") == 1
