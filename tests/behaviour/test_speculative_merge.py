"""With a draft model loaded, rows that came one after the other share verify steps."""

from __future__ import annotations

import importlib

import pytest

from tests.behaviour.stored import leases
from tests.behaviour.test_speculative_turns import (
    Agents,
    alone,
    asked,
    assert_nothing_is_left,
    cancelled_beside,
)
from tests.fakes.models import DRAFTERS, record_prompt
from tests.fakes.oracle import make_drafter
from tests.fakes.replies import RequestFailed
from tests.fakes.server import system, user
from tests.fakes.timeline import Timeline

pytestmark = pytest.mark.change("speculative-merge")

ar = importlib.import_module("mlx_vlm.generate.ar")
MODE = "MLX_VLM_DRAFT_MERGE"
ENV = {"PREFILL_STEP_SIZE": "32", "MLX_VLM_DRAFT_BLOCK_SIZE": "4", MODE: "always"}
SETTINGS = {"apc_checkpoint_entries": 16, "env": ENV}
LONG = record_prompt(31, 16, task="dump").messages
SHORT = [system("Be brief."), user("hello")]
MIDDLE = record_prompt(5, 8, filler=1, task="dump").messages
OTHER = record_prompt(9, 12, task="dump").messages


@pytest.fixture(scope="session")
def assistant(tmp_path_factory):
    """A drafter that keeps no state: it reads the target's caches. Its weights are random."""
    return make_drafter(tmp_path_factory.mktemp("drafter") / "a", kind="assistant")


@pytest.fixture(params=[*DRAFTERS, "assistant"])
def server(request, make_server, assistant):
    """A server with a drafter of each kind; batches join wherever they can."""
    if request.param == "assistant":
        return make_server("dense", draft_model=assistant, **SETTINGS)
    return make_server(DRAFTERS[request.param], draft_model=request.param, **SETTINGS)


def figures(reply):
    """(rounds, drafted, accepted) as the answer says."""
    names = ("draft_rounds", "draft_n", "draft_n_accepted")
    return tuple(reply.raw["timings"].get(name) for name in names)


def rounds(line):
    """The uids of each verify step."""
    return [who for kind, who in line.events if kind == "round"]


def joins(steps):
    """How often a row had others beside it in a round than in its round before."""
    before, count = {}, 0
    for who in steps:
        count += any(not set(who) <= before[uid] for uid in who if uid in before)
        before.update(dict.fromkeys(who, set(who)))
    return count


def run(server, *asks, after=4):
    """Each begins when the first has emitted so many tokens more; replies and rounds."""
    starts = [(after * number, ask) for number, ask in enumerate(asks, start=1)]
    with Timeline() as line:
        replies = server.staggered(starts)
    return replies, rounds(line)


def test_one_verify_step_serves_both(server):
    asks = [asked(LONG, 96), asked(MIDDLE, 64)]
    wants = alone(server, *asks)
    (one, two), steps = run(server, *asks)
    assert [one.ids, two.ids] == [want.ids for want in wants]
    first, second = one.record.uid, two.record.uid
    apart = [who for who in steps if who == (second,)]
    shared = [who for who in steps if set(who) == {first, second}]
    assert len(apart) == 1, "the newcomer has one round of its own"
    assert len(shared) == figures(two)[0] - 1
    assert len(steps) == figures(one)[0] + 1
    assert len(steps) < sum(figures(want)[0] for want in wants)


@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_keep_each_what_they_accept(make_server, name):
    """A row needs as many rounds as alone: none waits for the row that accepts least."""
    server = make_server(DRAFTERS[name], draft_model=name, **SETTINGS)
    asks = [asked(LONG, 96), asked(MIDDLE, 64), asked(OTHER, 64)]
    wants = alone(server, *asks)
    replies, steps = run(server, *asks)
    assert [reply.ids for reply in replies] == [want.ids for want in wants]
    assert max(map(len, steps)) == 3
    for reply, want in zip(replies, wants, strict=True):
        assert figures(reply)[0] <= figures(want)[0] + 1


