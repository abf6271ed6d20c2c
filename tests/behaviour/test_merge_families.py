"""Rows of further families of targets share verify steps, and say what they say alone.

The targets are random, so their drafters are too, and an oracle proposes in their place:
rows accept from none to all of what is proposed, each for itself.
"""

from __future__ import annotations

import random

import pytest

from tests.behaviour.test_speculative_merge import (
    ENV,
    MODE,
    SETTINGS,
    joins,
    rounds,
    run,
)
from tests.behaviour.test_speculative_turns import (
    Agents,
    alone,
    asked,
    assert_nothing_is_left,
)
from tests.fakes.families import make_drafter_for, make_target
from tests.fakes.oracle import Oracle
from tests.fakes.server import user
from tests.fakes.timeline import Timeline

pytestmark = pytest.mark.change("speculative-merge")

# Stock binds no DFlash drafter to nemotron_h in its server.
TARGETS = [("lfm2", "eagle3"), ("lfm2", "dflash"), ("nemotron_h", "eagle3")]
LENGTH = 60


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders of a target and a drafter for it, made when they are asked for."""
    folder, known = tmp_path_factory.mktemp("families"), {}

    def make(family, kind):
        if family not in known:
            known[family] = make_target(folder / family, family)
        if (family, kind) not in known:
            own = folder / f"{family}-{kind}"
            known[family, kind] = make_drafter_for(own, known[family], kind)
        return known[family], known[family, kind]

    return make


@pytest.fixture
def start(made, make_server):
    """Start a server whose drafter proposes what the target says without one."""

    def make(family, kind, mode="always", wrong_every=5):
        target, drafter = made(family, kind)
        plain = make_server(target, **SETTINGS)
        asks = [asked(prompt, LENGTH) for prompt in Agents.prompts]
        plans = [want.ids for want in alone(plain, *asks)]
        settings = {**SETTINGS, "env": {**ENV, MODE: mode}}
        server = make_server(target, draft_model=drafter, **settings)
        server.oracle = Oracle(plans, wrong_every)
        server.oracle.install(server.generator.draft_model)
        return server

    return make


class Clients(Agents):
    """Requests at random, most of them long, compared with what was said undrafted."""

    def __init__(self, server):
        self.server, self.wants = server, server.oracle.plans
        self.random, self.wrong = random.Random(7), []

    def _choose(self):
        lines = self.random.randint(0, 5) if self.random.random() < 0.1 else None
        number = self.random.randrange(len(self.prompts))
        return number, self.random.choice((12, 40, LENGTH)), lines, {}


def said(text):
    """A reply as it was written; the server's own text lacks the leading space."""
    return {"role": "assistant", "content": text}


def come_and_go(server, requests, joined=True):
    clients = Clients(server)
    for at_once in (4, 8):
        server.oracle.rounds.clear()
        with Timeline() as line:
            clients.run(at_once, requests // 2)
        steps = rounds(line)
        assert bool(joins(steps)) == joined
        assert_nothing_is_left(server)
    assert not clients.wrong
    if joined:
        assert max(map(len, steps)) >= 4
    assert len({accepted for _, accepted in server.oracle.rounds}) >= 3


@pytest.mark.parametrize(("family", "kind"), TARGETS)
def test_rows_come_and_go(start, family, kind):
    come_and_go(start(family, kind), 32)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), TARGETS)
def test_many_rows_come_and_go(start, family, kind):
    come_and_go(start(family, kind), 504)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), TARGETS)
def test_many_rows_take_turns(start, family, kind):
    come_and_go(start(family, kind, mode="never"), 208, joined=False)


@pytest.mark.parametrize(("family", "kind"), TARGETS)
def test_what_was_kept_of_a_shared_round_is_whole(start, family, kind):
    server = start(family, kind)
    asks = [asked(Agents.prompts[n], LENGTH) for n in (0, 2, 4)]
    wants = alone(server, *asks)
    replies, steps = run(server, *asks)
    assert [reply.ids for reply in replies] == [want.ids for want in wants]
    assert max(map(len, steps)) == 3
    turns = [
        [*ask["messages"], said(server.decode(reply.ids)), user("dump")]
        for ask, reply in zip(asks, replies, strict=True)
    ]
    warm = [server.chat(turn, max_tokens=24) for turn in turns]
    cold = alone(server, *(asked(turn, 24) for turn in turns))
    for earlier, one, other in zip(replies, warm, cold, strict=True):
        assert one.prefilled < other.prefilled - len(earlier.prompt_ids)
        assert one.ids == other.ids


@pytest.mark.given_by_others("speculative-merge")
def test_rows_of_a_target_that_commits_equal_rows_alone_take_turns(start):
    """Joined, they would fail: Laguna raises where they accept unequally."""
    server = start("laguna", "eagle3")
    asks = [asked(Agents.prompts[n], LENGTH) for n in (0, 2, 4)]
    wants = alone(server, *asks)
    replies, steps = run(server, *asks)
    assert [reply.ids for reply in replies] == [want.ids for want in wants]
    assert max(map(len, steps)) == 1
    first, second, _ = ((reply.record.uid,) for reply in replies)
    assert steps.index(second) < len(steps) - 1 - steps[::-1].index(first)
