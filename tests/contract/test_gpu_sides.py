"""Sides of one process: what is played before it is timed, and who has which core."""

from __future__ import annotations

import argparse

import pytest

from tests.bench import gpu_cores, gpu_sides
from tests.bench.gpu_inputs import Plan
from tests.bench.gpu_sides import FIRST, Played

LATE, NEVER = 1e9, 0.0


@pytest.fixture
def played(tmp_path, monkeypatch):
    """A model whose sessions take no time; ``plays``: side and number of each."""
    options = argparse.Namespace(twice=True, out=tmp_path)
    model = Played(Plan("", [], []), options, tmp_path, tmp_path)
    model.shape, model.plays = "shape", []
    monkeypatch.setattr(model, "played", lambda *play: model.plays.append(play))
    monkeypatch.setattr(gpu_sides.time, "monotonic", lambda: 1.0)
    return model


def test_each_side_is_played_once_before_it_is_timed(played):
    for number in range(2):
        played.play("ab", number, LATE)
    first = [("a", FIRST), ("a", 0), ("b", FIRST), ("b", 0)]
    assert played.plays == [*first, ("a", 1), ("b", 1)]


def test_a_side_without_time_in_the_first_round_still_gets_its_first_play(played):
    played.play("a", 0, LATE)
    played.play("b", 0, NEVER)
    played.play("ab", 1, LATE)
    assert played.plays[2:] == [("a", 1), ("b", FIRST), ("b", 1)]


def test_a_side_whose_first_play_failed_gets_another(played, monkeypatch):
    plays = played.plays

    def broken(side, number):
        plays.append((side, number))
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(played, "played", broken)
        played.play("a", 0, LATE)
    played.play("a", 1, LATE)
    assert plays == [("a", FIRST), ("a", FIRST), ("a", 1)]
    assert len(played.rows["failed"]) == 1


def test_halves_of_the_cores_are_whole_and_disjoint(monkeypatch):
    monkeypatch.setattr(gpu_cores, "siblings", lambda core: {core % 4, core % 4 + 4})
    assert gpu_cores.halves(set(range(8))) == ([0, 1, 4, 5], [2, 3, 6, 7])
    assert gpu_cores.parse("0-2,8\n") == {0, 1, 2, 8}
