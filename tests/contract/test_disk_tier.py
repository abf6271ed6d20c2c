"""What goes to disk and comes back is what a cold cache would hold, on every layout."""

from __future__ import annotations

import os

import pytest

from mlx_vlm_cacheplus.core.disk_folder import ENTRIES
from tests.contract.disk_server import SECONDS, quick, session, start
from tests.fakes.token_caches import LAYOUTS, nodes_of

__all__ = ["quick", "start"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_restart_between_all_turns(start, layout):
    """What is restored is checked against a cold cache in ``ask``."""
    before = 0
    for prompt, reply in session():
        server = start(layout)
        assert server.turn(prompt, reply) == before
        server.stop()
        before = len(prompt) + len(reply)


@pytest.mark.parametrize("layout", ["dense", "hybrid", "recurrent"])
def test_each_token_is_written_once_and_one_state_a_turn(start, layout):
    server, created = start(layout), 0
    for prompt, reply in session(18):
        server.turn(prompt, reply)
        ids = [*prompt, *reply]
        (tree,) = server.cache._trees.values()
        (last,) = [n for n in tree.match(ids).nodes if n.end == len(ids)]
        states = sum(s.nbytes for s in last.payload.states or ())
        created += states
    kv = sum(
        a.nbytes for n in nodes_of(server.cache) for s in n.payload.spans for a in s
    )
    server.flush()
    arrays = 0
    for entry in server.store.all_entries():
        content = server.store.read(entry)
        arrays += len(content) - 8 - int.from_bytes(content[:8], "little")
    assert arrays <= 1.2 * (kv + created)
    tokens = sum(e.stop - e.start for e in server.store.all_entries())
    assert tokens == len(prompt) + len(reply)


@pytest.mark.parametrize("layout", ["dense", "hybrid", "recurrent"])
def test_a_prompt_is_written_while_its_reply_is(start, layout):
    """At the end the reply's tokens and its end state are left to write."""
    server = start(layout)
    for prompt, reply in session(5):
        server.turn(prompt, reply[:0])
        server.flush()
        before = server.store.all_entries()
        assert max(e.stop for e in before) == len(prompt)
        server.end(prompt, reply)
        server.flush()
        numbers = {e.number for e in before}
        (added,) = [e for e in server.store.all_entries() if e.number not in numbers]
        assert (added.start, added.stop) == (len(prompt), len(prompt) + len(reply))
        assert added.has_state == (layout != "dense")


def test_paths_that_part(start):
    """A chat that leaves another inside a span, and a state where they part."""
    server = start("hybrid")
    server.turn([1, 2, 3, 4, 5], [6, 7])
    server.turn([1, 2, 3, 9, 9], [8])
    server.turn([1, 2, 3, 4, 5, 6, 7, 1], [2])
    server.stop()
    server = start("hybrid")
    assert server.ask([1, 2, 3, 4, 5, 6, 7, 1, 2, 0])[0] == 9
    assert server.ask([1, 2, 3, 9, 9, 8, 0])[0] == 6
    server.turn([1, 2, 3, 9, 9, 8, 0], [0])
    server.stop()
    server = start("hybrid")
    assert server.ask([1, 2, 3, 9, 9, 8, 0, 0, 5])[0] == 8


def test_a_dense_prompt_is_restored_up_to_where_it_leaves(start):
    server = start("dense")
    server.turn(list(range(20)), [20, 21])
    server.stop()
    server = start("dense")
    assert server.ask([*range(7), 99, 98])[0] == 7
    # What was left on disk of that span comes when it is wanted.
    assert server.ask([*range(22), 5])[0] == 22


def test_salts_and_identities_meet_nowhere(start):
    server = start("dense")
    server.turn([1, 2, 3], [4], salt=5)
    server.stop()
    assert start("dense").ask([1, 2, 3, 4, 5], salt=6)[0] == 0
    other = start("dense", identity="other weights")
    assert other.ask([1, 2, 3, 4, 5], salt=5)[0] == 0
    other.stop()


@pytest.mark.parametrize("salt", [-(2**63), 2**256 - 1])
def test_a_salt_has_as_many_bits_as_it_likes(start, salt):
    server = start("dense")
    server.turn([1, 2, 3], [4], salt=salt)
    server.stop()
    server = start("dense")
    assert server.ask([1, 2, 3, 4, 5], salt=salt)[0] == 4
    server.stop()


def test_what_ram_has_lost_comes_back(start):
    server = start("hybrid", room=12_000)
    talks = [session(3, seed) for seed in range(4)]
    for turn in range(3):
        for talk in talks:
            before = 0 if not turn else len(talk[turn - 1][0] + talk[turn - 1][1])
            assert server.turn(*talk[turn]) == before
            server.flush()
    assert server.cache.evictions and server.tier.intake.hits
    assert server.cache.nbytes <= 12_000


def test_nothing_is_read_where_ram_has_it_all(start):
    server = start("dense")
    server.tier.intake.has_more = False
    server.turn([1, 2, 3], [4])
    assert server.tier.ask([1, 2, 3, 4, 5], 0) is None
    server.cache.clear()
    assert server.ask([1, 2, 3, 4, 5])[0] == 0 or server.tier.intake.hits == 1


def test_the_cap_keeps_what_is_used(start):
    """Other models' paths go first, then what was used least recently."""
    other = start("dense", identity="other")
    other.turn(list(range(50)), [1])
    other.stop()
    talks = [session(3, seed) for seed in range(12)]
    probe = start("dense", folder=other.store.folder.path.parent / "probe")
    for prompt, reply in talks[0]:
        probe.turn(prompt, reply)
    probe.flush()
    size = probe.store.nbytes
    server = start("dense", max_bytes=5 * size)
    for talk in talks:
        for prompt, reply in talk:
            server.turn(prompt, reply)
            server.flush()
            assert server.store.nbytes <= 5 * size
    server.stop()
    server = start("dense")
    assert all(root[1] == "weights" for root in server.store.all_roots())
    kept = [server.ask([*t[-1][0], *t[-1][1], 0])[0] > 0 for t in talks]
    assert kept[-3:] == [True] * 3 and kept[0] is False


def test_the_first_path_of_a_model_finds_a_full_disk(start):
    """All that is there is another model's, and goes."""
    other = start("dense", identity="other")
    other.turn(list(range(200)), [1])
    other.stop()
    server = start("dense", max_bytes=other.store.nbytes + 10)
    server.turn(list(range(50, 60)), [1, 2])
    server.stop()
    assert server.store.evictions
    assert start("dense").ask([*range(50, 60), 1, 2, 0])[0] == 12


def test_an_entry_that_never_fits_is_refused_once(start, caplog):
    server = start("dense", max_bytes=3_000)
    server.turn([1, 2], [3])
    server.flush()
    held = server.store.nbytes
    server.turn([9, *range(300)], [1])
    server.turn([8, *range(300)], [1])
    server.flush()
    assert caplog.text.count("does not fit the disk cache") == 1
    assert server.tier.statistics()["disk_refused_entries"] >= 2
    assert server.store.nbytes == held


def test_a_load_that_costs_more_than_the_model_is_not_made(start):
    server = start("dense")
    server.turn(list(range(20)), [1])
    server.stop()
    server = start("dense")
    server.tier.measure_prefill(1_000_000, 0.001)
    assert server.ask([*range(20), 1, 2])[0] == 21, "measured while it is not known"
    server.cache.clear()
    server.tier.reader.rate = 1.0
    assert server.ask([*range(20), 1, 2])[0] == 0
    assert server.tier.statistics()["disk_declined_loads"] == 1


def test_clear_leaves_nothing(start):
    server = start("dense")
    server.turn([1, 2, 3], [4])
    server.flush()
    assert server.tier.clear(SECONDS) == 2
    server.cache.clear()
    assert server.ask([1, 2, 3, 4, 5])[0] == 0
    assert os.listdir(server.store.folder.path / ENTRIES) == []
    server.turn([1, 2, 3], [4])
    server.stop()
    assert start("dense").ask([1, 2, 3, 4, 5])[0] == 4


def test_what_was_written_while_the_disk_was_cleared_is_written_again(
    start, monkeypatch
):
    server = start("dense")
    real = server.tier.writer.do

    def do(job):
        server.turn([1, 2, 3], [4])
        real(job)

    with monkeypatch.context() as patch:
        patch.setattr(server.tier.writer, "do", do)
        assert server.tier.clear(SECONDS) > 0
    server.turn([1, 2, 3, 4, 5], [6])
    server.stop()
    assert start("dense").ask([1, 2, 3, 4, 5, 6, 7])[0] == 6


def test_weights_that_turn_out_to_be_others(start, caplog):
    """What a sample did not show: all of it goes, in RAM too, and nothing is kept on."""
    server = start("dense")
    server.turn([1, 2, 3], [4])
    server.flush()
    server.tier.distrust({"content x": ""})
    server.tier.tick()
    assert not nodes_of(server.cache)
    assert server.turn([1, 2, 3], [4]) == 0
    server.stop()
    assert start("dense").ask([1, 2, 3, 4, 5])[0] == 0


def test_a_session_that_is_forgotten_leaves_the_disk(start):
    """What others go on from stays."""
    server = start("dense")
    server.turn([1, 2, 3], [4])
    server.turn([1, 2, 3, 4, 5, 6], [7])
    server.turn([1, 2, 3, 4, 8], [9])
    server.flush()
    server.tier.forget("", [(0, (1, 2, 3, 4, 5, 6, 7), 4)])
    server.stop()
    server = start("dense")
    assert server.ask([1, 2, 3, 4, 5, 6, 7, 0])[0] == 4
    assert server.ask([1, 2, 3, 4, 8, 9, 0])[0] == 6
