"""Which whole states give way to a newer one of the same conversation."""

from __future__ import annotations

import threading
from collections import OrderedDict
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_vlm_cacheplus.core import superseded_states as core


class Manager:
    """The table and the budget of stock's manager; each state has ``size`` bytes."""

    def __init__(self, *states, places=8, budget=10_000, size=400):
        self.lock = threading.RLock()
        self._exact_cache_max = places
        self.memory_max_bytes = budget
        self.size = size
        self._exact_cache = OrderedDict(
            (index, SimpleNamespace(token_ids=tuple(ids), extra_hash=salt))
            for index, (ids, salt) in enumerate(states)
        )

    def _resident_bytes_locked(self):
        return self.size * len(self._exact_cache)

    def keys(self):
        return [(e.token_ids, e.extra_hash) for e in self._exact_cache.values()]


class State(SimpleNamespace):
    """One layer of ``size`` bytes."""

    @classmethod
    def of(cls, size):
        return cls(state=[mx.zeros(size // 4)], nbytes=size)


ONE, TWO, THREE = (1,), (1, 2), (1, 2, 3)


def make_room(manager, ids=(1, 2, 3, 4), salt=0, size=400):
    return core.make_room_for_successor(manager, ids, salt, size)


def test_with_room_to_spare_nothing_goes():
    manager = Manager((ONE, 0), (TWO, 0))
    assert make_room(manager) == 0
    assert manager.keys() == [(ONE, 0), (TWO, 0)]


def test_the_shortest_goes_first_and_no_more_than_needed():
    manager = Manager((THREE, 0), (ONE, 0), (TWO, 0), places=3)
    assert make_room(manager) == 1
    assert manager.keys() == [(THREE, 0), (TWO, 0)]


def test_bytes_count_as_places_do():
    manager = Manager((ONE, 0), (TWO, 0), (THREE, 0), budget=1300)
    assert make_room(manager, size=800) == 2
    assert manager.keys() == [(THREE, 0)]


def test_another_salt_is_never_touched():
    manager = Manager((ONE, 5), (TWO, 5), places=2)
    assert make_room(manager, salt=6) == 0
    assert manager.keys() == [(ONE, 5), (TWO, 5)]


def test_other_conversations_and_longer_states_stay():
    others = [((9,), 0), ((1, 9), 0), ((1, 2, 3, 4, 5), 0), ((1, 2, 3, 4), 0)]
    manager = Manager(*others, places=4)
    assert make_room(manager) == 0
    assert manager.keys() == others


def test_a_state_that_is_stored_again_takes_its_own_place():
    manager = Manager((ONE, 0), ((1, 2, 3, 4), 0), places=2, budget=800)
    assert make_room(manager) == 0
    assert manager.keys() == [(ONE, 0), ((1, 2, 3, 4), 0)]


@pytest.mark.parametrize(
    "planned, kept", [([], []), ([5], [5]), ([1, 2, 3, 4], [3, 4])]
)
def test_one_prompt_captures_its_deepest_states(planned, kept):
    assert core.bounded_captures(planned) == kept
