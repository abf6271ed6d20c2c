"""A reply stays in the cache: a turn reads only what is new to the server."""

from __future__ import annotations

import pytest

from tests.behaviour.sessions import assert_reads_only_new, common, follows
from tests.fakes.server import system, user

pytestmark = pytest.mark.change("output-tokens")

MODELS = ["dense", "hybrid", "window"]
RULES = system("You look words up.\n" + "amber = fox yak sun\n" * 8)
ASK = [RULES, user("get: amber")]
NOTES = """amber = fox yak sun
briar = elk owl ant
coral = zebra ibis jug
dune = quail lynx sun
ember = seal gnu kite"""
WRITTEN = " ".join(["fox yak sun"] * 12)


def next_turn(reply, text="get: amber again"):
    return [*ASK, reply.message(), user(text)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("endpoint", ["chat", "responses", "messages"])
@pytest.mark.parametrize("model", MODELS)
def test_c04_next_turn_reads_only_what_is_new(make_server, model, endpoint, stream):
    server = make_server(model)
    ask = getattr(server, endpoint)
    one = ask(ASK, script=WRITTEN, stream=stream, max_tokens=80)
    two = ask(next_turn(one), stream=stream, max_tokens=12)
    assert follows(two, one)
    assert_reads_only_new(two, [one], model)
    server.assert_cold(two)


@pytest.mark.parametrize("model", MODELS)
def test_reply_cut_by_its_budget_is_kept(make_server, model):
    server = make_server(model)
    one = server.chat(ASK, script=WRITTEN, max_tokens=34)
    assert one.finish_reason == "length"
    two = server.chat(next_turn(one), max_tokens=12)
    assert follows(two, one)
    assert_reads_only_new(two, [one], model)
    server.assert_cold(two)


@pytest.mark.parametrize("model", MODELS)
def test_reply_of_a_client_that_hung_up_is_kept(make_server, model):
    server = make_server(model)
    one = server.cancel(ASK, after=34, script=WRITTEN)
    one.text = server.decode(one.ids)
    two = server.chat(next_turn(one), max_tokens=12)
    assert (
        common(two.prompt_ids, [*one.prompt_ids, *one.ids]) >= len(one.prompt_ids) + 32
    )
    assert_reads_only_new(two, [one], model)
    server.assert_cold(two)


@pytest.mark.parametrize("model", MODELS)
def test_rows_of_one_batch_are_all_kept(make_server, model):
    server = make_server(model, apc_checkpoint_entries=8)
    asks = [[system(f"Agent {i}. " + "sun " * (5 * i)), user("go")] for i in range(3)]
    first = server.together(
        [
            {"messages": ask, "script": WRITTEN, "max_tokens": 36 + 8 * i}
            for i, ask in enumerate(asks)
        ]
    )
    assert (3, 1) in server.recorder.decode_calls
    for ask, one in zip(asks, first, strict=True):
        two = server.chat([*ask, one.message(), user("more")], max_tokens=8)
        assert follows(two, one)
        assert_reads_only_new(two, first, model)
        server.assert_cold(two)


@pytest.mark.parametrize("model", MODELS)
def test_row_that_leaves_a_running_batch_is_kept(make_server, model):
    server = make_server(model, apc_checkpoint_entries=8)
    other = [system("Another agent."), user("go")]
    long, one = server.staggered(
        [
            (
                0,
                {
                    "messages": other,
                    "script": " ".join([WRITTEN] * 3),
                    "max_tokens": 120,
                },
            ),
            (4, {"messages": ASK, "script": WRITTEN, "max_tokens": 60}),
        ]
    )
    two = server.chat(next_turn(one), max_tokens=8)
    assert_reads_only_new(two, [one, long], model)
    server.assert_cold(two)
    three = server.chat([*other, long.message(), user("more")], max_tokens=8)
    assert_reads_only_new(three, [one, long], model)


@pytest.mark.parametrize("model", ["dense", "hybrid"])  # the trained ones
def test_session_of_free_replies_is_a_cold_run_at_every_turn(make_server, model):
    server = make_server(model, apc_checkpoint_entries=8)
    questions = ["amber\nbriar\ncoral", "dune\namber\nember", "coral\ndune\nbriar"]
    asked, seen = [system(f"Notes:\n{NOTES}")], []
    for question in questions:
        asked.append(user(f"get:\n{question}"))
        reply = server.chat(asked, max_tokens=60)
        server.assert_cold(reply)
        assert_reads_only_new(reply, seen, model)
        seen.append(reply)
        asked.append(reply.message())
    assert sum(len(reply.ids) for reply in seen) > 45, "too short to show anything"


@pytest.mark.parametrize("model", MODELS)
def test_two_sessions_in_turn_read_only_what_is_new(make_server, model):
    """Two places for whole states, two agents: a reply replaces what it supersedes."""
    server = make_server(model, apc_checkpoint_entries=2)
    asked = [[system(f"Agent {i}. " + "sun fox " * 10), user("go")] for i in range(2)]
    seen = []
    for turn in range(3):
        for messages in asked:
            reply = server.chat(messages, script=WRITTEN, max_tokens=60)
            if turn:
                assert_reads_only_new(reply, seen, model)
            seen.append(reply)
            messages += [reply.message(), user(f"go on {turn}")]


@pytest.mark.parametrize("model", ["hybrid", "window"])
def test_c09_a_long_cold_prompt_leaves_others_their_states(make_server, model):
    server = make_server(
        model, apc_checkpoint_entries=4, apc_checkpoint_interval_tokens=32
    )
    one = server.chat(ASK, script="fox yak sun", max_tokens=60)
    cold = server.chat([system("sun yak fox " * 80), user("go")], max_tokens=2)
    assert cold.cached_tokens == 0
    two = server.chat(next_turn(one), max_tokens=8)
    assert_reads_only_new(two, [one, cold], model)


@pytest.mark.guard
@pytest.mark.parametrize("model", MODELS)
def test_c48_exact_repeat_computes_at_least_one_token(make_server, model):
    server = make_server(model)
    for size in (1, 15, 16, 17, 40):
        ask = [user("fox " * size)]
        first = server.chat(ask, max_tokens=4)
        again = server.chat(ask, max_tokens=4)
        assert again.prefilled >= 1
        assert again.ids == first.ids


@pytest.mark.guard
@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_c58_a_reply_is_never_another_tenants(make_server, model):
    server = make_server(model, apc_checkpoint_entries=8)
    mine, theirs = {"X-APC-Tenant": "a"}, {"X-APC-Tenant": "b"}
    one = server.chat(ASK, script=WRITTEN, max_tokens=60, headers=mine)
    two = server.chat(next_turn(one), max_tokens=4, headers=theirs)
    assert two.cached_tokens == 0
    three = server.chat(next_turn(one), max_tokens=4, headers=mine)
    assert three.cached_tokens > 0


@pytest.mark.guard
@pytest.mark.parametrize("model", MODELS)
def test_reload_starts_with_an_empty_cache(make_server, model):
    server = make_server(model)
    one = server.chat(ASK, script=WRITTEN, max_tokens=60)
    server.reload()
    two = server.chat(next_turn(one), max_tokens=4)
    assert two.cached_tokens == 0
    server.assert_cold(two)
