"""Each row of a batch is sampled as its own request asks, whoever decodes beside it."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.behaviour.undrafted import (
    SETTINGS,
    drafted_tokens,
    logprobs_of,
    numbers_of,
    tokens_of,
)
from tests.fakes.counting import counted
from tests.fakes.models import DRAFTERS
from tests.fakes.replies import Reply, RequestFailed
from tests.fakes.server import user

pytestmark = pytest.mark.change("row-samplers")

MODELS = ["dense", "hybrid"]
# Without records to copy, nothing is certain.
QUIET = [user("The harbour was quiet and the boats lay on the sand.")]
THIRD = [user("get: briar")]
MARKET = [user("Nobody had seen the market so full since the bridge was mended.")]
# The tiny models are sure of themselves: at 1.5 they say nearly the same as at 0.
HOT = {"temperature": 4.0, "seed": 3}
WARM = {"temperature": 4.0, "seed": 5}
GREEDY: dict = {}
# What a request may ask for beside a hot neighbour.
ASKS = {
    "greedy": GREEDY,
    "seed": {"temperature": 4.0, "seed": 4},
    "temperature": {"temperature": 1.5, "seed": 3},
    "top p": {**WARM, "top_p": 0.5},
    "top k": {**WARM, "top_k": 3},
    "min p": {**WARM, "min_p": 0.02},
    "top n sigma": {**WARM, "top_n_sigma": 3.0},
    "p less": {**WARM, "p_less": True},
    "typical p": {**WARM, "typical_p": 0.97, "top_k": 60, "top_p": 0.99},
    "penalty": {"repetition_penalty": 4.0},
    "bias": {**HOT, "logit_bias": {"9": 4}, "seed": 8},
    "log-probabilities": {"logprobs": True, "top_logprobs": 2},
}
NEAR = 1e-3


def asking(case, messages=QUIET, max_tokens=20):
    settings = ASKS[case] if isinstance(case, str) else case
    return {"messages": messages, "max_tokens": max_tokens, **settings}


class Solo:
    """solo(model, request) -> its reply when it is alone, cold, without a draft model."""

    replies: dict[tuple, Reply] = {}

    def __init__(self, make_server):
        self.make_server = make_server

    def __call__(self, model, request):
        key = (model, repr(sorted(request.items())))
        if key not in self.replies:
            server = self.make_server(model, **SETTINGS)
            self.replies[key] = server.chat(**request)
        return self.replies[key]

    def all(self, model, requests):
        return [self(model, request) for request in requests]


@pytest.fixture
def solo(make_server):
    """Ask for these first: the process has one server."""
    return Solo(make_server)


def assert_same(reply, want):
    assert (reply.ids, reply.finish_reason) == (want.ids, want.finish_reason)
    got, wanted = logprobs_of(reply), logprobs_of(want)
    assert tokens_of(got) == tokens_of(wanted)
    assert numbers_of(got) == pytest.approx(numbers_of(wanted), abs=NEAR)


def assert_all_same(replies, wants):
    for reply, want in zip(replies, wants, strict=True):
        assert_same(reply, want)


def assert_both_as_alone(make_server, solo, model, first, second, after=5):
    """``second`` joins when ``first`` has emitted ``after`` tokens."""
    wants = solo.all(model, [first, second])
    server = make_server(model, **SETTINGS)
    replies = server.staggered([(0, dict(first)), (after, dict(second))])
    assert (2, 1) in server.recorder.decode_calls
    assert_all_same(replies, wants)
    return replies


@pytest.mark.parametrize("case", ASKS)
@pytest.mark.parametrize("model", MODELS)
def test_c31_one_that_joins_is_sampled_as_it_asks(make_server, solo, model, case):
    assert_both_as_alone(make_server, solo, model, asking(HOT), asking(case, MARKET))


@pytest.mark.parametrize("model", MODELS)
def test_c31_as_reported(make_server, solo, model):
    """Temperature 1.5 and many tokens, then temperature 0."""
    first = asking({"temperature": 1.5, "seed": 1}, max_tokens=120)
    assert_both_as_alone(make_server, solo, model, first, asking("greedy", MARKET))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_c31_the_inverse(make_server, solo, model, seed):
    first, hot = asking("greedy"), asking({"temperature": 4.0, "seed": seed}, MARKET)
    assert solo(model, hot).ids != solo(model, asking("greedy", MARKET)).ids
    assert_both_as_alone(make_server, solo, model, first, hot)


@pytest.mark.parametrize("model", MODELS)
def test_first_tokens_of_one_prompt_batch(make_server, solo, model):
    """The neighbour that is admitted first is not always the same; all three are checked."""
    cases = ("seed", "greedy", "top logprobs")
    texts = (QUIET, MARKET, THIRD)
    asks = {**ASKS, "top logprobs": {**HOT, **ASKS["log-probabilities"], "seed": 6}}
    requests = [
        asking(asks[case], text, 3) for case, text in zip(cases, texts, strict=True)
    ]
    wants = solo.all(model, requests)
    assert wants[0].ids[0] != solo(model, asking("greedy", QUIET, 3)).ids[0]
    server = make_server(model, **SETTINGS)
    replies = server.together([dict(request) for request in requests])
    assert {reply.forwards[0][0] for reply in replies} == {3}
    assert_all_same(replies, wants)


@pytest.mark.parametrize("model", MODELS)
def test_eight_rows_that_join_and_leave(make_server, solo, model):
    """Four settings, each twice; all places in the batch change."""
    cases = ("greedy", "seed", "top p", "log-probabilities")
    texts = [
        [user(f"{thing} was quiet and the boats lay on the sand.")]
        for thing in ("The harbour", "A village", "Her market", "No bridge")
    ]
    late = [[user(f"{text[0]['content']} Who had seen it so?")] for text in texts]
    first = [
        asking(c, t, 16 + 3 * i)
        for i, (c, t) in enumerate(zip(cases, texts, strict=True))
    ]
    second = [
        asking(c, t, 20 - 3 * i)
        for i, (c, t) in enumerate(zip(cases, late, strict=True))
    ]
    wants = solo.all(model, [*first, *second])
    server = make_server(model, **SETTINGS)
    replies = server.two_groups([dict(r) for r in first], 4, [dict(r) for r in second])
    # Stock's executor has room for six requests on a machine of two cores.
    assert max(rows for rows, _ in server.recorder.decode_calls) >= 6
    assert_all_same(replies, wants)


@pytest.mark.parametrize("model", MODELS)
def test_streamed(make_server, solo, model):
    first = {**asking(HOT), "stream": True}
    second = {**asking("log-probabilities", MARKET), "stream": True}
    assert_both_as_alone(make_server, solo, model, first, second)


@pytest.mark.parametrize("endpoint", ["responses", "messages"])
def test_other_endpoints(make_server, solo, endpoint):
    hot, cold = asking(HOT), asking("greedy", MARKET)
    want = getattr(make_server("hybrid", **SETTINGS), endpoint)(
        MARKET, max_tokens=20, temperature=0
    )
    server = make_server("hybrid", **SETTINGS)
    ask = server.chat
    # What joins is sent to the other endpoint.
    server.chat = lambda **kw: (
        ask(**kw)
        if kw["messages"] is QUIET
        else getattr(server, endpoint)(kw.pop("messages"), **kw)
    )
    _, reply = server.staggered([(0, hot), (5, {**cold, "temperature": 0})])
    assert (2, 1) in server.recorder.decode_calls
    assert reply.ids == want.ids


def test_min_p_leaves_the_likeliest_token(make_server, solo):
    """It is honoured at all; stock's server has the field and does nothing with it."""
    want = solo("hybrid", asking("greedy"))
    reply = make_server("hybrid", **SETTINGS).chat(**asking({**HOT, "min_p": 1.0}))
    assert reply.ids == want.ids


