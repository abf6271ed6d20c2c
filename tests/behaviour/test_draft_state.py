"""A warm turn drafts as a cold one does: the drafter has read the whole prompt."""

from __future__ import annotations

import pytest

from tests.fakes.oracle import make_drafter
from tests.fakes.proposals import Proposals
from tests.fakes.server import system, user

ASK = [
    system("You look words up.\n" + "amber = fox yak sun\nbriar = elk owl\n" * 6),
    user("dump"),
]
SLACK = 2


@pytest.fixture(scope="session")
def drafter(tmp_path_factory):
    return make_drafter(tmp_path_factory.mktemp("drafter") / "mtp")


@pytest.fixture
def drafted(make_server, drafter):
    return make_server("hybrid", draft_model=drafter, apc_checkpoint_entries=8)


def next_turn(ask, reply, text="get: amber"):
    return [*ask, reply.message(), user(text)]


def cold(server, ask, proposals, **kw):
    server.clear_cache()
    proposals.take()
    reply = server.chat(ask, **kw)
    assert reply.cached_tokens == 0
    return reply, proposals.take()


@pytest.mark.change("draft-state")
def test_c39_a_warm_turn_proposes_what_a_cold_one_does(drafted):
    proposals = Proposals(drafted.generator.draft_model)
    ask = ASK
    for turn in range(3):
        reply = drafted.chat(ask, max_tokens=12)
        ask = next_turn(ask, reply, f"get: amber {turn}")
    proposals.take()
    warm = drafted.chat(ask, max_tokens=12)
    of_warm = proposals.take()
    assert warm.prefilled <= len(warm.prompt_ids) - len(reply.prompt_ids)
    again, of_cold = cold(drafted, ask, proposals, max_tokens=12)
    assert warm.ids == again.ids
    assert of_warm == of_cold and len(of_cold) > 2
