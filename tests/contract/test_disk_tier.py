"""What goes to disk and comes back is what a cold cache would hold, on every layout."""

from __future__ import annotations

import os
import sqlite3

import mlx.core as mx
import pytest

from mlx_vlm_cacheplus.core.disk_folder import ENTRIES
from mlx_vlm_cacheplus.core.disk_index import COMPANION, INDEX, SPAN
from mlx_vlm_cacheplus.core.draft_state import DraftPart, DraftView
from tests.contract.disk_server import SECONDS, quick, server_entries, session, start
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


IDENTITY = ("eagle3", "Drafter", 1)
OTHER = ("dflash", "Drafter", 2)


class Drafter:
    """A companion source: one entry a token, which is the token's id."""

    def __init__(self, ids, identity=IDENTITY):
        self.ids, self.identity = ids, identity

    def wants(self, segment, start):
        return segment.companion_identity != self.identity

    def capture(self, start, stop):
        span = mx.array(self.ids[start:stop], dtype=mx.bfloat16).reshape(1, 1, -1, 1)
        at_end = stop == len(self.ids)
        pending = mx.array([[[float(stop)]]]) if at_end else None
        return DraftPart(self.identity, [(span, -span)], pending)

    def span_nbytes(self, tokens):
        return 4 * tokens


def drafted(server, ids, drafter, identity=IDENTITY):
    """Commit a path, with the drafter's part or without."""
    row = server.layout.row(ids)
    source = Drafter(ids, identity) if drafter else None
    server.cache.commit(ids, 0, row, 0, companion=source)
    server.flush()


def parts_of(server, ids):
    """The drafter's entries on a path, as token ids, and what is pending at its end."""
    server.ask([*ids, 99])
    nodes = server.cache.match(ids, 0).nodes
    held = [n.payload.companion for n in nodes]
    assert all(part is not None for part in held)
    spans = [int(t) for part in held for t in part.spans[0][0][0, 0, :, 0].tolist()]
    return spans, held[-1].pending


def test_the_drafters_part_comes_back(start):
    names = {IDENTITY: "drafter"}
    server = start("dense", companions=names)
    drafted(server, [1, 2, 3], True)
    drafted(server, [1, 2, 3, 4, 5], True)
    server.stop()
    server = start("dense", companions=names)
    spans, pending = parts_of(server, [1, 2, 3, 4, 5])
    assert spans == [1, 2, 3, 4, 5] and pending.item() == 5
    server.stop()
    other = start("dense", companions={IDENTITY: "another"})
    assert other.ask([1, 2, 3, 4, 5, 9])[0] == 5
    assert all(n.payload.companion is None for n in nodes_of(other.cache))


def test_a_drafter_that_comes_later_adds_its_part(start):
    names = {IDENTITY: "drafter"}
    server = start("dense")
    drafted(server, [1, 2, 3], False)
    server.stop()
    server = start("dense", companions=names)
    assert server.ask([1, 2, 3, 4])[0] == 3
    before = server.written
    drafted(server, [1, 2, 3, 4, 5], True)
    assert server.written > before
    server.stop()
    server = start("dense", companions=names)
    assert parts_of(server, [1, 2, 3, 4, 5])[0] == [1, 2, 3, 4, 5]
    kinds = [e.kind for e in server.store.all_entries()]
    assert kinds.count(COMPANION) == 1 and kinds.count(SPAN) == 2


@pytest.mark.parametrize("layout", ["dense", "hybrid"])
def test_a_drafter_goes_on_from_where_it_was(start, layout):
    """What was added without it is read again, and not what it had read before."""
    names, ids = {IDENTITY: "drafter"}, list(range(1, 10))
    server = start(layout, companions=names)
    for stop in (3, 5, 7):
        drafted(server, ids[:stop], True)
    server.stop()
    server = start(layout)
    server.ask(ids)
    drafted(server, ids, False)
    server.stop()
    server = start(layout, companions=names)
    assert server.ask([*ids, 0])[0] == 9
    view = DraftView(IDENTITY, lookahead=True)
    hit = server.cache.find([*ids, 0], 0, lambda length: True, view)
    assert hit is not None and hit.length == 7
    hit.release()


@pytest.mark.parametrize("first", [True, False], ids=["with a part", "without"])
def test_drafters_that_take_turns_find_their_parts(start, first):
    """Each one's part is found, also where the span has another's, or one more."""
    ids = [1, 2, 3, 4, 5]
    server = start("dense", companions={IDENTITY: "drafter"} if first else {})
    drafted(server, ids, first)
    server.stop()
    turns = [(OTHER, "other"), (IDENTITY, "drafter")]
    for identity, name in turns:
        server = start("dense", companions={identity: name})
        assert server.ask([*ids, 6])[0] == 5
        drafted(server, ids, True, identity)
        server.stop()
    for identity, name in turns:
        server = start("dense", companions={identity: name})
        assert parts_of(server, ids)[0] == ids
        assert (
            server.cache.match(ids, 0).nodes[0].payload.companion_identity == identity
        )
        server.stop()
    spans = 1 if first else 0
    kinds = [e.kind for e in server_entries(server)]
    assert kinds.count(COMPANION) == len(turns) - spans


def test_a_part_that_the_index_gives_to_another_span_is_none(start, tmp_path):
    """Nobody drafts from it, and the drafter that has read the path adds it again."""
    names, ids = {IDENTITY: "drafter"}, [1, 2, 3, 4, 5]
    server = start("hybrid")
    drafted(server, ids[:3], False)
    server.stop()
    server = start("hybrid", companions=names)
    server.ask([*ids, 6])
    drafted(server, ids, True)
    server.stop()
    below, above, part = server_entries(server)
    assert (below.stop, above.start, above.companion) == (3, 3, "drafter")
    assert (part.kind, part.parent) == (COMPANION, below.number)
    with sqlite3.connect(tmp_path / "disk" / INDEX) as index:
        index.execute(
            "UPDATE entries SET parent = ? WHERE number = ?",
            (above.number, part.number),
        )
    index.close()
    server = start("hybrid", companions=names)
    server.ask([*ids, 6])
    for node in nodes_of(server.cache):
        kept = node.payload.companion
        held = [] if kept is None else kept.spans[0][0][0, 0, :, 0].tolist()
        assert held in ([], list(node.ids))
    drafted(server, ids, True)
    server.stop()
    server = start("hybrid", companions=names)
    assert parts_of(server, ids)[0] == ids


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
