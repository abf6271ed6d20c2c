"""Where a prefill stops to keep an end state."""

from __future__ import annotations

from mlx_vlm_cacheplus.core.boundaries import (
    NEAREST,
    message_starts,
    rejoin_points,
    stops,
)

BOS, OPEN, CLOSE, PICTURE = 1, 2, 3, 4
SPECIAL = {BOS, OPEN, CLOSE}


def chat(*lengths):
    ids = [BOS]
    for length in lengths:
        ids += [OPEN, *[50] * length, CLOSE]
    return ids


def test_messages_start_at_the_special_token_that_comes_again():
    assert message_starts(chat(3, 2, 1), SPECIAL) == [1, 6, 10]


def test_without_special_tokens_no_message_is_seen():
    assert message_starts([50, 51, 52], SPECIAL) == []
    assert message_starts([BOS, 50, 51], SPECIAL) == []


def test_the_end_of_the_system_text_and_the_last_message_are_where_prompts_rejoin():
    assert rejoin_points([1, 100, 200, 300, 310]) == [100, 300]
    assert rejoin_points([1, 100]) == [100, 1]
    assert rejoin_points([]) == []


def test_a_message_that_starts_right_where_the_prompt_leaves_the_cache_is_no_stop():
    """A turn then costs one step, not one for the line break between two messages."""
    assert rejoin_points([1, 100, 200, 300], left=199) == [100]
    assert rejoin_points([1, 100, 200, 300], left=200) == [100, 200]
    assert rejoin_points([1, 100, 200, 300], left=103) == [100, 200]
    assert rejoin_points([1, 100, 200, 300], left=200 - NEAREST) == [100, 200]


def test_the_stride_is_counted_from_the_stop_before():
    """A short turn is one step, also where it crosses a multiple of the stride."""
    assert stops([2010, 4000], 4200, 2048, 4199, set()) == [2010, 4000, 4199]
    assert stops([2010], 6200, 2048, 6199, set()) == [2010, 4058, 6106, 6199]


def test_wanted_places_stay_however_close_they_are():
    assert stops([985, 988], 1000, 0, 999, set()) == [985, 988, 999]


def test_a_short_last_message_does_not_hide_the_end_of_the_system_text():
    """A new chat with the same system text must find its state."""
    assert stops([985], 996, 256, 995, set()) == [256, 512, 768, 985, 995]


def test_the_stride_gives_way_to_a_wanted_place():
    assert stops([520], 2000, 512, 1999, set()) == [520, 1032, 1544, 1999]
    assert stops([512 + NEAREST], 1000, 512, 999, set()) == [512, 512 + NEAREST, 999]


def test_no_stop_before_a_few_tokens_nor_at_or_behind_the_final_one():
    assert stops([0, 3, 990, 999, 1200], 1000, 0, 990, set()) == [990]


def test_no_stop_lies_inside_media():
    media = set(range(100, 200))
    assert stops([150], 1000, 110, 999, media) == [
        220,
        330,
        440,
        550,
        660,
        770,
        880,
        999,
    ]


def test_a_stop_may_lie_right_before_or_behind_media():
    media = set(range(100, 200))
    assert stops([100, 200], 1000, 0, 999, media) == [100, 200, 999]


def test_where_stock_allows_no_final_stop_there_is_none():
    assert stops([], 1000, 0, 0, set()) == []
    assert stops([500], 1000, 256, 0, set()) == []


def test_every_stop_is_before_the_end_and_in_order():
    got = stops([700, 40, 300], 900, 64, 899, {5, 6, 7})
    assert got == sorted(set(got)) and got[-1] == 899
    gaps = [b - a for a, b in zip([0, *got], got, strict=False)]
    # A stride stop that gave way leaves at most one near stop's distance more.
    assert max(gaps) <= 64 + NEAREST
