"""Each row of a batch is sampled as its own request asks."""

import pytest
from mlx_vlm.server import generation
from mlx_vlm.tests.drafting_fixtures import build_drafter
from mlx_vlm.tests.generation_fixtures import MODELS, prompt_of, tiny_model
from mlx_vlm.tests.server_fixtures import make_loop_server, make_request, tokens_sent

TOP_K = 3
HOT = {"temperature": 1.5, "seed": 7}
OTHER = {"temperature": 1.5, "seed": 8}
GREEDY = {"temperature": 0.0}
ASKS = {
    "greedy": GREEDY,
    "seed": OTHER,
    "temperature": {"temperature": 0.5, "seed": 7},
    "top_p": {**OTHER, "top_p": 0.4},
    "top_k": {**OTHER, "top_k": 3},
    "min_p": {**OTHER, "min_p": 0.2},
    "top_n_sigma": {**OTHER, "top_n_sigma": 1.0},
    "p_less": {**OTHER, "p_less": True},
    "typical_p": {**OTHER, "typical_p": 0.5},
    "penalty": {**GREEDY, "presence_penalty": 20.0},
    "logprobs": {**GREEDY, "logprobs": True},
}


@pytest.fixture
def serve(monkeypatch):
    """serve(model, [(after, prompt, settings)]) -> (token, logprob, top) of each request.

    The server's own loop runs on this thread.  A request is queued when ``after``
    tokens have been emitted for all.
    """

    def run(model, requests, drafter=None, kind=None, max_tokens=12):
        server = make_loop_server(
            monkeypatch, model, drafter, kind, top_logprobs_k=TOP_K
        )
        queued = [
            (after, make_request(prompt, {"max_tokens": max_tokens, **settings}))
            for after, prompt, settings in requests
        ]
        waiting, emitted = list(queued), []

        def admit():
            while waiting and waiting[0][0] <= len(emitted):
                server.requests.put(waiting.pop(0)[1])

        def stream_text(info, token, finish_reason):
            emitted.append(token)
            admit()
            return str(token)

        server._stream_text = stream_text
        admit()
        server._run_impl()
        assert not waiting
        return [replies_of(request.rqueue) for _, request in queued]

    return run


def replies_of(queue):
    return [(t.token, t.logprobs, t.top_logprobs) for t in tokens_sent(queue)]


def alone(serve, model, prompt, settings, **more):
    return serve(model, [(0, prompt, settings)], **more)[0]


def tokens_of(reply):
    return [token for token, _, _ in reply]


def assert_same(reply, want):
    assert tokens_of(reply) == tokens_of(want)
    for (_, logprob, top), (_, wanted, best) in zip(reply, want, strict=True):
        assert logprob == pytest.approx(wanted, abs=1e-4)
        assert (top is None) == (best is None)
        assert [t for t, _ in top or []] == [t for t, _ in best or []]


@pytest.mark.parametrize("case", ASKS)
@pytest.mark.parametrize("name", MODELS)
def test_a_row_that_joins_is_sampled_as_it_asks(serve, name, case):
    model = tiny_model(name)
    requests = [(0, prompt_of(20, 1), HOT), (5, prompt_of(13, 2), ASKS[case])]
    wants = [alone(serve, model, *request[1:]) for request in requests]
    for reply, want in zip(serve(model, requests), wants, strict=True):
        assert_same(reply, want)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_one_prompt_batch(serve, name):
    """Also their first tokens, and what is left when some of them end."""
    model = tiny_model(name)
    cases = ("seed", "greedy", "logprobs", "top_p", "seed", "greedy", "min_p", "top_k")
    requests = [
        (0, prompt_of(9, seed), {**ASKS[case], "max_tokens": 4 + seed})
        for seed, case in enumerate(cases)
    ]
    wants = [alone(serve, model, *request[1:]) for request in requests]
    for reply, want in zip(serve(model, requests), wants, strict=True):
        assert_same(reply, want)


def test_log_probabilities_are_for_those_who_ask(serve):
    model = tiny_model("dense")
    pair = [(0, prompt_of(20, 1), GREEDY), (4, prompt_of(13, 2), ASKS["logprobs"])]
    for requests in (pair, [(0, *pair[1][1:]), (4, *pair[0][1:])]):
        for reply, (_, _, settings) in zip(
            serve(model, requests), requests, strict=True
        ):
            asked = bool(settings.get("logprobs"))
            assert {len(top or ()) for _, _, top in reply} == {TOP_K if asked else 0}
            assert any(logprob for _, logprob, _ in reply) is asked


def test_rows_that_agree_are_sampled_by_one_sampler(serve, monkeypatch):
    """The very sampler of one of them, for all rows at once."""
    sampler, rows = generation._PositionedTargetSampler, []
    sample_target = sampler.sample_target

    def noted(self, logprobs, **where):
        rows.append(logprobs.shape[0])
        return sample_target(self, logprobs, **where)

    monkeypatch.setattr(sampler, "sample_target", noted)
    three = [prompt_of(11 + seed, seed) for seed in range(3)]
    serve(tiny_model("dense"), [(0, prompt, HOT) for prompt in three])
    assert set(rows) == {3}
    rows.clear()
    settings = (HOT, GREEDY, HOT)
    serve(
        tiny_model("dense"),
        [(0, *row) for row in zip(three, settings, strict=True)],
    )
    assert set(rows) == {2}


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "dflash"])
def test_with_a_draft_model(serve, kind):
    model = tiny_model("hybrid")
    requests = [
        (0, prompt_of(20, 1), HOT),
        (0, prompt_of(13, 2), GREEDY),
        (4, prompt_of(16, 3), OTHER),
    ]
    wants = [alone(serve, model, *request[1:]) for request in requests]
    replies = serve(model, requests, build_drafter(kind), kind)
    assert [tokens_of(r) for r in replies] == [tokens_of(w) for w in wants]


def test_rows_that_agree_are_drafted_together(serve):
    model = tiny_model("hybrid")
    requests = [(0, prompt_of(20 + seed, seed), HOT) for seed in range(2)]
    wants = [alone(serve, model, *request[1:]) for request in requests]
    drafter = build_drafter("mtp")
    replies = serve(model, requests, drafter, "mtp")
    assert [tokens_of(r) for r in replies] == [tokens_of(w) for w in wants]
    assert drafter.proposed
