"""What drafting cannot serve is answered as without a draft model, which goes on drafting for others."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.behaviour.sessions import assert_reads_only_new
from tests.behaviour.stored import leases
from tests.behaviour.undrafted import (
    ASK,
    CASES,
    LATE,
    NEAR,
    SETTINGS,
    asking,
    assert_same,
    drafted_tokens,
    logprobs_of,
    numbers_of,
)
from tests.fakes.oracle import Oracle, make_drafter
from tests.fakes.replies import Reply, RequestFailed
from tests.fakes.server import user

pytestmark = pytest.mark.change("undrafted-requests")

generation = importlib.import_module("mlx_vlm.server.generation")


@pytest.fixture(scope="session")
def drafter(tmp_path_factory):
    return make_drafter(tmp_path_factory.mktemp("drafter") / "mtp")


@pytest.fixture(autouse=True)
def masks_without_metal(monkeypatch):
    """Grammar masks as array operations, where stock has a Metal kernel only."""
    import mlx.core as mx

    def mask_logits(logits, mask):
        logits, mask = logits.reshape(-1, logits.shape[-1]), mask.reshape(1, -1)
        token = mx.arange(logits.shape[1])
        words = mask[:, token >> 5].view(mx.uint32)
        allowed = (words >> (token & 31).astype(mx.uint32)) & 1
        return mx.where(allowed == 1, logits, mx.array(-float("inf"), logits.dtype))

    structured = importlib.import_module("mlx_vlm.structured")
    monkeypatch.setattr(structured, "_apply_llguidance_mask", mask_logits)


class Plain:
    """plain(model, messages, **body) -> the reply without a draft model, cold.

    The process has one server: ask for these before the one with the draft model.
    """

    replies: dict[tuple, Reply] = {}

    def __init__(self, make_server):
        self.make_server, self.is_open = make_server, True

    def __call__(self, model, messages, **body):
        assert self.is_open, "the server with the draft model would be gone"
        if (model, "") not in self.replies:  # at once: each server costs a load
            self.replies[model, ""] = self._ask(model, ASK, max_tokens=24)
            for case in CASES:
                self._ask(model, **asking(case))
        return self._ask(model, messages, **body)

    def _ask(self, model, messages, **body):
        key = (model, repr(messages), repr(sorted(body.items())))
        if key not in self.replies:
            server = self.make_server(model, **SETTINGS)
            self.replies[key] = server.chat(messages, **body)
        return self.replies[key]


@pytest.fixture
def plain(make_server):
    return Plain(make_server)


@pytest.fixture
def drafted(make_server, drafter, plain):
    """make(model, oracle) -> a server with a draft model, and the oracle in its place.

    The dense model shows no hidden states, so stock drops the drafter when it loads.
    It is put back: requests that never reach it need not care.
    """

    def make(model="hybrid", oracle=None):
        plain.is_open = False
        server = make_server(model, draft_model=drafter, **SETTINGS)
        generator = server.generator
        if generator.draft_model is None:
            load = importlib.import_module("mlx_vlm.speculative.drafters").load_drafter
            generator.draft_model, generator.draft_kind = load(drafter, kind="mtp")
        (oracle or Oracle([], 0)).install(generator.draft_model)
        return server

    yield make


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_alone(drafted, plain, model, case):
    """Cold, warm, and streamed; the plain answer is not what it would be without."""
    want = plain(model, **asking(case))
    if "logprobs" in case:
        assert len(logprobs_of(want)) == 24 and min(numbers_of(logprobs_of(want))) < 0
    else:
        assert want.ids != plain(model, ASK, max_tokens=24).ids
    assert want.finish_reason == ("stop" if case == "json schema" else "length")
    oracle = Oracle([], 0)
    server = drafted(model, oracle)
    for stream in (False, True):
        assert_same(server.chat(**asking(case), stream=stream), want)
    assert oracle.rounds == []
    assert leases(server.manager) == 0


@pytest.mark.parametrize("endpoint", ["responses", "messages"])
@pytest.mark.parametrize("case", ["thinking budget", "json schema", "repetition"])
def test_other_endpoints(drafted, make_server, endpoint, case):
    ask = getattr(make_server("hybrid", **SETTINGS), endpoint)
    want = ask(ASK, max_tokens=24, **CASES[case])
    reply = getattr(drafted(), endpoint)(ASK, max_tokens=24, **CASES[case])
    assert reply.ids == want.ids and reply.text == want.text


def test_where_grammars_cannot_run_the_drafter_is_not_the_reason(
    drafted, make_server, monkeypatch
):
    """Without Metal, stock's own masks fail; with it, they do not."""
    monkeypatch.undo()

    def outcome(server):
        try:
            reply = server.chat(**asking("json schema"))
        except RequestFailed as failed:
            return failed.status, failed.text
        return reply.ids, reply.text

    want = outcome(make_server("hybrid", **SETTINGS))
    assert outcome(drafted()) == want


