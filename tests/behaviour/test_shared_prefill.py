"""Requests that arrive together with the same cold prefix read it once."""

from __future__ import annotations

import pytest

from tests.behaviour.sessions import common
from tests.behaviour.stored import leases
from tests.behaviour.test_rejoin import records
from tests.fakes.server import system, user

change = pytest.mark.change("shared-prefill")
MODELS = ["dense", "hybrid"]
SYSTEM = f"shared system\n{records(50)['content']}"


def agents(count=4, lines=6, text=SYSTEM, **body):
    """Requests of one system text, each with a question of its own."""
    return [
        {
            "messages": [
                system(text),
                user(f"{n} agent {n}\n{records(lines + n)['content']}\nget: amber{n}"),
            ],
            "max_tokens": 8,
            **body,
        }
        for n in range(count)
    ]


def shared_length(replies):
    """|S|: what all prompts begin with."""
    first = replies[0].prompt_ids
    return min(common(first, reply.prompt_ids) for reply in replies[1:])


def read(replies):
    return sum(reply.prefilled for reply in replies)


def assert_read_once(replies):
    """|S| + sum|U| and a few tokens, which is far less than 2|S| + sum|U|."""
    shared = shared_length(replies)
    own = sum(len(reply.prompt_ids) - shared for reply in replies)
    assert shared > 256
    assert read(replies) <= shared + own + 16 * len(replies), (shared, own, [r.prefilled for r in replies])


@change
@pytest.mark.parametrize("model", MODELS)
def test_c15_four_agents_read_the_system_text_once(make_server, model):
    server = make_server(model)
    replies = server.together(agents())
    assert_read_once(replies)
    for reply in replies:
        server.assert_cold(reply)
    assert leases(server.manager) == 0
