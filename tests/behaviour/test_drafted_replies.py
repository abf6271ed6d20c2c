"""A reply that was written with a draft model is kept as one without is."""

from __future__ import annotations

import pytest

from tests.behaviour.stored import stored
from tests.fakes.oracle import Oracle, make_drafter
from tests.fakes.server import system, user

pytestmark = pytest.mark.change("drafted-replies")

ASK = [
    system("You look words up.\n" + "amber = fox yak sun\nbriar = elk owl\n" * 6),
    user("dump"),
]
# The newest token of a reply is not processed, and one prompt token is always read.
SLACK = 2


@pytest.fixture(scope="session")
def drafter(tmp_path_factory):
    return make_drafter(tmp_path_factory.mktemp("drafter") / "mtp")


@pytest.fixture(scope="session")
def dense_drafters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    return {
        kind: make_drafter(folder / kind, kind=kind, block_size=6)
        for kind in ("eagle3", "dflash")
    }


@pytest.fixture
def drafted_dense(make_server, dense_drafters):
    def make(kind, block_size, oracle):
        server = make_server(
            "dense",
            draft_model=dense_drafters[kind],
            draft_kind=kind,
            env={"MLX_VLM_DRAFT_BLOCK_SIZE": str(block_size)},
        )
        oracle.install(server.generator.draft_model)
        return server

    return make


@pytest.fixture
def drafted(make_server, drafter):
    def make(oracle):
        server = make_server("hybrid", draft_model=drafter, apc_checkpoint_entries=8)
        oracle.install(server.generator.draft_model)
        return server

    return make


def plain(make_server, **kw):
    return make_server("hybrid", apc_checkpoint_entries=8).chat(ASK, **kw)


def follow_up(server, ask, reply, **kw):
    return server.chat([*ask, reply.message(), user("on")], max_tokens=8, **kw)


def assert_reply_is_kept(server, first, second):
    """Only what is new was read, and it reads as after a cold start."""
    new = len(second.prompt_ids) - len(first.prompt_ids) - len(first.ids)
    assert second.prefilled <= new + SLACK
    server.assert_cold(second)
    for key, lengths in stored(server.manager):
        assert lengths == {len(key)}


@pytest.mark.parametrize("wrong_every", [0, 3, 5])
def test_c41_a_reply_that_ends_at_a_stop_token(make_server, drafted, wrong_every):
    expected = plain(make_server, max_tokens=48)
    server = drafted(Oracle([expected.ids], wrong_every))
    first = server.chat(ASK, max_tokens=48)
    assert first.ids == expected.ids
    assert_reply_is_kept(server, first, follow_up(server, ASK, first))


@pytest.mark.parametrize("max_tokens", range(2, 11))
def test_c41_a_reply_that_ends_at_any_place_of_a_block(
    make_server, drafted, max_tokens
):
    expected = plain(make_server, max_tokens=max_tokens)
    server = drafted(Oracle([expected.ids], 0))
    first = server.chat(ASK, max_tokens=max_tokens)
    assert first.ids == expected.ids
    assert_reply_is_kept(server, first, follow_up(server, ASK, first))


def test_a_reply_whose_client_hangs_up(make_server, drafted):
    expected = plain(make_server, max_tokens=60)
    server = drafted(Oracle([expected.ids], 4))
    part = server.cancel(ASK, after=6, max_tokens=60)
    part.text = server.decode(part.ids)
    assert_reply_is_kept(server, part, follow_up(server, ASK, part))


ROWS = [
    {"messages": [*ASK[:1], user(f"get: {key}")], "max_tokens": n}
    for key, n in (("amber", 5), ("briar", 24), ("nothing", 9))
]


def assert_rows_are_kept(server, expected):
    replies = server.together([dict(row) for row in ROWS])
    for reply, other in zip(replies, expected, strict=True):
        assert reply.ids == other.ids
    for row, reply in zip(ROWS, replies, strict=True):
        assert_reply_is_kept(server, reply, follow_up(server, row["messages"], reply))


def test_rows_of_one_batch_that_end_at_different_times(make_server, drafted):
    server = make_server("hybrid", apc_checkpoint_entries=8)
    expected = [server.chat(**row) for row in ROWS]
    assert_rows_are_kept(drafted(Oracle([r.ids for r in expected], 6)), expected)


@pytest.mark.parametrize("block_size", range(2, 7))
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_row_of_each_other_kind_of_drafter(
    make_server, drafted_dense, kind, block_size
):
    expected = make_server("dense").chat(ASK, max_tokens=19)
    oracle = Oracle([expected.ids], 7)
    server = drafted_dense(kind, block_size, oracle)
    first = server.chat(ASK, max_tokens=19)
    assert first.ids == expected.ids
    assert oracle.accepted > 0
    assert_reply_is_kept(server, first, follow_up(server, ASK, first))


@pytest.mark.parametrize("block_size", range(2, 7))
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_rows_of_each_other_kind_of_drafter(
    make_server, drafted_dense, kind, block_size
):
    server = make_server("dense")
    expected = [server.chat(**row) for row in ROWS]
    oracle = Oracle([r.ids for r in expected], 7)
    assert_rows_are_kept(drafted_dense(kind, block_size, oracle), expected)
    assert oracle.accepted > 0


def test_a_session_reads_every_token_once(make_server, drafted):
    asked, plans = list(ASK), []
    server = make_server("hybrid", apc_checkpoint_entries=8)
    for turn in range(5):
        reply = server.chat(asked, max_tokens=24)
        plans.append(reply.ids)
        asked = [*asked, reply.message(), user(f"get: amber {turn}")]
    server = drafted(Oracle(plans, 5))
    asked, before = list(ASK), None
    for turn, plan in enumerate(plans):
        reply = server.chat(asked, max_tokens=24)
        assert reply.ids == plan
        if before is not None:
            assert_reply_is_kept(server, before, reply)
        before = reply
        asked = [*asked, reply.message(), user(f"get: amber {turn}")]
