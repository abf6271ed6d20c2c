"""With a drafter nothing wrong is stored, and no turn is worse than on stock."""

from __future__ import annotations

import pytest

from tests.behaviour.stored import stored
from tests.fakes.oracle import Oracle, make_drafter
from tests.fakes.server import system, user

pytestmark = pytest.mark.guard

ASK = [
    system("You look words up.\n" + "amber = fox yak sun\nbriar = elk owl\n" * 6),
    user("dump"),
]
GUARD = 1  # stock keeps the state in front of a prompt's last token


@pytest.fixture(scope="session")
def drafter(tmp_path_factory):
    return make_drafter(tmp_path_factory.mktemp("drafter") / "mtp")


@pytest.fixture
def drafted(make_server, drafter):
    """make(oracle=None) -> a hybrid server with the drafter, or the oracle in its place."""

    def make(oracle=None):
        server = make_server("hybrid", draft_model=drafter, apc_checkpoint_entries=8)
        assert server.generator.draft_model is not None
        (oracle or Oracle([], 0)).install(server.generator.draft_model)
        return server

    yield make


def conversation(server, turns=4, max_tokens=40, before_turn=None):
    """Messages and replies of a session of free replies."""
    asked, out = list(ASK), []
    for turn in range(turns):
        if before_turn is not None:
            before_turn(turn)
        reply = server.chat(asked, max_tokens=max_tokens)
        out.append((list(asked), reply))
        asked += [reply.message(), user(f"get: amber {turn}")]
    return out


def assert_every_key_is_as_long_as_its_state(server):
    entries = stored(server.manager)
    assert entries, "nothing is stored at all"
    for key, lengths in entries:
        assert lengths == {len(key)}


def assert_no_longer_than_processed(server, replies):
    """Every key is a prefix of a prompt and its reply, the unprocessed end apart."""
    whole = [[*r.prompt_ids, *r.ids] for r in replies]
    for key, _ in stored(server.manager):
        assert any(ids[: len(key)] == key for ids in whole)


def assert_no_worse_than_stock(turns):
    """The prompt of the turn before is not read again."""
    for (_, before), (_, reply) in zip(turns, turns[1:], strict=False):
        assert reply.prefilled <= len(reply.prompt_ids) - (
            len(before.prompt_ids) - GUARD
        )


def assert_accepts_and_rolls_back(oracle):
    assert any(accepted == proposed > 0 for proposed, accepted in oracle.rounds)
    assert any(accepted < proposed for proposed, accepted in oracle.rounds)


def plain_conversation(make_server, **kw):
    return conversation(make_server("hybrid", apc_checkpoint_entries=8), **kw)


@pytest.mark.parametrize("wrong_every", [0, 4, 7])
def test_a_session_with_an_oracle(make_server, drafted, wrong_every):
    plain = plain_conversation(make_server)
    oracle = Oracle([reply.ids for _, reply in plain], wrong_every)
    server = drafted(oracle)
    turns = conversation(server)
    assert [r.ids for _, r in turns] == [r.ids for _, r in plain]
    assert oracle.accepted > 20
    if wrong_every:
        assert_accepts_and_rolls_back(oracle)
    for _, reply in turns:
        server.assert_cold(reply)
    assert_no_worse_than_stock(turns)
    assert_every_key_is_as_long_as_its_state(server)
    assert_no_longer_than_processed(server, [r for _, r in turns])


def test_a_session_with_a_drafter_that_is_never_right(make_server, drafted):
    plain = plain_conversation(make_server, turns=3)
    oracle = Oracle([], 0)
    server = drafted(oracle)
    turns = conversation(server, turns=3)
    assert [r.ids for _, r in turns] == [r.ids for _, r in plain]
    assert oracle.rounds and any(a < p for p, a in oracle.rounds)
    assert_no_worse_than_stock(turns)
    assert_every_key_is_as_long_as_its_state(server)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_a_reply_cut_inside_a_drafted_block(make_server, drafted, max_tokens):
    plain = plain_conversation(make_server, turns=3, max_tokens=max_tokens)
    # Nothing planted: the last round is cut by the budget, not by a rejection.
    server = drafted(Oracle([r.ids for _, r in plain], 0))
    turns = conversation(server, turns=3, max_tokens=max_tokens)
    assert [r.ids for _, r in turns] == [r.ids for _, r in plain]
    assert_every_key_is_as_long_as_its_state(server)
    assert_no_longer_than_processed(server, [r for _, r in turns])


def test_a_client_that_hangs_up_between_rounds(make_server, drafted):
    plain = make_server("hybrid").chat(ASK, max_tokens=60)
    server = drafted(Oracle([plain.ids], 4))
    if len(plain.ids) < 12:
        pytest.skip("needs a reply that is long enough to hang up in")
    part = server.cancel(ASK, after=6, max_tokens=60)
    assert part.ids == plain.ids[: len(part.ids)]
    assert_every_key_is_as_long_as_its_state(server)
    part.text = server.decode(part.ids)
    two = server.chat([*ASK, part.message(), user("go on")], max_tokens=12)
    server.assert_cold(two)
    assert two.prefilled <= len(two.prompt_ids) - len(part.prompt_ids) + GUARD


def test_rows_of_one_batch_with_an_oracle(make_server, drafted):
    asks = [[*ASK[:1], user(f"get: {key}")] for key in ("amber", "briar", "nothing")]
    plain_server = make_server("hybrid", apc_checkpoint_entries=8)
    plain = [plain_server.chat(ask, max_tokens=24) for ask in asks]
    oracle = Oracle([r.ids for r in plain], 20)
    server = drafted(oracle)
    for _ in range(2):  # cold, then each restored to its last token
        replies = server.together([{"messages": ask, "max_tokens": 24} for ask in asks])
        for reply in replies:
            server.assert_cold(reply)
        assert_every_key_is_as_long_as_its_state(server)
    assert_accepts_and_rolls_back(oracle)
    for ask, reply in zip(asks, replies, strict=True):
        two = server.chat([*ask, reply.message(), user("on")], max_tokens=8)
        server.assert_cold(two)


def test_a_session_goes_on_without_its_drafter_and_with_it_again(make_server, drafted):
    """One cache on disk would be shared; in RAM each load starts with an empty one."""
    plain = plain_conversation(make_server, turns=2)
    for server in (drafted(Oracle([r.ids for _, r in plain], 3)), None):
        server = server or make_server("hybrid", apc_checkpoint_entries=8)
        asked = [*plain[-1][0], plain[-1][1].message(), user("last")]
        first = server.chat(asked, max_tokens=12)
        assert first.cached_tokens == 0
        server.assert_cold(first)


def test_a_request_that_arrives_while_another_is_drafted(make_server, drafted):
    """Its embedding must not move the positions of the rows that are verified."""
    late = [*ASK[:1], user("get: briar")]
    plain_server = make_server("hybrid", apc_checkpoint_entries=8)
    plain = [plain_server.chat(ask, max_tokens=30) for ask in (ASK, late)]
    server = drafted(Oracle([r.ids for r in plain], 7))
    for _ in range(2):
        for reply, other in zip(
            server.staggered(
                [
                    (0, {"messages": list(ASK), "max_tokens": 30}),
                    (3, {"messages": late, "max_tokens": 12}),
                ]
            ),
            plain,
            strict=True,
        ):
            server.assert_cold(reply)
            assert reply.ids == other.ids[: len(reply.ids)]
    assert_every_key_is_as_long_as_its_state(server)
