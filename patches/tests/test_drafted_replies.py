"""A reply that was written with a draft model enters the prefix cache, wherever it ends."""

import mlx.core as mx
import pytest
from mlx_vlm.tests.drafting_fixtures import (
    BLOCK,
    DRAFTERS,
    build_drafter,
    build_target,
    drafted,
)
from mlx_vlm.tests.generation_fixtures import Run, make_manager, prompt_of


class Oracle:
    """Replaces a random drafter's proposals by what the target will say.

    Every ``wrong_every``-th proposal is an error, so that rounds are cut there too.
    """

    def __init__(self, drafter, wrong_every=0):
        self.wrong_every, self.proposed = wrong_every, 0
        self.run, self.plans, self.seen, self.turn = None, {}, None, 0
        base = type(drafter)

        def propose(drafter, *args, **kwargs):
            return self.correct(base.draft_block(drafter, *args, **kwargs))

        # On the class: a batch may draft with a copy.
        names = ("draft_block", "draft_block_greedy")
        drafter.__class__ = type("Oracled", (base,), dict.fromkeys(names, propose))
        self.drafter = drafter

    def correct(self, proposal):
        """What is proposed in the place of a drafter's own tokens."""
        said = self.run.said
        active = [uid for uid in self.plans if uid not in self.run.ended]
        if proposal.shape[0] < len(active):  # DFlash drafts row by row
            now = sum(map(len, said.values()))
            self.turn = self.turn + 1 if now == self.seen else 0
            self.seen = now
            active = active[self.turn : self.turn + 1]
        rows = [
            self.next_tokens(self.plans[uid], len(said[uid]), proposal.shape[1])
            for uid in active
        ]
        return mx.array(rows, dtype=proposal.dtype)

    def next_tokens(self, plan, start, count):
        tokens = (plan[start:] + [0] * count)[:count]
        for i in range(count):
            self.proposed += 1
            if self.wrong_every and self.proposed % self.wrong_every == 0:
                tokens[i] = (tokens[i] + 1) % 96
        return tokens


def reply_of(model, prompt, count):
    return Run(model).ask(prompt, max_tokens=count)[0][0]


def drafted_run(model, manager, kind, prompts, max_tokens, stop=(), wrong_every=0):
    """A run whose drafter knows the replies; (run, uids, the replies undrafted)."""
    oracle = Oracle(build_drafter(kind), wrong_every)
    plans = [reply_of(model, prompt, max(max_tokens)) for prompt in prompts]
    run = drafted(model, oracle.drafter, kind, manager, stop)
    uids = run.insert(prompts, max_tokens=max_tokens, positioned=True)
    oracle.run, oracle.plans = run, dict(zip(uids, plans, strict=True))
    return run, uids, plans


@pytest.fixture(params=list(DRAFTERS))
def kind(request):
    return request.param


@pytest.fixture
def model():
    return build_target()


@pytest.fixture
def manager():
    return make_manager()


def assert_reply_is_restored(model, manager, prompt, reply):
    """The next turn reads what is new and the reply's last token, as a cold run does."""
    asked = prompt + reply + prompt_of(5, 9)
    (said,), (cached,) = Run(model, manager).ask(asked)
    assert cached == len(prompt) + len(reply) - 1
    assert said == reply_of(model, asked, 8)


@pytest.mark.parametrize("end", range(2, 3 + BLOCK))
def test_reply_that_ends_at_its_budget(model, manager, kind, end):
    prompt = prompt_of(40, 1)
    run, (uid,), (plan,) = drafted_run(model, manager, kind, [prompt], [end])
    assert run.drain()[uid] == plan
    assert_reply_is_restored(model, manager, prompt, plan)


@pytest.mark.parametrize("end", range(2, 2 + BLOCK))
def test_reply_that_ends_at_a_stop_token(model, manager, kind, end):
    # A prompt whose reply has its stop token there for the first time.
    seed = next(
        seed
        for seed in range(100)
        if (reply := reply_of(model, prompt_of(40, seed), end)).index(reply[-1])
        == end - 1
    )
    prompt = prompt_of(40, seed)
    stop = reply_of(model, prompt, end)[-1:]
    run, (uid,), (plan,) = drafted_run(model, manager, kind, [prompt], [30], stop)
    assert run.drain()[uid] == plan[:end]
    assert_reply_is_restored(model, manager, prompt, plan[:end])


@pytest.mark.parametrize("wrong_every", [0, 3, 7])
def test_rows_that_end_at_different_times(model, manager, kind, wrong_every):
    prompts = [prompt_of(40 + seed, seed) for seed in range(3)]
    budgets = [4, 21, 11]
    run, uids, plans = drafted_run(
        model, manager, kind, prompts, budgets, wrong_every=wrong_every
    )
    said = run.drain()
    for uid, prompt, plan, budget in zip(uids, prompts, plans, budgets, strict=True):
        assert said[uid] == plan[:budget]
        assert_reply_is_restored(model, manager, prompt, said[uid])


@pytest.mark.parametrize("after", [2, 4, 6])
def test_row_that_is_removed(model, manager, kind, after):
    prompt = prompt_of(40, 1)
    run, (uid,), (plan,) = drafted_run(
        model, manager, kind, [prompt], [40], wrong_every=4
    )
    run.step_until_said(uid, after)
    assert run.generator.remove(uid)
    reply = run.said[uid]
    assert reply == plan[: len(reply)]
    asked = prompt + reply + prompt_of(5, 9)
    (said,), (cached,) = Run(model, manager).ask(asked)
    assert said == reply_of(model, asked, 8)
    # The round that was broken off may have gone on behind the reply: then its state is
    # of no use, or the reply's last token was processed as well.
    whole = len(prompt) + len(reply)
    assert cached in (len(prompt) - 1, whole - 1, whole)
