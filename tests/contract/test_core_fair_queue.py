"""Who is admitted next, and by how much a prompt is overtaken."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from mlx_vlm_cacheplus.core import fair_queue as core


def row(uid, length):
    """A queue entry, as far as the order looks at it."""
    return (uid, range(length))


class Generator(SimpleNamespace):
    """A batch generator's queue: sorted at each arrival, the first are admitted."""

    def __init__(self, places):
        super().__init__(
            prefill_batch_size=places, _prompt_batch=None, _unprocessed_sequences=[]
        )
        self.admitted: list[list[tuple]] = []

    def insert(self, *rows):
        queue = [*self._unprocessed_sequences, *rows]
        self._unprocessed_sequences = sorted(queue, key=lambda entry: len(entry[1]))

    def step(self):
        with core.in_fair_order(self):
            queue, places = self._unprocessed_sequences, self.prefill_batch_size
            self.admitted.append(queue[:places])
            self._unprocessed_sequences = queue[places:]

    @property
    def order(self):
        return [[uid for uid, _ in rows] for rows in self.admitted if rows]


def overtaken_by(generator, uid):
    """Tokens of later prompts that were admitted in earlier steps than this one."""
    tokens = 0
    for rows in generator.admitted:
        if any(own == uid for own, _ in rows):
            return tokens
        tokens += sum(len(ids) for own, ids in rows if own > uid)
    raise AssertionError(f"{uid} was never admitted")


def test_the_shortest_goes_first():
    generator = Generator(1)
    generator.insert(row(0, 900), row(1, 300), row(2, 20))
    for _ in range(3):
        generator.step()
    assert generator.order == [[2], [1], [0]]


@pytest.mark.parametrize("places", [1, 2, 8])
def test_a_long_prompt_waits_for_as_many_tokens_as_it_has(places):
    generator = Generator(places)
    generator.insert(row(0, 100))
    for uid in range(1, 200):
        generator.insert(row(uid, 10))
        if uid > 16 and uid % places == 0:
            generator.step()
    assert 100 - 10 * places < overtaken_by(generator, 0) <= 100


def test_who_comes_first_waits_for_nobody():
    generator = Generator(1)
    generator.insert(row(0, 10), row(1, 100))
    generator.step()
    assert generator.order == [[0]] and generator.overtaken == {}


def test_the_oldest_of_those_that_must_go_first_goes_first():
    """The short one may pass the oldest, but not the second, which must not pass either."""
    queue = [row(2, 60), row(1, 80), row(0, 100)]
    spent = {0: 30, 1: 30}
    assert [uid for uid, _ in core.line_up(queue, spent, 1)] == [0, 2, 1]


def test_the_order_is_left_alone_where_nobody_is_kept_waiting():
    queue = [row(7, 5), row(3, 4), row(9, 50), row(8, 40)]
    assert core.line_up(queue, {}, 4) == [queue[1], queue[0], queue[3], queue[2]]
    queue = [row(3, 4), row(7, 5), row(8, 40), row(9, 50)]
    assert core.line_up(queue, {}, 4) == queue


def test_a_step_that_admits_nobody_decides_nothing():
    generator = Generator(1)
    generator._prompt_batch = object()
    generator.insert(row(0, 900), row(1, 20))
    queue = generator._unprocessed_sequences
    with core.in_fair_order(generator):
        assert generator._unprocessed_sequences is queue
    assert not hasattr(generator, "overtaken")


def test_while_nobody_comes_or_goes_nothing_is_decided_again(monkeypatch):
    """A full batch decodes for hundreds of steps with the same queue behind it."""
    lined_up = []

    def counted(*args):
        lined_up.append(1)
        return line_up(*args)

    line_up = core.line_up
    monkeypatch.setattr(core, "line_up", counted)
    generator = Generator(1)
    generator.insert(row(0, 100), row(1, 90), row(2, 90))
    generator.step()
    assert generator.order == [[1]] and len(lined_up) == 1
    for _ in range(5):
        with core.in_fair_order(generator):
            assert [uid for uid, _ in generator._unprocessed_sequences] == [0, 2]
            # Whoever else orders the queue does not undo the decision.
            generator._unprocessed_sequences.reverse()
    assert len(lined_up) == 2
    generator.insert(row(3, 5))
    for _ in range(3):
        generator.step()
    assert generator.order == [[1], [3], [0], [2]] and len(lined_up) == 4


def test_a_prompt_that_comes_back_to_the_queue_has_overtaken_nobody():
    """Rows whose prefill has raised are tried again."""
    generator = Generator(1)
    generator.insert(row(0, 100), row(1, 20))
    with core.in_fair_order(generator):
        assert [uid for uid, _ in generator._unprocessed_sequences] == [1, 0]
    assert generator.overtaken == {}


def test_what_has_left_the_queue_is_forgotten():
    generator = Generator(1)
    generator.insert(row(0, 100), row(1, 20), row(2, 30), row(3, 40))
    generator.step()
    assert generator.overtaken == {0: 20}
    generator._unprocessed_sequences = generator._unprocessed_sequences[:2]
    generator.step()
    assert generator.overtaken == {}


@pytest.mark.parametrize("seed", range(20))
def test_no_prompt_is_overtaken_by_more_than_itself(seed):
    chance = random.Random(seed)
    generator = Generator(chance.choice((1, 2, 4, 8)))
    lengths = [chance.choice((5, 20, 60, 300, 2000)) for _ in range(120)]
    waiting = list(enumerate(lengths))
    while waiting or generator._unprocessed_sequences:
        arriving = chance.randint(0, 6)
        generator.insert(*(row(uid, n) for uid, n in waiting[:arriving]))
        waiting = waiting[arriving:]
        generator.step()
    for uid, length in enumerate(lengths):
        assert overtaken_by(generator, uid) <= length
