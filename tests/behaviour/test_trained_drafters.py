"""Each trained drafter drafts on the real server and changes no reply."""

from __future__ import annotations

import pytest

from tests.fakes.models import DRAFTERS, record_prompt

pytestmark = pytest.mark.guard


@pytest.mark.parametrize("name", DRAFTERS)
def test_replies_are_those_of_the_run_without_a_drafter(make_server, name):
    chats = [record_prompt(seed, 12, task="get", count=6) for seed in (41, 42)]
    plain_server = make_server(DRAFTERS[name])
    plain = [plain_server.chat(c.messages, max_tokens=48) for c in chats]
    server = make_server(DRAFTERS[name], draft_model=name)
    drafter = server.generator.draft_model
    before = counts(drafter)
    for chat, want in zip(chats, plain, strict=True):
        reply = server.chat(chat.messages, max_tokens=48)
        assert reply.ids == want.ids and len(reply.ids) > 24
    drafted, accepted = (a - b for a, b in zip(counts(drafter), before, strict=True))
    assert 0 < accepted < drafted


def counts(drafter):
    """Drafted and accepted tokens since the drafter was loaded, as the server counts."""
    return (
        getattr(drafter, "speculative_total_drafted", 0),
        getattr(drafter, "speculative_total_accepted", 0),
    )