def test_caches_are_those_without_a_drafter(drafted, make_server, monkeypatch):
    """One row has plain caches, cold and warm."""
    ar = importlib.import_module("mlx_vlm.generate.ar")
    batch, found = ar.PromptProcessingBatch, []
    generate = batch.generate

    def noted(self, *args, **kwargs):
        found.append([type(layer).__name__ for layer in self.prompt_cache])
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(batch, "generate", noted)
    # One after the other: the process has one server.
    for make in (lambda: make_server("hybrid", **SETTINGS), drafted):
        server = make()
        for messages in (ASK, [*ASK, user("again")]):
            reply = server.chat(**asking("repetition", messages, 4))
        assert reply.cached_tokens > 0
    assert len(found) == 4 and found[:2] == found[2:]


@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_two_at_once(drafted, plain, model):
    requests = [asking(case) for case in ("repetition", "top logprobs")]
    wants = [plain(model, **request) for request in requests]
    server = drafted(model)
    replies = server.together([dict(request) for request in requests])
    for reply, want in zip(replies, wants, strict=True):
        assert_same(reply, want)
    assert replies[0].forwards[0][0] == 2


@pytest.mark.parametrize("model", ["dense", "hybrid"])
@pytest.mark.parametrize(
    "first, second",
    [
        ("top logprobs", "repetition"),
        ("repetition", "top logprobs"),
        ("bias", "logprobs"),
        ("thinking budget", "json schema"),
    ],
)
def test_one_joins_the_other(drafted, plain, model, first, second):
    requests = [asking(first), asking(second, LATE, 12)]
    wants = [plain(model, **request) for request in requests]
    server = drafted(model)
    replies = server.staggered([(0, dict(requests[0])), (4, dict(requests[1]))])
    assert (2, 1) in server.recorder.decode_calls
    for reply, want in zip(replies, wants, strict=True):
        assert_same(reply, want)


def test_drafted_beside_undrafted(drafted, plain):
    """Arriving together, they are read one after the other, each in its own way."""
    want = plain("hybrid", LATE, max_tokens=12)
    wanted = plain("hybrid", **asking("top logprobs"))
    oracle = Oracle([want.ids], 0)
    server = drafted("hybrid", oracle)
    first, second = server.together(
        [{"messages": LATE, "max_tokens": 12}, asking("top logprobs")]
    )
    assert first.ids == want.ids
    assert_same(second, wanted)
    assert first.forwards[0][0] == second.forwards[0][0] == 1
    # Where one batch decodes at a time, the first decides: the other joins it undrafted.
    assert oracle.accepted > 0 or second.record.uid < first.record.uid


def test_undrafted_waits_for_the_drafted(drafted, plain):
    """What was drafted while it waited is not in its statistics."""
    want = plain("hybrid", ASK, max_tokens=24)
    late = asking("top logprobs", LATE, 12)
    wanted = plain("hybrid", **late)
    oracle = Oracle([want.ids], 0)
    server = drafted("hybrid", oracle)
    first, second = server.staggered(
        [(0, {"messages": list(ASK), "max_tokens": 24}), (3, late)]
    )
    assert first.ids == want.ids and drafted_tokens(first) > 0
    assert_same(second, wanted)
    rounds = len(oracle.rounds)
    again = server.chat(ASK, max_tokens=24)
    assert again.ids == want.ids and len(oracle.rounds) > rounds


def test_drafted_does_not_wait_for_undrafted(drafted, plain):
    """It joins them undrafted or, where batches take turns, is drafted beside them."""
    long = asking("repetition", max_tokens=30)
    late = {"messages": LATE, "max_tokens": 6}
    wants = plain("hybrid", **long), plain("hybrid", **late)
    oracle = Oracle([wants[1].ids], 0)
    server = drafted("hybrid", oracle)
    first, second = server.staggered([(0, long), (4, late)])
    assert ((2, 1) in server.recorder.decode_calls) is not bool(oracle.rounds)
    assert_same(first, wants[0])
    assert second.ids == wants[1].ids


def test_drafting_resumes_after_them(drafted, plain):
    want = plain("hybrid", ASK, max_tokens=24)
    cases = ("bias", "json schema", "logprobs")
    wants = [plain("hybrid", **asking(case)) for case in cases]
    oracle = Oracle([want.ids], 0)
    server = drafted("hybrid", oracle)
    for case, wanted in zip(cases, wants, strict=True):
        assert_same(server.chat(**asking(case)), wanted)
        rounds = len(oracle.rounds)
        reply = server.chat(ASK, max_tokens=24)
        assert reply.ids == want.ids and len(oracle.rounds) > rounds
        assert drafted_tokens(reply) > 0


@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_a_client_hangs_up(drafted, plain, model):
    request = asking("repetition", max_tokens=60)
    late = asking("top logprobs", LATE, 12)
    want, wanted = plain(model, **request), plain(model, **late)
    server = drafted(model)
    part = server.cancel(request.pop("messages"), after=4, **request)
    assert part.ids == want.ids[: len(part.ids)]
    assert_same(server.chat(**late), wanted)
    assert leases(server.manager) == 0


