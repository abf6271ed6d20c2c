"""Warm and cold rows that arrive together get their solo tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fakes.models import DRAFTERS, record_prompt
from tests.fakes.server import system, user

RECORDS = "amber = fox yak sun\nbriar = elk owl ant\n"


def ask(size, key="amber"):
    return [system(RECORDS + "Words. " * (6 * size)), user(f"get: {key}")]


def together(server, warm):
    """Three requests at once, the first ``warm`` of them known to the cache."""
    asks = [ask(6), ask(8, "briar"), ask(2)]
    for messages in asks[:warm]:
        server.chat(messages, max_tokens=4)
    return server.together([{"messages": m, "max_tokens": 12} for m in asks])


@pytest.mark.change("recurrent-rows")
@pytest.mark.parametrize("warm", [1, 2])
@pytest.mark.parametrize("step", ["16", "2048"])
def test_warm_and_cold_rows_of_a_hybrid(make_server, step, warm):
    server = make_server(
        "hybrid", apc_checkpoint_entries=8, env={"PREFILL_STEP_SIZE": step}
    )
    replies = together(server, warm)
    assert all(reply.cached_tokens > 0 for reply in replies[:warm])
    for reply in replies:
        server.assert_cold(reply)


@pytest.mark.guard
@pytest.mark.parametrize("model", ["dense", "window", "vlm"])
def test_other_models_are_still_prefilled_together(make_server, model):
    server = make_server(model, apc_checkpoint_entries=8)
    replies = together(server, 1)
    assert replies[0].forwards[0][0] == len(replies)
    for reply in replies:
        server.assert_cold(reply)


@pytest.mark.guard
def test_cold_rows_of_a_hybrid_are_still_prefilled_together(make_server):
    server = make_server("hybrid")
    replies = together(server, 0)
    assert replies[0].forwards[0][0] == len(replies)


@pytest.mark.change("recurrent-rows", "output-tokens")
@pytest.mark.given_by_others("output-tokens")
def test_a_reply_that_ends_as_others_are_admitted(make_server):
    """It makes one of them warm, which nobody could know when the step began."""
    server = make_server("hybrid", apc_checkpoint_entries=8)
    first, script = ask(2), server.encode("amber = fox yak sun")
    said = {"role": "assistant", "content": server.decode(script)}
    after = [[*first, said, user("get: briar")], ask(6), ask(2, "briar")]
    record = server.expect_held(
        script, at=len(script), until=lambda: server.generator.requests.qsize() >= 3
    )
    with ThreadPoolExecutor(4) as pool:
        leading = pool.submit(server.chat, first, record=record, max_tokens=len(script))
        assert record.held.wait(20)
        others = [pool.submit(server.chat, m, max_tokens=12) for m in after]
        leading.result(30)
        replies = [other.result(30) for other in others]
    for reply in replies:
        server.assert_cold(reply)


@pytest.mark.guard
@pytest.mark.parametrize("name", ["hybrid-mtp", "hybrid-eagle3"])
def test_rows_of_which_the_drafter_knows_less(make_server, name):
    """An undrafted request has left a prompt that the drafter must read; others wait beside it."""
    server = make_server(DRAFTERS[name], draft_model=name, apc_checkpoint_entries=8)
    asks = [
        record_prompt(31, 16, task="dump").messages,
        [system("Be brief."), user("hello")],
        record_prompt(5, 8, filler=1, task="dump").messages,
    ]
    wants = [server.chat(messages, max_tokens=12).ids for messages in asks]
    server.clear_cache()
    server.chat(asks[0], max_tokens=12, logprobs=True)
    for messages in asks[1:]:
        server.chat(messages, max_tokens=12)
    replies = server.together([{"messages": m, "max_tokens": 12} for m in asks])
    assert [reply.ids for reply in replies] == wants