@pytest.mark.parametrize("case", ["top n sigma", "p less", "typical p"])
def test_a_seed_is_kept_with_every_filter(make_server, case):
    server = make_server("hybrid", **SETTINGS)
    own = {**ASKS[case], "temperature": 9.0, "max_tokens": 40}
    replies = [server.chat(**asking(own)) for _ in range(2)]
    other = server.chat(**asking({**own, "seed": 11}))
    assert replies[0].ids == replies[1].ids != other.ids


# Stock keeps them for all where the first one asks, and for nobody where he does not.
FAIL_ON_STOCK = (("none", "all"), ("none", "own"))
PAIRS = [
    pytest.param(*pair, marks=() if pair in FAIL_ON_STOCK else pytest.mark.guard)
    for pair in itertools.product(("all", "own", "none"), repeat=2)
]


class TestLogProbabilities:
    """Who gets them, and who pays."""

    @pytest.mark.parametrize("first, late", PAIRS)
    def test_everyone_gets_what_he_asked_for(self, make_server, solo, first, late):
        asks = {
            "all": {"logprobs": True, "top_logprobs": 2},
            "own": {"logprobs": True},
            "none": {},
        }
        early, late = asking(asks[first]), asking(asks[late], MARKET, 10)
        assert_both_as_alone(make_server, solo, "dense", early, late)
        assert bool(logprobs_of(solo("dense", early))) is (first != "none")

    def test_nobody_computes_them_when_nobody_asks_any_more(self, make_server):
        """The first one asks and ends; the other decodes on without."""
        server = make_server("dense", **SETTINGS)
        with counted(server) as steps:
            early, _ = server.staggered(
                [
                    (0, asking("log-probabilities", max_tokens=10)),
                    (4, asking("greedy", MARKET, 24)),
                ]
            )
        assert len(logprobs_of(early)) == 10
        sorts = [step.operations["argsort"] for step in steps]
        assert any(sorts[:8]) and len(sorts) > 20 and not any(sorts[12:])

    @pytest.mark.parametrize("after", range(11, 14))
    def test_one_joins_as_the_last_who_asked_leaves(self, make_server, solo, after):
        """What was kept for the pending tokens is for fewer rows than there are then."""
        asks = [
            asking("greedy", MARKET, 24),
            asking("log-probabilities", max_tokens=10),
            asking("greedy", THIRD, 10),
        ]
        wants = solo.all("dense", asks)
        server = make_server("dense", **SETTINGS)
        replies = server.staggered(
            [(start, dict(ask)) for start, ask in zip((0, 2, after), asks, strict=True)]
        )
        assert_all_same(replies, wants)


