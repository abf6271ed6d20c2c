"""Whose entries go first where a disk store is full, as RAM has it, and after a restart too."""

from __future__ import annotations

import dataclasses

import pytest

from mlx_vlm_cacheplus.core.disk_index import SPAN, STATE, Entry
from mlx_vlm_cacheplus.core.disk_policy import TICKS, Asking, Root, order
from mlx_vlm_cacheplus.core.session_table import IDLE_AFTER
from tests.contract.disk_server import session, start

__all__ = ["start"]
MINE, OTHER = 1, 2
DENSE = {MINE: Root(0, False)}
HYBRID = {MINE: Root(0, True)}


class Rows:
    """Entries as a store has them: each use is a tick of its clock."""

    def __init__(self):
        self.rows, self.clock = {}, 0

    def add(self, parent=0, whose="", nbytes=10, kind=SPAN, root=MINE, **more):
        """A turn's entry at the end of its parent; returns its number."""
        self.clock += 1
        number, below = len(self.rows) + 1, self.rows.get(parent)
        begin = below.stop if below else 0
        stop = begin if kind == STATE else begin + 10
        turns = more.pop("turns", str(stop) if kind == SPAN else "")
        fields = {"has_state": 0, "companion": "", **more}
        self.rows[number] = Entry(
            *(number, root, parent, kind, begin, stop, f"{number:x}", nbytes, b""),
            *(fields["has_state"], fields["companion"], self.clock, turns, whose),
            self.clock,
        )
        while below is not None:
            used = dataclasses.replace(below, last_use=self.clock)
            self.rows[below.number] = used
            below = self.rows.get(below.parent)
        return number

    def talk(self, whose, turns, nbytes=10, parent=0):
        """A conversation; returns its entries."""
        made = []
        for _ in range(turns):
            parent = self.add(parent, whose, nbytes)
            made.append(parent)
        return made

    def order(self, budget, roots=DENSE, asking=None, **more):
        return list(
            order(self.rows.values(), roots, budget, self.clock, asking, **more)
        )

    def lost(self, budget, asking=None, **more):
        """What goes until the budget is kept, for so many bytes that are asked for."""
        held, gone = sum(row.nbytes for row in self.rows.values()), []
        wanted = asking.nbytes if asking else 0
        for number in self.order(budget, asking=asking, **more):
            if held + wanted <= budget:
                break
            held -= self.rows[number].nbytes
            gone.append(number)
        return gone


def test_paths_of_other_models_go_first():
    rows = Rows()
    mine = rows.talk("a", 2)
    other = [rows.add(root=OTHER), rows.add(root=OTHER)]
    assert rows.order(0) == [*other, *reversed(mine)]


def test_prompts_that_nobody_extended_go_before_conversations():
    rows = Rows()
    talk = rows.talk("a", 3)
    once = [rows.add(whose=f"~{n}") for n in range(4)]
    assert rows.lost(40) == once[:3]
    assert rows.order(0)[-3:] == list(reversed(talk))


def test_who_takes_much_loses_it_though_others_were_used_before():
    rows = Rows()
    small = rows.talk("small", 3)
    large = rows.talk("large", 12)
    gone = rows.lost(110, Asking((0, "large"), 10))
    assert gone == [large[-1], large[-2], large[-3], large[-4], large[-5]]
    assert not set(gone) & set(small)


def test_room_for_more_than_a_share_is_not_taken_from_those_within_theirs():
    rows = Rows()
    rows.talk("small", 3)
    large = rows.talk("large", 2)
    assert rows.order(60, asking=Asking((0, "large"), 200)) == large[::-1]
    assert rows.order(60, asking=Asking((0, "large"), 200, large)) == []


def test_idle_sessions_have_no_share():
    rows = Rows()
    idle = rows.talk("idle", 2)
    rows.clock += TICKS * IDLE_AFTER
    live = rows.talk("live", 6)
    gone = rows.lost(60, Asking((0, "live"), 10))
    assert gone[:2] == list(reversed(idle)) and gone[2:] == [live[-1]]


def test_a_name_is_another_ones_under_another_salt():
    rows = Rows()
    roots = {MINE: Root(5, False), OTHER: Root(6, False)}
    first = rows.talk("main", 2)
    numbers = [rows.add(whose="main", root=OTHER, nbytes=10)]
    for _ in range(8):
        numbers.append(rows.add(numbers[-1], "main", root=OTHER))
    gone = rows.lost(90, Asking((6, "main"), 10), roots=roots)
    assert gone and not set(gone) & set(first)


def test_what_several_stand_on_goes_last():
    rows = Rows()
    system = rows.add(whose="a", turns="")
    a, b = rows.talk("a", 3, parent=system), rows.talk("b", 3, parent=system)
    assert rows.order(0)[-1] == system
    assert set(rows.order(0)[:-1]) == {*a, *b}


def test_what_nobody_can_resume_goes_first():
    """A prompt that was written ahead, whose reply never came."""
    rows = Rows()
    whole = rows.add(whose="a", has_state=1)
    bare = rows.add(whole, "a")
    other = rows.add(whose="b", has_state=1)
    assert rows.order(0, HYBRID)[0] == bare
    assert set(rows.order(0, HYBRID)) == {whole, bare, other}


def test_superseded_states_that_were_kept_later_go_alone():
    rows = Rows()
    first = rows.add(whose="a")
    state = rows.add(first, kind=STATE, has_state=1)
    second = rows.add(first, "a", has_state=1)
    assert rows.order(0, HYBRID) == [state, second, first]


def test_a_turn_that_was_rewritten_goes_before_what_took_its_place():
    rows = Rows()
    base = rows.talk("a", 2)
    left = rows.add(base[-1], "a")
    rows.talk("a", 2, parent=base[-1])
    assert rows.lost(40) == [left]


def test_pinned_sessions_stay():
    rows = Rows()
    pinned = rows.talk("pinned", 2)
    rows.talk("a", 2)
    gone = rows.order(0, pinned=frozenset({"pinned"}))
    assert gone and not set(gone) & set(pinned)


@pytest.mark.parametrize("layout", ["dense", "hybrid"])
def test_whose_an_entry_is_outlives_the_server(start, layout):
    """Two that go on and one that does not; none of them says its name."""
    talks = [session(3, seed) for seed in (1, 2)]
    owners = []
    for turn in range(3):
        server = start(layout, sessions=True)
        for talk in talks:
            server.turn(*talk[turn])
        server.flush()
        entries = server.store.all_entries()
        owners.append({entry.session for entry in entries})
        before = list(server.tier.order(entries))
        server.stop()
        server = start(layout, sessions=True)
        assert list(server.tier.order(server.store.all_entries())) == before
        server.stop()
    assert len(owners[0]) == 2 and "" not in owners[0]
    assert owners[1:] == [owners[0], owners[0]]


def test_a_session_within_its_share_keeps_the_disk(start):
    """Used before all of the others, and still there."""
    probe = start("dense", identity="probe", sessions=True)
    for prompt, reply in session(3, seed=50):
        probe.turn(prompt, reply)
    probe.flush()
    size = probe.store.nbytes
    probe.stop()
    server = start("dense", max_bytes=4 * size, sessions=True)
    small, large = session(3, seed=51), session(30, seed=52)
    for prompt, reply in [*small, *large]:
        server.turn(prompt, reply)
        server.flush()
        assert server.store.nbytes <= 4 * size
    server.stop()
    prompt, reply = small[-1]
    assert start("dense").ask([*prompt, *reply, 0])[0] == len(prompt) + len(reply)