def test_long_replies_of_rows_that_accept_unequally(make_server):
    """What they rejected, round by round, is in nobody's way: not theirs, nor a next turn's."""
    server = make_server("hybrid", draft_model="hybrid-mtp", **SETTINGS)
    words = ("hello", "what is it", "tell me more of that")
    prompts = [[system("Be brief." * n), user(w)] for n, w in enumerate(words, start=1)]
    wants = alone(server, *(asked(prompt, 300) for prompt in prompts))
    server.clear_cache()
    replies, steps = run(server, *(asked(prompt, 300) for prompt in prompts))
    assert [reply.ids for reply in replies] == [want.ids for want in wants]
    assert min(len(reply.ids) for reply in replies) == 300
    assert sum(len(who) == 3 for who in steps) > 50
    turns = [
        [*prompt, reply.message(), user("dump")]
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    warm = [server.chat(turn, max_tokens=24) for turn in turns]
    assert max(reply.prefilled for reply in warm) < 30
    cold = alone(server, *(asked(turn, 24) for turn in turns))
    assert [reply.ids for reply in warm] == [reply.ids for reply in cold]


def test_rows_that_accept_all_cost_what_the_longest_costs(make_server):
    """Then the rows of a batch do not hold each other up."""
    server = make_server("dense", draft_model="dense-dflash", **SETTINGS)
    asks = [asked(LONG, 96), asked(MIDDLE, 48), asked(OTHER, 32)]
    wants = alone(server, *asks)
    replies, steps = run(server, *asks)
    assert [reply.ids for reply in replies] == [want.ids for want in wants]
    alone_steps = [figures(want)[0] for want in wants]
    assert len(steps) <= alone_steps[0] + 6 < sum(alone_steps)
    assert max(map(len, steps)) == 3


def test_figures_are_the_row_s_own(server):
    asks = [asked(LONG, 96), asked(MIDDLE, 24)]
    (one, two), steps = run(server, *asks)
    assert joins(steps) == 1
    for reply in (one, two):
        own, drafted, accepted = figures(reply)
        assert own == sum(reply.record.uid in who for who in steps)
        assert own < len(steps) or reply is one
        assert drafted <= 3 * own
        # Each round emits one token that is not drafted; the first comes of the prefill.
        assert len(reply.ids) == 1 + own + accepted


def test_what_was_kept_of_a_shared_round_is_whole(server):
    """Target and drafter go on from it as from what they have read themselves."""
    asks = [asked(LONG, 60), asked(MIDDLE, 40)]
    replies, steps = run(server, *asks)
    assert max(map(len, steps)) == 2
    turns = [
        [*ask["messages"], reply.message(), user("dump")]
        for ask, reply in zip(asks, replies, strict=True)
    ]
    warm = [server.chat(turn, max_tokens=24) for turn in turns]
    cold = alone(server, *(asked(turn, 24) for turn in turns))
    for earlier, one, other in zip(replies, warm, cold, strict=True):
        assert other.prefilled == len(other.prompt_ids)
        assert one.prefilled < other.prefilled - len(earlier.prompt_ids)
        assert (one.ids, figures(one)) == (other.ids, figures(other))


@pytest.mark.parametrize("name", ["hybrid-mtp", "dense-dflash"])
def test_sampled_rows_draw_as_alone(make_server, name):
    """Rows of one sampling join; a seed of its own keeps a row apart."""
    server = make_server(DRAFTERS[name], draft_model=name, **SETTINGS)
    hot = {"temperature": 0.9, "top_p": 0.95}
    for seeds, together in (((None, None), 2), ((5, 5), 2), ((5, 6), 1)):
        asks = [
            asked(messages, 48, **hot, **({} if seed is None else {"seed": seed}))
            for messages, seed in zip((LONG, MIDDLE), seeds, strict=True)
        ]
        wants = alone(server, *asks)
        replies, steps = run(server, *asks)
        assert [reply.ids for reply in replies] == [want.ids for want in wants]
        assert max(map(len, steps)) == together


def test_a_cancelled_row_leaves_the_others(server):
    reply, _, line, _ = cancelled_beside(server, after=9)
    steps = rounds(line)
    assert max(map(len, steps)) == 2 and steps[-1] == (reply.record.uid,)
    assert leases(server.manager) == 0


def test_an_error_in_a_shared_round_fails_its_rows(server, monkeypatch):
    long, other = asked(LONG, 96), asked(MIDDLE, 40)
    (want,) = alone(server, long)
    kind, shared = ar.SpeculativeGenerationBatch, []
    advance = kind.next

    def planted(batch):
        if len(batch.uids) == 2:
            shared.append(tuple(batch.uids))
            raise RuntimeError("planted in a shared round")
        return advance(batch)

    monkeypatch.setattr(kind, "next", planted)
    outcomes = server.settled_staggered([(4, long), (4, other)])
    assert [isinstance(one, RequestFailed) for one in outcomes] == [True, True]
    assert {one.status for one in outcomes} == {500} and len(shared) == 1
    monkeypatch.undo()
    server.clear_cache()
    assert server.chat(**long).ids == want.ids
    assert leases(server.manager) == 0


@pytest.mark.parametrize("name", ["hybrid-mtp", "dense-dflash"])
def test_no_more_rows_than_places(make_server, name):
    env = {**ENV, "MLX_VLM_MAX_NUM_SEQS": "2"}
    settings = {**SETTINGS, "env": env}
    server = make_server(DRAFTERS[name], draft_model=name, **settings)
    asks = [asked(LONG, 96), asked(MIDDLE, 20), asked(OTHER, 24)]
    wants = alone(server, *asks)
    replies, steps = run(server, *asks)
    assert [reply.ids for reply in replies] == [want.ids for want in wants]
    assert max(map(len, steps)) == 2
    uids = [reply.record.uid for reply in replies]
    for newcomer in uids[1:]:
        assert {uids[0], newcomer} in [set(who) for who in steps]


@pytest.mark.parametrize("name", ["hybrid-mtp", "dense-dflash"])
def test_the_switch(make_server, name):
    """Joined, apart and joined again; joined where nobody says, while nothing is known."""
    widest = []
    for mode in ("always", "never", "always", ""):
        env = {name: value for name, value in {**ENV, MODE: mode}.items() if value}
        settings = {**SETTINGS, "env": env}
        server = make_server(DRAFTERS[name], draft_model=name, **settings)
        server.generator.draft_model.__dict__.pop("merge_pace", None)
        server.clear_cache()
        widest.append(max(map(len, run(server, asked(LONG, 60), asked(MIDDLE, 40))[1])))
    assert widest == [2, 1, 2, 2]


def come_and_go(server, requests):
    agents = Agents(server)
    widest, joined = [], []
    for at_once in (1, 2, 4, 8):
        with Timeline() as line:
            agents.run(at_once, requests // 4)
        widest.append(max(map(len, rounds(line))))
        joined.append(joins(rounds(line)))
        assert_nothing_is_left(server)
    assert not agents.wrong
    assert joined[0] == 0 and min(joined[1:]) > 0 and widest[3] >= 4


def test_rows_come_and_go(server):
    come_and_go(server, 64)


@pytest.mark.slow
def test_many_rows_come_and_go(server):
    come_and_go(server, 504)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hybrid-mtp", "dense-eagle3", "dense-dflash"])
def test_many_rows_where_cost_decides(make_server, name):
    settings = {**SETTINGS, "env": {**ENV, MODE: "auto"}}
    server = make_server(DRAFTERS[name], draft_model=name, **settings)
    agents = Agents(server)
    with Timeline() as line:
        agents.run(8, 504)
    assert_nothing_is_left(server)
    assert not agents.wrong and joins(rounds(line)) > 0
