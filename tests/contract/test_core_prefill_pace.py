"""How large a chunk may be while rows decode, from the gaps that they had."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mlx_vlm_cacheplus.core import prefill_pace
from mlx_vlm_cacheplus.core.prefill_pace import PrefillPace

SIZE, MOST = 512, 2048


def told(seconds, steps=12, rows=1, compiles=0.0):
    """Sizes that are chosen in turn, where a chunk of n tokens takes ``seconds(n)``.

    The first chunk of a size takes ``compiles`` more.
    """
    pace, now, chosen = PrefillPace(), 0.0, []
    for _ in range(steps):
        pace.rounds_ended(now, rows)
        size = pace.chunk(SIZE, MOST)
        now += seconds(size) + compiles * (size not in chosen)
        chosen.append(size)
        pace.chunk_read(size)
    return chosen


@pytest.mark.parametrize(
    ("seconds", "last"),
    [
        (lambda n: n / 1000, 512),  # a larger one would stall the rows
        (lambda n: n / 2500, 512),  # ... and one that does not is no faster
        (lambda n: 0.2 + n / 50000, 2048),
        (lambda n: 0.2 + n / 3000, 1024),  # 2,048 tokens would take too long
        (lambda n: 0.02, 2048),
        (lambda n: 9.0, 512),
    ],
)
def test_a_chunk_grows_where_that_reads_faster_and_stalls_nobody(seconds, last):
    assert told(seconds)[-1] == last
    assert told(seconds, compiles=20.0)[-1] == last, "a first use decides nothing"


def test_a_size_that_has_become_slow_is_left():
    pace = PrefillPace()
    for size in (512, 1024):
        for number in range(3):
            pace.rounds_ended(0.1 * number, 1)
            pace.chunk_read(size)
        pace.rounds_ended(0.3, 0)
    assert pace.chunk(SIZE, MOST) == 2048
    for number in range(5):
        pace.rounds_ended(2.0 * number, 1)
        pace.chunk_read(1024)
    assert pace.chunk(SIZE, MOST) == SIZE


def test_only_gaps_that_a_whole_chunk_made_count():
    assert told(lambda n: 0.02, rows=0)[-1] == SIZE, "nobody waited"
    pace = PrefillPace()
    for number in range(9):  # rounds without a chunk, and the end of a prompt
        pace.rounds_ended(0.02 * number, 1)
        pace.chunk_read(0 if number % 2 else 300)
    assert pace.chunk(SIZE, MOST) == SIZE


@pytest.mark.parametrize("most", [64, 512, 700])
def test_no_chunk_is_larger_than_asked_for(most):
    pace = PrefillPace()
    for number in range(9):
        pace.rounds_ended(0.01 * number, 1)
        pace.chunk_read(512)
    assert pace.chunk(min(SIZE, most), most) == min(SIZE, most)


def test_what_was_seen_stays_with_the_loaded_drafter():
    drafter = SimpleNamespace()
    pace = prefill_pace.pace_of(drafter)
    assert prefill_pace.pace_of(drafter) is pace
    assert prefill_pace.pace_of(SimpleNamespace()) is not pace
