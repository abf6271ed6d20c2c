"""With a draft model loaded, what drafting cannot serve is decoded without it."""

import importlib
from queue import Queue
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_vlm.generate.ar import BatchGenerator
from mlx_vlm.models import qwen3, qwen3_5_text
from mlx_vlm.server import generation

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
HYBRID = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [1, 1, 0],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
MODELS = {"dense": (qwen3, DENSE), "hybrid": (qwen3_5_text, HYBRID)}
TOP_K = 3


class NeverStop:
    def add_eos_token_ids(self, ids):
        pass

    def __call__(self, token):
        return False


def build_model(module, config):
    """A random model; wide weights, so that greedy text varies."""
    mx.random.seed(0)
    model = module.Model(module.ModelConfig.from_dict(config))
    model.update(tree_map(lambda w: w * 3 if w.ndim > 1 else w, model.parameters()))
    mx.eval(model.parameters())
    return model


def build_drafter():
    """A random MTP drafter for the hybrid model; nothing it proposes is right."""
    package = importlib.import_module("mlx_vlm.speculative.drafters.qwen3_5_mtp")
    text = {**HYBRID, "mtp_num_hidden_layers": 1}
    config = {"model_type": "qwen3_5_mtp", "text_config": text, "block_size": 4}
    config["tie_word_embeddings"] = True
    return build_model(package, config)


def make_generator(model, drafter=None, **more):
    return BatchGenerator(
        model.language_model,
        SimpleNamespace(stopping_criteria=NeverStop()),
        prefill_step_size=16,
        draft_model=drafter,
        draft_kind=None if drafter is None else "mtp",
        **{"compute_logprobs": False, **more},
    )


def insert(generator, model, prompts, processors=None, max_tokens=8, budgets=None):
    kwargs = [
        {
            key: value
            for key, value in model.get_input_embeddings(mx.array([prompt]))
            .to_dict()
            .items()
            if value is not None
        }
        for prompt in prompts
    ]
    return generator.insert(
        prompts,
        max_tokens=max_tokens,
        prompt_kwargs=kwargs,
        logits_processors=processors,
        thinking_budget_criteria=budgets,
    )


def prompt_of(length, seed):
    return [(7 * i * i + 3 * i + 11 * seed) % 90 + 2 for i in range(length)]


def never_twice(tokens, logits):
    """A penalty that no repetition survives."""
    return logits.at[:, tokens].add(-1e4)


def run(generator, steps=200):
    """Tokens by uid, and the kinds of the batches that decoded."""
    tokens, kinds = {}, []
    for _ in range(steps):
        if not generator.has_work:
            break
        _, responses = generator.next()
        for response in responses:
            tokens.setdefault(response.uid, []).append(response.token)
        batch = generator._generation_batch
        if len(batch):
            kinds.append((getattr(batch, "is_speculative", False), tuple(batch.uids)))
    return tokens, list(dict.fromkeys(kinds))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_logits_processors_reach_every_token(name, rows):
    model = build_model(*MODELS[name])
    prompts = [prompt_of(20 + 7 * seed, seed) for seed in range(rows)]
    processors = [[never_twice]] * rows
    plain = make_generator(model)
    insert(plain, model, prompts, processors)
    generator = make_generator(model, build_drafter())
    insert(generator, model, prompts, processors)
    tokens, kinds = run(generator)
    assert tokens == run(plain)[0]
    assert all(len(set(row)) == 8 for row in tokens.values())
    assert not any(speculative for speculative, _ in kinds)


def test_kinds_are_prefilled_apart_and_the_oldest_goes_first():
    model = build_model(*MODELS["hybrid"])
    prompts = [prompt_of(31, 1), prompt_of(9, 2), prompt_of(20, 3)]
    processors = [None, [never_twice], None]
    plain = make_generator(model)
    want = {}
    for uid, (prompt, row) in enumerate(zip(prompts, processors, strict=True)):
        (own,) = insert(plain, model, [prompt], [row])
        want[uid] = run(plain)[0][own]
    generator = make_generator(model, build_drafter())
    uids = insert(generator, model, prompts, processors)
    tokens, kinds = run(generator)
    assert tokens == want
    first = (True, (uids[0], uids[2]))
    assert kinds[0] == first and kinds[-1] == (False, (uids[1],))


def test_a_row_that_could_be_drafted_joins_the_plain_ones():
    model = build_model(*MODELS["hybrid"])
    generator = make_generator(model, build_drafter())
    insert(generator, model, [prompt_of(20, 1)], [[never_twice]], max_tokens=12)
    for _ in range(4):
        generator.next()
    insert(generator, model, [prompt_of(20, 2)], max_tokens=2)
    kinds = run(generator)[1]
    assert (False, (0, 1)) in kinds
    insert(generator, model, [prompt_of(20, 2)])
    assert run(generator)[1] == [(True, (2,))]


