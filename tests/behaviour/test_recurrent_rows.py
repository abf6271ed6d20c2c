"""Warm and cold rows that arrive together get their solo tokens."""

from __future__ import annotations

import pytest

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
