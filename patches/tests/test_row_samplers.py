"""Each row of a batch is sampled as its own request asks."""

from queue import Queue
from threading import Lock
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_vlm.models import qwen3
from mlx_vlm.server import generation
from mlx_vlm.tests.drafting_fixtures import (
    LAYER,
    StopAt,
    build,
    build_drafter,
    build_target,
    prompt_of,
)

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


def build_dense():
    config = {
        **LAYER,
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    return build(qwen3, config)


MODELS = {"dense": build_dense, "hybrid": build_target}


class Streamer:
    def __init__(self, *args):
        pass

    def advance(self, token, finish_reason):
        return str(token)


@pytest.fixture
def serve(monkeypatch):
    """serve(model, [(after, prompt, settings)]) -> (token, logprob, top) of each request.

    The server's own loop runs on this thread.  A request is queued when ``after``
    tokens have been emitted for all.
    """
    monkeypatch.setattr(generation, "_ServerTokenStreamer", Streamer)
    monkeypatch.setattr(generation, "make_streaming_detokenizer", lambda *args: None)

    def run(model, requests, drafter=None, kind=None, max_tokens=12):
        server = make_server(model, drafter, kind)
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


def make_server(model, drafter, kind):
    server = generation.ResponseGenerator.__new__(generation.ResponseGenerator)
    settings = dict.fromkeys(
        ("kv_bits", "kv_key_bits", "kv_value_bits", "kv_key_scheme", "kv_value_scheme")
    )
    vars(server).update(
        settings,
        model=model,
        processor=SimpleNamespace(stopping_criteria=StopAt()),
        tokenizer=None,
        stop_tokens=set(),
        vision_cache=None,
        kv_group_size=64,
        kv_quant_scheme="uniform",
        quantized_kv_start=0,
        top_logprobs_k=TOP_K,
        apc_manager=None,
        draft_model=drafter,
        draft_kind=kind,
        prefill_step_size=64,
        requests=Queue(),
        _stop=True,
        _ready=SimpleNamespace(set=lambda: None),
        _cancelled=set(),
        _cancel_lock=Lock(),
        _initialize_model=lambda: None,
    )
    return server


def make_request(prompt, settings):
    return generation.QueuedGenerationRequest(
        rqueue=Queue(),
        raw_inputs={"input_ids": mx.array([prompt])},
        prompt_tokens=len(prompt),
        args=generation.GenerationArguments(**settings),
    )


def replies_of(queue):
    items = list(queue.queue)
    for item in items:
        if isinstance(item, Exception):
            raise item
    tokens = [item for item in items if isinstance(item, generation.StreamingToken)]
    return [(item.token, item.logprobs, item.top_logprobs) for item in tokens]


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
    model = MODELS[name]()
    requests = [(0, prompt_of(20, 1), HOT), (5, prompt_of(13, 2), ASKS[case])]
    wants = [alone(serve, model, *request[1:]) for request in requests]
    for reply, want in zip(serve(model, requests), wants, strict=True):
        assert_same(reply, want)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_one_prompt_batch(serve, name):
    """Also their first tokens, and what is left when some of them end."""
    model = MODELS[name]()
    cases = ("seed", "greedy", "logprobs", "top_p", "seed", "greedy", "min_p", "top_k")
    requests = [
        (0, prompt_of(9 + seed, seed), {**ASKS[case], "max_tokens": 4 + seed})
        for seed, case in enumerate(cases)
    ]
    wants = [alone(serve, model, *request[1:]) for request in requests]
    for reply, want in zip(serve(model, requests), wants, strict=True):
        assert_same(reply, want)


def test_log_probabilities_are_for_those_who_ask(serve):
    model = build_dense()
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
    serve(build_dense(), [(0, prompt, HOT) for prompt in three])
    assert set(rows) == {3}
    rows.clear()
    settings = (HOT, GREEDY, HOT)
    serve(build_dense(), [(0, *row) for row in zip(three, settings, strict=True)])
    assert set(rows) == {2}


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "dflash"])
def test_with_a_draft_model(serve, kind):
    model = build_target()
    requests = [
        (0, prompt_of(20, 1), HOT),
        (0, prompt_of(13, 2), GREEDY),
        (4, prompt_of(16, 3), OTHER),
    ]
    wants = [alone(serve, model, *request[1:]) for request in requests]
    replies = serve(model, requests, build_drafter(kind), kind)
    assert [tokens_of(r) for r in replies] == [tokens_of(w) for w in wants]


def test_rows_that_agree_are_drafted_together(serve):
    model = build_target()
    requests = [(0, prompt_of(20 + seed, seed), HOT) for seed in range(2)]
    wants = [alone(serve, model, *request[1:]) for request in requests]
    drafter = build_drafter("mtp")
    replies = serve(model, requests, drafter, "mtp")
    assert [tokens_of(r) for r in replies] == [tokens_of(w) for w in wants]
    assert drafter.proposed
