"""A prompt that leaves an earlier one reads on from where it left, on every kind of layer."""

from __future__ import annotations

import pytest

from tests.behaviour.sessions import common, new_tokens
from tests.fakes.server import system, user

change = pytest.mark.change("segment-tree")
MODELS = ["dense", "hybrid"]
LINES = 18
# Tokens of the template between the end of a message and the next one's text.
HEADER = 3
REPLY = "fox yak sun elk owl ant fox yak sun"


def records(lines=LINES, volatile=None, at=0.5):
    """A system text of records, with a line in it that changes."""
    out = [f"amber{i} = fox yak sun" for i in range(lines)]
    if volatile is not None:
        out.insert(int(lines * at), volatile)
    return system("\n".join(out))


def shared(reply, *others):
    """Length of the longest prefix that a prompt shares with others' prompts."""
    return max(common(reply.prompt_ids, other.prompt_ids) for other in others)


def start_of_last_message(server, reply):
    """Where the last message before the reply's own begins."""
    (mark,) = server.encode("<|im_start|>")
    return [i for i, t in enumerate(reply.prompt_ids) if t == mark][-2]


@change
@pytest.mark.parametrize("model", MODELS)
def test_a_volatile_line_costs_what_follows_it(make_server, model):
    """C07.  The second prompt shows a hybrid where prompts part; from the third on
    both kinds read exactly what follows."""
    server = make_server(model)
    for at in (0.1, 0.5, 0.9):
        server.clear_cache()
        seen = []
        for second in range(4):
            line = f"It is 12:00:0{second} now."
            reply = server.chat(
                [records(volatile=line, at=at), user("get: amber3")], max_tokens=8
            )
            if second in (1, 3):
                server.assert_cold(reply)
            if len(seen) > (model == "hybrid"):
                assert reply.cached_tokens == shared(reply, *seen)
            seen.append(reply)


@change
@pytest.mark.parametrize("lines", [25, 60, 110])
def test_a_new_chat_starts_behind_the_system_text(make_server, lines):
    """C08: a hybrid has an end state there; stock reads all of it again."""
    server = make_server("hybrid")
    one = server.chat([records(lines), user("get: amber3")], max_tokens=4)
    two = server.chat([records(lines), user("list them all")], max_tokens=12)
    assert 200 <= len(one.prompt_ids) <= 1000
    assert shared(two, one) - two.cached_tokens <= HEADER
    server.assert_cold(two)


@change
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.given_by_others("segment-tree", "dense")
def test_an_edited_reply_costs_what_follows_the_edit(make_server, model):
    server = make_server(model)
    ask = [records(), user("get: amber3")]
    one = server.chat(ask, script=REPLY, max_tokens=30)
    seen = []
    for word in ("zebra", "kelp", "mole"):
        edited = {"role": "assistant", "content": f"fox yak sun {word} elk"}
        reply = server.chat([*ask, edited, user("again")], max_tokens=8)
        server.assert_cold(reply)
        if seen or model == "dense":
            known = common(reply.prompt_ids, [*one.prompt_ids, *one.ids])
            assert reply.cached_tokens >= known
        else:
            assert reply.cached_tokens >= len(one.prompt_ids) - 1
        seen.append(reply)


@change
@pytest.mark.parametrize("model", [*MODELS, "window"])
def test_a_rewritten_last_message_keeps_what_is_before_it(make_server, model):
    server = make_server(model)
    asked = [records(), user("get: amber3")]
    one = server.chat(asked, script=REPLY, max_tokens=30)
    asked += [one.message()]
    first = server.chat([*asked, user("list them all")], max_tokens=4)
    rewritten = server.chat([*asked, user("get: amber7")], max_tokens=12)
    start = start_of_last_message(server, rewritten)
    assert shared(rewritten, first) >= start > len(one.prompt_ids)
    # A hybrid goes on from the end of the reply in front of it.
    assert rewritten.cached_tokens >= start - HEADER
    server.assert_cold(rewritten)


@change
@pytest.mark.parametrize("model", MODELS)
def test_reasoning_that_the_template_drops(make_server, model):
    """C02: shown during a tool loop, gone with the next question."""
    server = make_server(model)
    asked = [records(), user("look: amber3")]
    server.chat(asked, script="I look", max_tokens=8)
    call = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I look it up in the records",
        "tool_calls": [
            {
                "id": "a",
                "type": "function",
                "function": {"name": "look", "arguments": '{"key": "amber3"}'},
            }
        ],
    }
    asked += [call, {"role": "tool", "tool_call_id": "a", "content": "fox yak"}]
    two = server.chat(asked, script="fox yak sun", max_tokens=8)
    asked += [two.message(), user("get: amber7")]
    three = server.chat(asked, script=REPLY, max_tokens=30)
    # The prompt leaves the last one where the reasoning was: behind the first question.
    assert shared(three, two) < len(two.prompt_ids) - 16
    assert three.cached_tokens >= shared(three, two) - HEADER
    four = server.chat([*asked, three.message(), user("on")], max_tokens=12)
    assert four.prefilled <= new_tokens(four, [three]) + 1
    server.assert_cold(four)
