"""A picture that the server has seen is not looked at again, and no other is taken for it."""

from __future__ import annotations

import pytest

from tests.behaviour.pictures import look, picture
from tests.behaviour.sessions import common, new_tokens
from tests.fakes.server import system, user

change = pytest.mark.change("segment-tree")
guard = pytest.mark.guard
RULES = system("Say what you see.\n" + "amber = fox yak sun\n" * 5)
A, B = picture(1), picture(2)
REPLY = "fox yak sun"


def behind_media(server, reply):
    """Tokens up to and with the last placeholder of a picture."""
    pad = server.generator.model.config.image_token_id
    return len(reply.prompt_ids) - reply.prompt_ids[::-1].index(pad)


def first_logprobs(server, reply):
    choice = reply.raw["choices"][0]["logprobs"]["content"][0]
    cold = server.cold(reply.prompt_ids, 1, raw_inputs=reply.record.raw_inputs)
    return choice["logprob"], cold.logprobs[0]


def assert_as_cold(server, reply):
    served, cold = first_logprobs(server, reply)
    assert served == pytest.approx(cold, abs=2e-3)
    server.assert_cold(reply)


@change
def test_the_same_picture_again(make_server):
    server = make_server("vlm")
    one = server.chat([RULES, look(A)], max_tokens=12)
    two = server.chat([RULES, look(A)], max_tokens=12, logprobs=True)
    assert two.cached_tokens >= behind_media(server, two)
    assert two.prefilled == 1
    assert two.ids == one.ids
    assert_as_cold(server, two)


@change
def test_text_turns_behind_a_picture(make_server):
    """C72: positions behind a picture are not the tokens' count."""
    server = make_server("vlm")
    asked, seen = [RULES, look(A)], []
    for turn in range(4):
        last = turn == 3
        reply = server.chat(
            asked, script=None if last else REPLY, max_tokens=12, logprobs=True
        )
        if seen:
            assert reply.cached_tokens >= behind_media(server, reply)
            assert reply.prefilled <= new_tokens(reply, seen) + 1
        seen.append(reply)
        asked += [reply.message(), user(f"and then {turn}")]
    assert_as_cold(server, reply)


@change
def test_another_question_on_the_same_picture(make_server):
    server = make_server("vlm")
    asks = [[RULES, look(A, text=text)] for text in ("what is this", "list it all")]
    one, two = (server.chat(ask, max_tokens=12, logprobs=True) for ask in asks)
    assert two.cached_tokens == common(one.prompt_ids, two.prompt_ids)
    assert two.cached_tokens >= behind_media(server, two)
    assert_as_cold(server, two)


@change
def test_a_second_picture_later(make_server):
    """The salt names all pictures of a prompt, so the first one is looked at again."""
    server = make_server("vlm")
    asked = [RULES, look(A)]
    one = server.chat(asked, script=REPLY, max_tokens=12)
    asked += [one.message(), look(B)]
    two = server.chat(asked, script=REPLY, max_tokens=12)
    asked += [two.message(), user("compare them")]
    three = server.chat(asked, max_tokens=12, logprobs=True)
    assert three.cached_tokens >= behind_media(server, three)
    assert three.prefilled <= new_tokens(three, [two]) + 1
    assert_as_cold(server, three)


@change
def test_warm_rows_with_pictures_beside_text_and_cold_rows(make_server):
    server = make_server("vlm")
    asks = [[RULES, look(A)], [RULES, look(B)], [RULES, user("no picture at all")]]
    for ask in asks:
        reply = server.chat(ask, script=REPLY, max_tokens=8)
        ask += [reply.message(), user("go on")]
    cold = [RULES, look(B, A, text="which is first")]
    replies = server.together(
        [{"messages": m, "max_tokens": 12, "logprobs": True} for m in (*asks, cold)]
    )
    for reply in replies[:2]:
        assert reply.cached_tokens >= behind_media(server, reply)
    assert replies[2].cached_tokens > 0
    for reply in replies:
        assert_as_cold(server, reply)


@guard
def test_c22_no_picture_is_taken_for_another(make_server):
    server = make_server("vlm")
    orders = ((A,), (B,), (A, B), (B, A), (A, A), (B, A), (A,))
    for pictures in orders:
        reply = server.chat([RULES, look(*pictures)], max_tokens=12, logprobs=True)
        assert_as_cold(server, reply)


@pytest.mark.change("recurrent-rows")
@pytest.mark.parametrize("chunk", ["16", "512"])
def test_pictures_of_prompts_that_are_read_at_once(make_server, chunk):
    """Stock adds the first prompt's pictures to all of them, and keeps what comes of it."""
    server = make_server("vlm", env={"PREFILL_STEP_SIZE": chunk})
    asks = [[RULES, look(A)], [RULES, look(B)], [RULES, look(B, A)]]
    asks.append([RULES, user("no picture at all")])
    for _ in range(2):  # cold, then each restored
        replies = server.together(
            [{"messages": m, "max_tokens": 12, "logprobs": True} for m in asks]
        )
        for reply in replies:
            assert_as_cold(server, reply)
