"""Positions come from the row: ragged batches, warm starts and batches that meet."""

from __future__ import annotations

import pytest

from tests.fakes.server import system, user

RECORDS = "amber = fox yak sun\nbriar = elk owl ant\n"
SIZES = (1, 9, 4)


def ask(size, key="amber"):
    return [system(RECORDS + "Words. " * (6 * size)), user(f"get: {key}")]


def first_logprobs(server, reply):
    """Log-probability of the first token, and a cold run's."""
    choice = reply.raw["choices"][0]["logprobs"]["content"][0]
    cold = server.cold(reply.prompt_ids, 1)
    return choice["logprob"], cold.logprobs[0]


@pytest.mark.change("row-positions")
def test_ragged_cold_rows_are_cold_runs(make_server):
    server = make_server("hybrid")
    replies = server.together(
        [{"messages": ask(n), "max_tokens": 24, "logprobs": True} for n in SIZES]
    )
    assert replies[0].forwards[0][0] == len(SIZES)
    for reply in replies:
        served, cold = first_logprobs(server, reply)
        assert served == pytest.approx(cold, abs=2e-3)
        server.assert_cold(reply)


@pytest.mark.change("row-positions")
def test_ragged_rows_leave_the_keys_of_cold_rows(make_server):
    """What a ragged batch stored answers the next turn as a cold run does."""
    server = make_server("hybrid", apc_checkpoint_entries=8)
    asks = [ask(n) for n in SIZES]
    replies = server.together([{"messages": a, "max_tokens": 8} for a in asks])
    for a, one in zip(asks, replies, strict=True):
        follow = [*a, one.message(), user("get: briar")]
        two = server.chat(follow, max_tokens=24, logprobs=True)
        assert two.cached_tokens > 0
        served, cold = first_logprobs(server, two)
        assert served == pytest.approx(cold, abs=2e-3)


@pytest.mark.change("row-positions")
def test_warm_first_request_of_a_process_starts_at_its_place(make_server, monkeypatch):
    """A model object that has seen no prompt, and a cache that has."""
    server = make_server("hybrid")
    one = server.chat(ask(4), max_tokens=4)
    kept = server.manager
    monkeypatch.setattr(type(kept), "clear", lambda manager: None)
    server.reload()
    server.manager.__dict__.update(kept.__dict__)
    follow = [*ask(4), one.message(), user("get: briar")]
    two = server.chat(follow, max_tokens=24, logprobs=True)
    assert two.cached_tokens > 0, "nothing was restored, so nothing is shown"
    served, cold = first_logprobs(server, two)
    assert served == pytest.approx(cold, abs=2e-3)
    server.assert_cold(two)


@pytest.mark.change("row-positions")
@pytest.mark.given_by_others("row-positions")
def test_batches_that_meet_do_not_mix_their_positions(make_server):
    """Two rows decode while three are prefilled: stock answers 500 to all."""
    server = make_server(
        "hybrid", apc_checkpoint_entries=8, env={"PREFILL_STEP_SIZE": "16"}
    )
    replies = server.two_groups(
        [{"messages": ask(n), "max_tokens": 40} for n in (1, 2)],
        3,
        [{"messages": m, "max_tokens": 12} for m in (ask(6), ask(8, "briar"), ask(3))],
    )
    assert (2, 1) in server.recorder.decode_calls
    for reply in replies:
        server.assert_cold(reply)


@pytest.mark.guard
@pytest.mark.parametrize("model", ["dense", "window"])
def test_models_with_positions_in_the_cache_are_untouched(make_server, model):
    server = make_server(model)
    for reply in server.together(
        [{"messages": ask(n), "max_tokens": 8} for n in SIZES]
    ):
        server.assert_cold(reply)