def test_a_client_hangs_up_while_it_waits(drafted, plain):
    """For the end of a drafted reply; neither that one nor the next is touched."""
    want = plain("hybrid", ASK, max_tokens=24)
    late = asking("bias", LATE, 12)
    wanted = plain("hybrid", **late)
    server = drafted("hybrid", Oracle([want.ids], 0))
    args = generation.GenerationArguments(
        max_tokens=8, temperature=0.0, thinking_budget=2, enable_thinking=True
    )
    record = server.expect_held(
        None, at=3, until=lambda: server.generator.requests.qsize() > 0
    )
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(server.chat, ASK, record=record, max_tokens=24)
        assert record.held.wait(20)
        waiting = pool.submit(server.generator.generate, "fox yak", args=args)
        try:
            waiting.result(30)[1].close()
        except ValueError as refusal:
            raise AssertionError("refused") from refusal
        assert running.result(30).ids == want.ids
    server.wait_idle()
    assert_same(server.chat(**late), wanted)
    assert leases(server.manager) == 0


@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_one_cache_serves_both(drafted, plain, make_server, model):
    """Turns without drafting restore what others have read, drafted ones what the drafter has."""
    kinds = ["repetition", None, "top logprobs", None, "json object"]
    if model == "dense":  # stock has no drafting for it
        kinds = ["repetition", "top logprobs", "json object"]
    first = plain(model, **{**asking("repetition"), "max_tokens": 16})
    server = drafted(model, Oracle([first.ids], 0))
    asked, turns = list(ASK), []
    for turn, kind in enumerate(kinds):
        body = {"max_tokens": 16, **(CASES[kind] if kind else {})}
        reply = server.chat(asked, **body)
        turns.append((list(asked), body, reply))
        asked += [reply.message(), user(f"get: amber {turn}")]
    for turn, (messages, body, reply) in enumerate(turns):
        cold = make_server(model, **SETTINGS).chat(messages, **body)
        assert cold.cached_tokens == 0 and reply.ids == cold.ids
        assert numbers_of(logprobs_of(reply)) == pytest.approx(
            numbers_of(logprobs_of(cold)), abs=NEAR
        )
        if kinds[turn] is None:
            # What was read without the drafter is read again, for the drafter.
            drafted_before = [
                t[2] for t, k in zip(turns, kinds[:turn], strict=False) if k is None
            ]
            read = [len(before.prompt_ids) - 1 for before in drafted_before]
            assert reply.cached_tokens >= max(read, default=0)
        elif turn and kinds[turn - 1]:
            assert_reads_only_new(reply, [turns[turn - 1][2]], model)
        elif turn:
            assert reply.cached_tokens >= len(turns[turn - 1][2].prompt_ids) - 1


@pytest.mark.parametrize("with_drafter", [True, False])
@pytest.mark.parametrize("case", ["repetition", "presence"])
def test_penalties_do_not_depend_on_what_was_cached(
    drafted, plain, make_server, case, with_drafter
):
    want = plain("hybrid", **asking(case, LATE))
    server = drafted() if with_drafter else make_server("hybrid", **SETTINGS)
    server.chat(LATE, max_tokens=2)
    reply = server.chat(**asking(case, LATE))
    assert reply.prefilled == 1
    assert reply.ids == want.ids


def test_an_error_fails_its_own_row(drafted, plain, monkeypatch):
    requests = [asking("top logprobs"), asking("bias", LATE)]
    want, wanted = plain("hybrid", **requests[0]), plain("hybrid", ASK, max_tokens=24)
    oracle = Oracle([wanted.ids], 0)
    server = drafted("hybrid", oracle)
    make = generation.make_logits_processors
    calls = []

    def raise_late(tokens, logits):
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("planted in a logits processor")
        return logits

    monkeypatch.setattr(
        generation,
        "make_logits_processors",
        lambda bias, *more: [*make(None, *more), *([raise_late] if bias else [])],
    )
    good, failed = server.settled(requests)
    assert isinstance(failed, RequestFailed) and failed.status == 500
    assert isinstance(good, Reply)
    assert_same(good, want)
    assert server.chat(ASK, max_tokens=24).ids == wanted.ids
    assert oracle.accepted > 0


@pytest.mark.guard
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"repetition_penalty": 1.0},
        {"presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {}},
        {"logprobs": False},
        {"enable_thinking": True},
    ],
    ids=lambda body: " ".join(body) or "nothing",
)
def test_what_changes_nothing_is_drafted(drafted, plain, body):
    want = plain("hybrid", ASK, max_tokens=24, **body)
    oracle = Oracle([want.ids], 0)
    reply = drafted("hybrid", oracle).chat(ASK, max_tokens=24, **body)
    assert reply.ids == want.ids
    assert oracle.accepted > 10 and drafted_tokens(reply) > 0


def test_a_budget_without_thinking_is_drafted(drafted, plain):
    """A server may have one for all requests."""
    want = plain("hybrid", ASK, max_tokens=24)
    oracle = Oracle([want.ids], 0)
    reply = drafted("hybrid", oracle).chat(ASK, max_tokens=24, thinking_budget=4)
    assert reply.ids == want.ids and oracle.accepted > 10
