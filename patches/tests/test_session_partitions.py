"""Each session has a fair share of the prefix cache."""

import mlx.core as mx
import pytest
from mlx_vlm.models.cache import KVCache
from mlx_vlm.segment_cache import SegmentCache
from mlx_vlm.server.session_identity import FIELDS, HEADERS, identify
from mlx_vlm.session_table import IDLE_AFTER, MOST, Request, Salt, Sessions

TOKEN = 2 * 64 * 4
SYSTEM = list(range(1, 9))


class Server:
    """A cache with room for so many tokens, and agents that ask."""

    def __init__(self, tokens):
        self.cache = SegmentCache(tokens * TOKEN)
        self.cache.policy = self.sessions = Sessions()

    def ask(self, name, ids, tenant=None):
        """Read a prompt and keep it; returns how many tokens were restored."""
        salt = Salt.of(0, Request(name, tenant, answered_at=len(ids)))
        hit = self.cache.find(ids, salt, lambda length: True)
        layer = KVCache()
        keys = mx.zeros((1, 1, len(ids), 64))
        layer.update_and_fetch(keys, keys)
        self.cache.commit(ids, salt, [layer], 0)
        if hit is not None:
            hit.release()
        self.cache.check_invariants()
        assert self.cache.nbytes <= self.cache.max_bytes
        return 0 if hit is None else hit.length

    def named(self):
        return {session.id: session for session in self.sessions.table.values()}


def talk(server, name, turns, start=None, own=0):
    ids = list(start or [])
    for turn in range(turns):
        ids += [1000 * own + 20 * turn + n + 100 for n in range(8)]
        server.ask(name, ids)
    return ids


@pytest.mark.parametrize("titles", [3, 10, 50])
def test_titles_displace_nobody(titles):
    server = Server(50)
    main = talk(server, "main", 3, SYSTEM, 1)
    for number in range(titles):
        server.ask("main" if number % 2 else None, [9000 + 10 * number, 2, 3, 4])
    assert server.ask("main", [*main, 7]) == len(main)


def test_cold_prompts_cost_nobody_within_the_share():
    server = Server(160)
    talks = {n: talk(server, f"agent {n}", 3, SYSTEM, n) for n in (1, 2, 3)}
    for number in range(20):
        cold = [5000 + 100 * number + n for n in range(60)]
        server.ask("intruder", cold)
    for n, ids in talks.items():
        assert server.ask(f"agent {n}", [*ids, 7]) == len(ids)


def test_a_rewritten_turn_is_the_first_to_go():
    server = Server(80)
    one = talk(server, "one", 3, SYSTEM, 1)
    two = talk(server, "two", 3, SYSTEM, 2)
    again = [*one[:-8], *range(700, 708)]
    server.ask("one", again)
    server.ask("two", [*two, *range(800, 818)])
    assert server.cache.match(one, 0).length == len(one) - 8
    assert server.cache.match(again, 0).length == len(again)


def test_names_that_change_with_every_request_are_ignored():
    server = Server(10_000)
    ids = list(SYSTEM)
    for turn in range(6):
        ids += [100 + turn]
        server.ask(f"random {turn}", ids)
    (session,) = server.sessions.table.values()
    assert session.requests == 6 and session.name is None
    for number in range(4 * MOST):
        server.ask(f"another {number}", [5000 + number, 1, 2])
    assert len(server.sessions.table) <= MOST


def test_sessions_of_different_tenants_do_not_meet():
    server = Server(1000)
    server.ask("same", [1, 2, 3], tenant="a")
    server.ask("same", [1, 2, 4], tenant="b")
    assert len(server.sessions.table) == 2


def test_who_is_idle_has_no_share():
    server = Server(10_000)
    talk(server, "one", 2, SYSTEM, 1)
    assert server.sessions.is_live(server.named()["one"])
    for number in range(IDLE_AFTER + 1):
        server.ask("two", [5000 + number, 1, 2])
    assert not server.sessions.is_live(server.named()["one"])


@pytest.mark.parametrize("names", [names for _, names in HEADERS])
def test_headers(names):
    assert identify({names[0]: "mine"}, {}) == "mine"
    assert identify({names[0]: " "}, {}) is None
    sent = {name: str(place) for place, name in enumerate(names)}
    assert identify(sent, {"session_id": "other"}).startswith("0")


@pytest.mark.parametrize("field", FIELDS)
def test_fields(field):
    body = "mine"
    for part in reversed(field.split(".")):
        body = {part: body}
    assert identify({}, body) == "mine"
    assert identify({}, {field.split(".")[0]: 7}) is None
