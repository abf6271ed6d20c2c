"""Sessions with pictures: a turn is that of an empty cache, whichever picture stands where."""

from __future__ import annotations

import pytest

from tests.behaviour.pictures import look, picture
from tests.behaviour.sessions import BLOCK
from tests.fakes.server import system, user

RULES = system("You look words up.\n" + "amber = fox yak sun\n" * 8)
ASK = [RULES, user("get: amber")]
A, B = picture(1), picture(2)


def before_media(reply, server):
    """Tokens in front of the first placeholder of a picture."""
    return reply.prompt_ids.index(server.generator.model.config.image_token_id)


def assert_text_is_reused(server):
    """The control: the cache of this server is at work."""
    server.chat(ASK, max_tokens=2)
    assert server.chat(ASK, max_tokens=2).cached_tokens > BLOCK


@pytest.mark.guard
def test_c22_another_picture_under_the_same_text(make_server):
    """Stock reads dense layers again wherever a picture is among the tokens."""
    server = make_server("vlm", apc_checkpoint_entries=8)
    first, other, again = (
        server.chat([RULES, look(p)], max_tokens=12) for p in (A, B, A)
    )
    assert first.prompt_ids == other.prompt_ids == again.prompt_ids
    assert other.cached_tokens <= before_media(other, server)
    assert again.ids == first.ids
    for reply in (first, other, again):
        server.assert_cold(reply)
    assert_text_is_reused(server)


@pytest.mark.guard
def test_c22_the_order_of_two_pictures_matters(make_server):
    server = make_server("vlm", apc_checkpoint_entries=8)
    one, two, again = (
        server.chat([RULES, look(*order)], max_tokens=12)
        for order in ((A, B), (B, A), (A, B))
    )
    assert one.prompt_ids == two.prompt_ids
    assert two.cached_tokens <= before_media(two, server)
    for reply in (one, two, again):
        server.assert_cold(reply)
    assert_text_is_reused(server)


@pytest.mark.guard
def test_c72_text_turns_after_a_picture(make_server):
    server = make_server("vlm", apc_checkpoint_entries=8)
    asked = [RULES, look(A)]
    for turn in range(3):
        reply = server.chat(asked, max_tokens=30)
        server.assert_cold(reply)
        assert reply.cached_tokens + reply.prefilled == len(reply.prompt_ids)
        asked += [reply.message(), user(f"and then {turn}")]
    assert_text_is_reused(server)


@pytest.mark.guard
def test_another_picture_later_in_the_session(make_server):
    server = make_server("vlm", apc_checkpoint_entries=8)
    asked = [RULES, look(A)]
    for message in (user("and in words"), look(B), user("compare them")):
        reply = server.chat(asked, max_tokens=20)
        server.assert_cold(reply)
        asked += [reply.message(), message]
    server.assert_cold(server.chat(asked, max_tokens=12))


@pytest.mark.change("row-positions")
@pytest.mark.given_by_others("row-positions")
def test_two_sessions_with_pictures_at_once(make_server):
    server = make_server("vlm", apc_checkpoint_entries=8)
    asks = [[RULES, look(A)], [RULES, look(B)], [RULES, user("no picture")]]
    first = server.staggered(
        [
            (0, {"messages": asks[0], "max_tokens": 30}),
            (3, {"messages": asks[1], "max_tokens": 10}),
            (6, {"messages": asks[2], "max_tokens": 10}),
        ]
    )
    for reply in first:
        server.assert_cold(reply)
    for ask, reply in zip(asks, first, strict=True):
        ask += [reply.message(), user("go on")]
    for reply in server.together([{"messages": a, "max_tokens": 10} for a in asks]):
        server.assert_cold(reply)
