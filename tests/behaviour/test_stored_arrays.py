"""What is stored stays as it is, for whoever it belongs to."""

from __future__ import annotations

import hashlib
import importlib

import pytest

from tests.behaviour.pictures import look, picture
from tests.behaviour.sessions import new_tokens
from tests.behaviour.stored import leases
from tests.behaviour.test_rejoin import records
from tests.fakes.server import user

change = pytest.mark.change("segment-tree")
guard = pytest.mark.guard
MODELS = ["dense", "hybrid", "window"]
REPLY = "fox yak sun"


def digests(server):
    """A hash of what is stored of each token, by the text that ends there, and of each
    end state; segments may be split and joined meanwhile."""
    import mlx.core as mx
    import numpy as np

    def arrays(value):
        if isinstance(value, mx.array):
            yield np.array(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from arrays(item)
        elif hasattr(value, "state"):
            yield from arrays(value.state)

    def digest(parts):
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).digest()

    segments = getattr(server.manager, "segments", None)
    assert segments is not None, "nothing is stored in segments"
    segments.check_invariants()
    out = {}
    for tree in segments._trees.values():
        for node in tree:
            ids = tuple(i for part in node.path() for i in part.ids)
            spans = list(arrays(node.payload.spans))
            for place in range(len(node.ids)) if spans else ():
                key = ids[: len(ids) - len(node.ids) + place + 1]
                out["token", key] = digest(span[:, :, place] for span in spans)
            if node.payload.states is not None:
                out["state", ids] = digest(arrays(node.payload.states))
    return out


@change
@pytest.mark.parametrize("model", MODELS)
def test_borrowed_arrays_are_never_written(make_server, model):
    """A, B, A, B: what is stored before a turn is the same bytes after it."""
    server = make_server(model)
    sides = [[records(12), user("get: amber3")], [records(12), user("list them")]]
    seen, before = [], {}
    for turn in range(3):
        for asked in sides:
            reply = server.chat(asked, script=REPLY, max_tokens=8)
            asked += [reply.message(), user(f"on {turn}")]
            after = digests(server)
            both = before.keys() & after.keys()
            assert all(before[key] == after[key] for key in both)
            assert both or not before
            seen, before = [*seen, reply], after
    assert leases(server.manager) == 0
    for asked in sides:
        reply = server.chat(asked, max_tokens=12)
        assert reply.prefilled <= new_tokens(reply, seen) + 1
        server.assert_cold(reply)


@change
@pytest.mark.parametrize("model", MODELS)
def test_warm_and_cold_rows_that_join_and_leave(make_server, model):
    server = make_server(model, env={"PREFILL_STEP_SIZE": "64"})
    asks = [[records(n), user("get: amber3")] for n in (6, 10, 14)]
    one = [server.chat(ask, script=REPLY, max_tokens=8) for ask in asks]
    for ask, reply in zip(asks, one, strict=True):
        ask += [reply.message(), user("get: amber5")]
    cold = [[records(8), user("list them")], [records(4), user("all")]]
    rows = [*asks, *cold]
    mixed = server.together([{"messages": m, "max_tokens": 10} for m in rows])
    for reply in mixed[:3]:
        assert reply.prefilled <= new_tokens(reply, one) + 1
    for ask, reply in zip(rows, mixed, strict=True):
        server.assert_cold(reply)
        ask += [{"role": "assistant", "content": REPLY}, user("more")]
    joining = server.staggered(
        [
            (0, {"messages": rows[0], "max_tokens": 24}),
            (3, {"messages": rows[3], "max_tokens": 4}),
            (8, {"messages": rows[1], "max_tokens": 8}),
        ]
    )
    for reply in joining:
        assert reply.cached_tokens > 0
        server.assert_cold(reply)
    server.wait_idle()
    assert leases(server.manager) == 0


@change
@pytest.mark.parametrize("model", ["dense", "hybrid"])
@pytest.mark.given_by_others("segment-tree", "dense")
def test_tenants_share_nothing(make_server, model):
    server = make_server(model)
    asked, seen = [records(12), user("get: amber3")], {}
    for tenant in ("a", "b"):
        header = {"X-APC-Tenant": tenant}
        first = server.chat(asked, script=REPLY, max_tokens=8, headers=header)
        assert first.cached_tokens == 0
        seen[tenant] = first
    nobody = server.chat(asked, max_tokens=2)
    assert nobody.cached_tokens == 0
    for tenant, first in seen.items():
        follow = [*asked, first.message(), user(f"for {tenant}")]
        two = server.chat(follow, max_tokens=8, headers={"X-APC-Tenant": tenant})
        assert two.prefilled <= new_tokens(two, [first]) + 1
        server.assert_cold(two)


@change
@pytest.mark.given_by_others("segment-tree")
def test_all_of_the_salt_counts(make_server, monkeypatch):
    """Salts that Python's hash() takes for one, and that differ in their high bits alone."""
    server, asked = make_server("dense"), [records(12)]
    low = {"a": 5, "b": 5 + (1 << 61) - 1, "c": 5 + (1 << 200)}
    apc = importlib.import_module("mlx_vlm.apc")
    monkeypatch.setattr(
        apc, "tenant_scoped_hash", lambda tenant, payload_hash=0: low[tenant]
    )
    replies = [
        server.chat(asked, max_tokens=2, headers={"X-APC-Tenant": t}) for t in "abca"
    ]
    assert [r.cached_tokens > 0 for r in replies] == [False, False, False, True]


@change
def test_pictures_and_tenant_are_both_in_the_salt(make_server):
    server = make_server("vlm")
    asked = [[records(4), look(picture(n))] for n in (1, 2)]
    replies = [
        server.chat(asked[n], max_tokens=2, headers={"X-APC-Tenant": tenant})
        for tenant, n in (("a", 0), ("a", 1), ("b", 0), ("a", 0), ("b", 1))
    ]
    # A hit that reaches the picture, not only the text in front of it.
    media = server.generator.model.config.image_token_id
    behind = [reply.prompt_ids.index(media) for reply in replies]
    hits = [r.cached_tokens > at for r, at in zip(replies, behind, strict=True)]
    assert hits == [False, False, False, True, False]


@guard
@pytest.mark.parametrize("model", ["dense", "hybrid"])
@pytest.mark.parametrize("max_tokens", [1, 8])
def test_c48_an_exact_repeat_computes_a_token(make_server, model, max_tokens):
    """Lengths around whole blocks, and the shortest prompts."""
    server = make_server(model)
    for words in (0, 1, 9, 10, 11):
        asked = [user(" fox" * words or "a")]
        replies = [server.chat(asked, max_tokens=max_tokens) for _ in range(3)]
        for reply in replies:
            assert reply.ids == replies[0].ids
            assert reply.prefilled >= 1
            assert reply.cached_tokens + reply.prefilled == len(reply.prompt_ids)
