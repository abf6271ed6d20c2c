"""A drafter's part of a path goes to disk beside the target's, and comes back to that drafter alone."""

from __future__ import annotations

import sqlite3

import mlx.core as mx
import pytest

from mlx_vlm_cacheplus.core.disk_index import COMPANION, INDEX, SPAN
from mlx_vlm_cacheplus.core.draft_state import DraftPart, DraftView
from tests.contract.disk_server import quick, server_entries, start
from tests.fakes.token_caches import nodes_of

__all__ = ["quick", "start"]

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