def decode_steps(make_server, requests):
    """Steps of these requests together, in which nothing joined or ended."""
    server = make_server("dense", **SETTINGS)
    server.chat(QUIET, max_tokens=2)
    with counted(server) as steps:
        server.together([dict(request) for request in requests])
    rows = len(requests)
    found = [
        step
        for step, behind in zip(steps[1:], steps[2:], strict=False)
        if step.rows == behind.rows == rows
    ]
    assert len(found) > 4
    assert {str(dict(step.syncs)) for step in found} == {str({"eval": 1, "tolist": 1})}
    (operations,) = {str(sorted(step.operations.items())) for step in found}
    assert operations
    return found[0].operations


# What stock does for a token of all rows that one request's settings sample.
STOCK = Counter(
    {
        "__getitem__": 2,
        "logsumexp": 1,
        "__sub__": 1,
        "stack": 1,
        "vmap": 1,
        "__mul__": 1,
    }
)


@pytest.mark.guard
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_agree_cost_what_they_cost_on_stock(make_server, rows):
    requests = [asking(HOT, text) for text in (QUIET, MARKET, THIRD)[:rows]]
    assert decode_steps(make_server, requests) == STOCK


@pytest.mark.parametrize("hot", [1, 2])
def test_rows_that_differ_are_sampled_once_a_group(make_server, hot):
    """Two groups: take the rows of each, put what they drew together, put it in order."""
    settings = [HOT] * hot + [GREEDY] * (3 - hot)
    requests = [
        asking(own, text)
        for own, text in zip(settings, (QUIET, MARKET, THIRD), strict=True)
    ]
    more = Counter({"__getitem__": 3, "concatenate": 1, "argmax": 1})
    assert decode_steps(make_server, requests) == STOCK + more


