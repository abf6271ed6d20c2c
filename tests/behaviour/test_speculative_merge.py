"""With a draft model loaded, rows that came one after the other share verify steps."""

from __future__ import annotations

import pytest

from tests.behaviour.test_speculative_turns import come_and_go
from tests.fakes.models import DRAFTERS, record_prompt
from tests.fakes.server import system, user
from tests.fakes.timeline import Timeline

pytestmark = pytest.mark.change("speculative-merge")

SETTINGS = {
    "apc_checkpoint_entries": 8,
    "env": {
        "PREFILL_STEP_SIZE": "32",
        "MLX_VLM_DRAFT_BLOCK_SIZE": "4",
        "MLX_VLM_SPECULATIVE_MERGE": "always",
    },
}
LONG = record_prompt(31, 16, task="dump").messages
SHORT = [system("Be brief."), user("hello")]
MIDDLE = record_prompt(5, 8, filler=1, task="dump").messages


@pytest.fixture(params=[*DRAFTERS])
def server(request, make_server):
    return make_server(DRAFTERS[request.param], draft_model=request.param, **SETTINGS)


def asked(messages, max_tokens, **more):
    return {"messages": list(messages), "max_tokens": max_tokens, **more}


def alone(server, *asks):
    out = []
    for ask in asks:
        server.clear_cache()
        out.append(server.chat(**ask))
    server.clear_cache()
    return out


def test_a_newcomer_shares_the_verify_steps(server):
    asks = [asked(LONG, 96), asked(MIDDLE, 64)]
    wants = alone(server, *asks)
    with Timeline() as line:
        replies = server.staggered([(4, asks[0]), (4, asks[1])])
    assert [reply.ids for reply in replies] == [want.ids for want in wants]
    first, second = (reply.record.uid for reply in replies)
    shared = [who for kind, who in line.events if kind == "round" and len(who) == 2]
    print(
        len(shared),
        len(line.rounds_of(first)),
        len(line.rounds_of(second)),
        [w.raw["timings"] for w in wants],
    )
    assert len(shared) > 5


def test_rows_come_and_go(server):
    come_and_go(server, 64)


@pytest.mark.slow
def test_many_rows_come_and_go(server):
    come_and_go(server, 504)
