"""Requests that drafting cannot serve, and what their answers are compared by."""

from __future__ import annotations

import pytest

from tests.fakes.server import system, user

ASK = [
    system("You look words up.\n" + "amber = fox yak sun\nbriar = elk owl\n" * 6),
    user("dump"),
]
LATE = [*ASK[:1], user("get: briar")]
SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "yak"]}, "count": {"const": 7}},
    "required": ["animal", "count"],
    "additionalProperties": False,
}
CASES = {
    "logprobs": {"logprobs": True},
    "top logprobs": {"logprobs": True, "top_logprobs": 2},
    "repetition": {"repetition_penalty": 4.0},
    "presence": {"presence_penalty": 12.0},
    "frequency": {"frequency_penalty": 3.0},
    "bias": {"logit_bias": {"5": 100}},
    "thinking budget": {"enable_thinking": True, "thinking_budget": 3},
    "json object": {"response_format": {"type": "json_object"}},
    "json schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "count", "schema": SCHEMA},
        }
    },
}
# Logits move a little with the shape of a batch.
NEAR = 1e-3
SETTINGS = {"apc_checkpoint_entries": 8, "env": {"TOP_LOGPROBS_K": "3"}}


def logprobs_of(reply):
    """(token, logprob, [(token, logprob) of the best]) for each token of an answer."""
    parts = reply.raw if isinstance(reply.raw, list) else [reply.raw]
    choices = [choice for part in parts for choice in part.get("choices") or []]
    found = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    return [
        (
            entry["token"],
            entry["logprob"],
            [(top["token"], top["logprob"]) for top in entry["top_logprobs"]],
        )
        for part in found
        for entry in part["content"]
    ]


def numbers_of(entries):
    return [value for _, own, top in entries for value in (own, *(v for _, v in top))]


def tokens_of(entries):
    """The tokens alone; of the best ones the first, since others may be tied."""
    return [(token, top[0][0] if top else None, len(top)) for token, _, top in entries]


def assert_same(reply, want, near=NEAR):
    """Tokens, ending, log-probabilities and statistics of a reply without a drafter."""
    assert (reply.ids, reply.finish_reason) == (want.ids, want.finish_reason)
    # A streamed answer keeps the white space at its ends.
    assert reply.text.strip() == want.text.strip()
    assert reply.reasoning.strip() == want.reasoning.strip()
    got, wanted = logprobs_of(reply), logprobs_of(want)
    assert tokens_of(got) == tokens_of(wanted)
    assert numbers_of(got) == pytest.approx(numbers_of(wanted), abs=near)
    assert drafted_tokens(reply) == 0


def drafted_tokens(reply):
    """What the answer says about drafting."""
    parts = reply.raw if isinstance(reply.raw, list) else [reply.raw]
    timings = [part["timings"] for part in parts if part.get("timings")]
    return sum(timing.get("draft_n") or 0 for timing in timings)


def asking(case, messages=ASK, max_tokens=24):
    return {"messages": messages, "max_tokens": max_tokens, **CASES[case]}
