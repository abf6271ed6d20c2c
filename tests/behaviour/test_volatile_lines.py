"""A line that differs in every request and stands in front of the prompt is left out of it."""

from __future__ import annotations

import pytest

from tests.fakes.server import system, user

change = pytest.mark.change("volatile-lines")
guard = pytest.mark.guard
MODELS = ["dense", "hybrid"]
SWITCHES = ("MLX_VLM_CACHEPLUS_VOLATILE_LINES", "MLX_VLM_VOLATILE_LINES")
RULES = "\n".join(f"amber{i} = fox yak sun" for i in range(20))
ASK = [user("get: amber3")]
# Stock stores dense layers in blocks, and reads the last token of a prompt again.
BLOCK = 16


def line(number):
    return f"x-anthropic-billing-header: cc_version=2.1; cch={number:05x};"


def blocks(number):
    return [{"type": "text", "text": line(number)}, {"type": "text", "text": RULES}]


def switched(make_server, setting, model="dense"):
    return make_server(model, env=dict.fromkeys(SWITCHES, setting))


@change
@pytest.mark.parametrize("model", MODELS)
def test_c01_in_the_system_blocks_of_messages(make_server, model):
    server = make_server(model)
    one = server.messages(ASK, system=blocks(1), max_tokens=8)
    two = server.messages(ASK, system=blocks(0xFFFFF), max_tokens=8)
    assert two.prompt_ids == one.prompt_ids
    assert two.cached_tokens >= len(two.prompt_ids) - BLOCK
    assert two.ids == one.ids
    server.assert_cold(two)


@change
@pytest.mark.parametrize("model", MODELS)
def test_c01_in_an_openai_system_text(make_server, model):
    server = make_server(model)
    one = server.chat([system(f"{line(1)}\n{RULES}"), *ASK], max_tokens=8)
    two = server.chat([system(f"{line(7)}\n{RULES}"), *ASK], max_tokens=8)
    plain = server.chat([system(RULES), *ASK], max_tokens=8)
    assert one.prompt_ids == two.prompt_ids == plain.prompt_ids
    assert two.cached_tokens >= len(two.prompt_ids) - BLOCK
    server.assert_cold(two)


@change
def test_instructions_of_responses(make_server):
    server = make_server("dense")
    one, two = (
        server.responses(ASK, instructions=f"{line(n)}\n{RULES}", max_tokens=4)
        for n in (1, 2)
    )
    assert one.prompt_ids == two.prompt_ids


@change
def test_counted_tokens_are_those_of_the_prompt(make_server):
    server = make_server("dense")
    body = {"model": server.settings.model, "messages": ASK, "system": blocks(1)}
    counted = server.post("/v1/messages/count_tokens", body)["input_tokens"]
    reply = server.messages(ASK, system=blocks(2), max_tokens=2)
    assert counted == len(reply.prompt_ids)
    assert line(1)[:10] not in server.decode(reply.prompt_ids)


@change
def test_a_system_text_of_nothing_else_is_no_message(make_server):
    server = make_server("dense")
    alone = server.chat([system(line(1)), *ASK], max_tokens=2)
    assert alone.prompt_ids == server.chat(ASK, max_tokens=2).prompt_ids


@change
def test_one_more_pattern(make_server):
    server = switched(make_server, r"Request [0-9]+\.")
    one, two = (
        server.chat([system(f"Request {n}.\n{line(n)}\n{RULES}"), *ASK], max_tokens=2)
        for n in (11, 12)
    )
    assert one.prompt_ids == two.prompt_ids


@guard
def test_switched_off(make_server):
    server = switched(make_server, "off")
    reply = server.messages(ASK, system=blocks(1), max_tokens=2)
    assert line(1) in server.decode(reply.prompt_ids)


@guard
@pytest.mark.parametrize(
    "messages",
    [
        [user(f"{line(1)}\nget: amber3")],
        [system(RULES), user(f"{line(1)}\nget: amber3")],
        [system(f"{RULES}\n{line(1)}"), *ASK],
        [system(f"What is this: {line(1)}\n{RULES}"), *ASK],
    ],
    ids=["user", "user-behind-system", "last-line", "inside-a-line"],
)
def test_the_phrase_elsewhere_is_kept(make_server, messages):
    server = make_server("dense")
    reply = server.chat(messages, max_tokens=4)
    assert line(1) in server.decode(reply.prompt_ids)