def test_a_thinking_budget_is_kept():
    class Budget:
        enable_thinking = True

        def __call__(self, token):
            self.seen = getattr(self, "seen", 0) + 1

        def pop_forced_token_id(self):
            return 5 if self.seen == 3 else None

    model = build_model(*MODELS["hybrid"])
    generator = make_generator(model, build_drafter())
    insert(generator, model, [prompt_of(20, 1)], budgets=[Budget()])
    assert run(generator)[0][0][3] == 5


class Streamer:
    def advance(self, token, finish_reason):
        return str(token)


def serve(monkeypatch, generator, drafter, asks):
    """Run the server's step; (token, logprob, top logprobs) of each row in ``asks``."""
    server = generation.ResponseGenerator.__new__(generation.ResponseGenerator)
    for name in ("_log_prefill_progress", "_log_prefill_completed"):
        monkeypatch.setattr(server, name, lambda *args: None, raising=False)
    monkeypatch.setattr(
        server, "_log_decode_progress", lambda *args, **kwargs: 0.0, raising=False
    )
    server.draft_model, server.draft_kind = drafter, "mtp"
    server.top_logprobs_k = TOP_K
    active = {
        uid: {
            "rqueue": Queue(),
            "streamer": Streamer(),
            "logprobs": asked,
            "spec_snapshot": None if drafter is None else (0, 0, 0),
        }
        for uid, asked in asks.items()
    }
    queues = {uid: info["rqueue"] for uid, info in active.items()}
    while active:
        server._step(generator, active)
    items = {uid: list(queue.queue)[:-1] for uid, queue in queues.items()}
    return {
        uid: [(i.token, i.logprobs, i.top_logprobs, i.draft_n) for i in row]
        for uid, row in items.items()
    }


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_without_a_drafter(monkeypatch, name, rows):
    model = build_model(*MODELS[name])
    prompts = [prompt_of(20 + 7 * seed, seed) for seed in range(rows)]
    plain = make_generator(model, compute_logprobs=True, top_logprobs_k=TOP_K)
    uids = insert(plain, model, prompts)
    want = serve(monkeypatch, plain, None, dict.fromkeys(uids, True))
    drafter = build_drafter()
    generator = make_generator(model, drafter)
    uids = insert(generator, model, prompts)
    got = serve(monkeypatch, generator, drafter, dict.fromkeys(uids, True))
    assert got == want
    assert all(len(top) == TOP_K for _, _, top, _ in got[uids[0]])
    assert any(logprob < 0 for _, logprob, _, _ in got[uids[0]])


def test_a_row_that_asks_for_logprobs_joins_one_that_does_not(monkeypatch):
    model = build_model(*MODELS["dense"])
    plain = make_generator(model, compute_logprobs=True, top_logprobs_k=TOP_K)
    insert(plain, model, [prompt_of(20, 2)])
    (want,) = serve(monkeypatch, plain, None, {0: True}).values()
    drafter = build_drafter()
    generator = make_generator(model, drafter)
    insert(generator, model, [prompt_of(20, 1)], [[never_twice]], max_tokens=20)
    for _ in range(4):
        generator.next()
    insert(generator, model, [prompt_of(20, 2)])
    got = serve(monkeypatch, generator, drafter, {0: False, 1: True})[1]
    assert [token for token, *_ in got] == [token for token, *_ in want]
    for (_, logprob, top, _), (_, wanted, best, _) in zip(got, want, strict=True):
        assert logprob == pytest.approx(wanted, abs=1e-4)
        assert [t for t, _ in top] == [t for t, _ in best]


@pytest.mark.parametrize(
    "fields", [{"logits_processors": [never_twice]}, {"thinking_budget": 4}]
)
def test_the_server_takes_what_it_refused(fields):
    class Requests:
        def put(self, request):
            request.rqueue.put(EOFError("queued"))

    server = generation.ResponseGenerator.__new__(generation.ResponseGenerator)
    server.draft_model = object()
    server.requests = Requests()
    server.wait_until_ready = lambda: None
    server._preprocess_request = lambda *args, **kwargs: {
        "input_ids": mx.array([[1, 2]])
    }
    server._make_thinking_budget_criteria = lambda *args: None
    args = generation.GenerationArguments(max_tokens=4, **fields)
    with pytest.raises(EOFError, match="queued"):
        server.generate("fox", args=args)
