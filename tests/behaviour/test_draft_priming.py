"""The drafter reads the whole prompt, however the prefill is cut."""

from __future__ import annotations

import pytest

from tests.fakes.models import DRAFTERS, model_dir, record_prompt
from tests.fakes.oracle import make_drafter
from tests.fakes.proposals import Proposals
from tests.fakes.server import system, user
from tests.fakes.unchunked import Unchunked

change = pytest.mark.change("draft-priming")

NOTES = "You look words up.\n" + "amber = fox yak sun\nbriar = elk owl\n" * 6
BLOCK = 4


@pytest.fixture(scope="session")
def drafter(tmp_path_factory):
    return make_drafter(tmp_path_factory.mktemp("drafter") / "mtp", BLOCK)


@pytest.fixture(scope="session")
def unchunked(drafter):
    return Unchunked(str(model_dir("hybrid")), drafter)


def ask(key):
    return [system(NOTES), user(f"get: {key}")]


@change
@pytest.mark.parametrize("step", [7, 64, 4096])
def test_a_cold_prompt_in_chunks_of_any_size(make_server, drafter, unchunked, step):
    server = make_server(
        "hybrid", draft_model=drafter, env={"PREFILL_STEP_SIZE": str(step)}
    )
    proposals = Proposals(server.generator.draft_model)
    reply = server.chat(ask("amber"), max_tokens=8)
    wanted = unchunked.first_proposal(reply.prompt_ids, BLOCK)
    assert len(set(wanted)) > 1, "a drafter that says one thing shows nothing"
    assert proposals.take()[0] == [wanted]


@change
def test_rows_of_different_lengths_in_one_prefill(make_server, drafter, unchunked):
    server = make_server("hybrid", draft_model=drafter, env={"PREFILL_STEP_SIZE": "32"})
    proposals = Proposals(server.generator.draft_model)
    asks = [ask("amber"), ask("briar, which is a longer question"), [user("dump")]]
    replies = server.together([{"messages": a, "max_tokens": 8} for a in asks])
    first = proposals.take()[0]
    wanted = [unchunked.first_proposal(r.prompt_ids, BLOCK) for r in replies]
    assert sorted(first) == sorted(wanted)


@change
def test_the_loaded_drafter_keeps_no_state_of_a_request(
    make_server, drafter, unchunked
):
    server = make_server("hybrid", draft_model=drafter, env={"PREFILL_STEP_SIZE": "16"})
    proposals = Proposals(server.generator.draft_model)
    reply = server.chat(ask("amber"), max_tokens=6)
    assert proposals.take()[0] == [unchunked.first_proposal(reply.prompt_ids, BLOCK)]
    assert server.generator.draft_model._seed_token is None, "state on the shared one"


# Stock does not cut the prompts of gemma4 models when they have a drafter.
COLD = [
    pytest.param(name, marks=pytest.mark.guard if "dense" in name else change)
    for name in sorted(DRAFTERS)
]


@pytest.mark.parametrize("name", COLD)
def test_a_cold_reply_is_drafted_by_who_has_read_the_prompt(make_server, name):
    """These drafters copy from the prompt: without it, few of their tokens are right."""
    prompt = record_prompt(3, 12, filler=4)
    server = make_server(
        DRAFTERS[name], draft_model=name, env={"PREFILL_STEP_SIZE": "64"}
    )
    drafter = server.generator.draft_model
    drafted, accepted = counts(drafter)
    reply = server.chat(prompt.messages, max_tokens=60)
    assert len(reply.ids) > 20
    drafted, accepted = (
        now - before
        for now, before in zip(counts(drafter), (drafted, accepted), strict=True)
    )
    assert accepted / drafted >= 0.6, f"{accepted} of {drafted} accepted"


def counts(drafter):
    """Drafted and accepted tokens since the drafter was loaded."""
    return (
        getattr(drafter, "speculative_total_drafted", 0),
        getattr(drafter, "speculative_total_accepted", 0),
    )