def test_settings_that_cannot_be_fail_their_own_request(make_server, solo):
    """No vocabulary has so many tokens; on stock a row that joins is not asked for them."""
    first = asking(HOT)
    want = solo("dense", first)
    server = make_server("dense", **SETTINGS)
    good, failed = server.settled_staggered(
        [(0, dict(first)), (5, asking({**HOT, "top_k": 10**6}, MARKET))]
    )
    assert isinstance(failed, RequestFailed) and failed.status == 500
    assert_same(good, want)


class TestWithADraftModel:
    """What is drafted together is sampled by one sampler."""

    @pytest.mark.parametrize("name", sorted(DRAFTERS))
    def test_each_as_it_asks(self, make_server, solo, name):
        model = DRAFTERS[name]
        requests = [asking(HOT), asking("greedy", MARKET), asking("seed", THIRD)]
        wants = solo.all(model, requests)
        server = make_server(model, draft_model=name, **SETTINGS)
        replies = server.together([dict(request) for request in requests])
        assert [reply.ids for reply in replies] == [want.ids for want in wants]
        if "eagle3" in name:  # it does not draft what has a seed
            assert not drafted_tokens(replies[0]) and not drafted_tokens(replies[2])
        else:
            assert drafted_tokens(replies[1]) > 0

    @pytest.mark.parametrize("late", ["greedy", "seed"])
    @pytest.mark.parametrize("name", sorted(DRAFTERS))
    def test_one_that_comes_later(self, make_server, solo, name, late):
        model = DRAFTERS[name]
        pair = [asking("greedy" if late == "seed" else HOT), asking(late, MARKET)]
        wants = solo.all(model, pair)
        server = make_server(model, draft_model=name, **SETTINGS)
        replies = server.staggered(list(zip((0, 4), pair, strict=True)))
        assert [reply.ids for reply in replies] == [want.ids for want in wants]

    @pytest.mark.parametrize("case", ["greedy", "seed"])
    def test_one_that_comes_while_another_is_decoded_without_it(
        self, make_server, solo, case
    ):
        neighbour = GREEDY if case == "seed" else HOT
        first = asking({**neighbour, **ASKS["log-probabilities"]}, max_tokens=24)
        pair = [first, asking(case, MARKET)]
        wants = solo.all("hybrid", pair)
        server = make_server("hybrid", draft_model="hybrid-mtp", **SETTINGS)
        replies = server.staggered([(0, dict(pair[0])), (4, dict(pair[1]))])
        assert_all_same(replies, wants)
        assert not drafted_tokens(replies[0])

    @pytest.mark.guard
    @pytest.mark.parametrize("own", [GREEDY, HOT], ids=["greedy", "hot"])
    def test_rows_that_agree_are_drafted_together(self, make_server, solo, own):
        requests = [asking(own, text) for text in (QUIET, MARKET)]
        wants = solo.all("hybrid", requests)
        server = make_server("hybrid", draft_model="hybrid-mtp", **SETTINGS)
        replies = server.together([dict(request) for request in requests])
        assert [reply.ids for reply in replies] == [want.ids for want in wants]
        assert {reply.forwards[0][0] for reply in replies} == {2}
        assert all(drafted_tokens(reply) for reply in replies)
