"""The prefix cache is a tree of segments, whatever the model's layers are."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_vlm.apc import APCManager
from mlx_vlm.generate.ar import BatchGenerator
from mlx_vlm.models import qwen3, qwen3_5_text

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "head_dim": 32,
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
START = 1  # the token that opens each message


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


@pytest.fixture(scope="module")
def dense():
    return build_model(qwen3, DENSE)


@pytest.fixture(scope="module")
def hybrid():
    return build_model(qwen3_5_text, HYBRID)


@pytest.fixture(params=["dense", "hybrid"])
def model(request):
    return request.getfixturevalue(request.param)


def make_manager(memory_max_bytes=1 << 30):
    """A manager whose budget alone decides, not the free memory of the machine."""
    manager = APCManager(overrides={"memory_max_gb": memory_max_bytes / (1 << 30)})
    manager._memory_headroom = lambda: 1 << 40
    return manager


@pytest.fixture
def manager():
    return make_manager()


def make_generator(model, manager=None, **kwargs):
    tokenizer = SimpleNamespace(stopping_criteria=NeverStop(), all_special_ids=[START])
    return BatchGenerator(
        model.language_model,
        tokenizer,
        apc_manager=manager,
        prefill_step_size=16,
        **kwargs,
    )


def insert(generator, model, prompts, max_tokens=8):
    kwargs = []
    for prompt in prompts:
        inputs = model.get_input_embeddings(mx.array([prompt])).to_dict()
        inputs = {key: value for key, value in inputs.items() if value is not None}
        kwargs.append({**inputs, "_apc_semantic_hash": 1})
    return generator.insert(prompts, max_tokens=max_tokens, prompt_kwargs=kwargs)


def drain(generator, steps=400):
    """Run the generator; ({uid: tokens}, {uid: cached tokens of its prompt})."""
    tokens, cached = {}, {}
    for _ in range(steps):
        if not generator.has_work:
            break
        progress, responses = generator.next()
        cached.update({p.uid: p.cached_tokens for p in progress})
        for response in responses:
            tokens.setdefault(response.uid, []).append(response.token)
    return tokens, cached


def run(model, manager, prompts, max_tokens=8, **kwargs):
    """Tokens and restored lengths of prompts that arrive at once, in their order."""
    generator = make_generator(model, manager, **kwargs)
    uids = insert(generator, model, prompts, max_tokens)
    tokens, cached = drain(generator)
    return [tokens[uid] for uid in uids], [cached[uid] for uid in uids]


def text(length, seed):
    return [(7 * i * i + 3 * i + 11 * seed) % 90 + 3 for i in range(length)]


def chat(*messages):
    return [token for message in messages for token in (START, *message)] + [START]


@pytest.mark.parametrize("rows", [1, 3])
def test_turn_reads_its_new_tokens_alone(model, manager, rows):
    history = [text(40 + 7 * row, row) for row in range(rows)]
    known: list = []
    for turn in range(3):
        tokens, cached = run(model, manager, history)
        cold, _ = run(model, None, history)
        assert tokens == cold
        if turn:
            assert cached == known
        known = [len(h) + len(t) for h, t in zip(history, tokens, strict=True)]
        history = [
            h + t + text(5 + row, 9 + turn + row)
            for row, (h, t) in enumerate(zip(history, tokens, strict=True))
        ]


@pytest.mark.parametrize("rows", [1, 2])
def test_same_prompt_again_computes_one_token(model, manager, rows):
    prompts = [text(50, row) for row in range(rows)]
    cold, _ = run(model, manager, prompts)
    for _ in range(2):
        assert run(model, manager, prompts) == (cold, [49] * rows)


def test_new_chat_starts_from_the_end_of_the_system_text(model, manager):
    system = text(60, 1)
    run(model, manager, [chat(system, text(20, 2))])
    prompt = chat(system, text(25, 3))
    tokens, (cached,) = run(model, manager, [prompt])
    assert cached >= len(system) + 1
    assert tokens == run(model, None, [prompt])[0]


def test_prompt_that_left_in_the_middle_is_resumed_there(model, manager, request):
    """A dense model at once; one with end states from the second time on."""
    shared = text(45, 1)
    prompts = [shared + text(30, seed) for seed in (2, 3, 4)]
    lengths = []
    for prompt in prompts:
        tokens, (cached,) = run(model, manager, [prompt])
        assert tokens == run(model, None, [prompt])[0]
        lengths.append(cached)
    assert lengths[2] >= len(shared)
    if "dense" in request.node.callspec.id:
        assert lengths[1] >= len(shared)


def test_cold_and_warm_rows_share_a_batch(model, manager):
    warm, cold = text(40, 1), text(55, 2)
    run(model, manager, [warm])
    prompts = [warm + text(9, 3), cold]
    tokens, cached = run(model, manager, prompts)
    assert cached[0] >= 39 and cached[1] == 0
    for prompt, got in zip(prompts, tokens, strict=True):
        assert [got] == run(model, None, [prompt])[0]


def test_what_was_read_last_is_kept(model):
    """Three conversations, room for two and a half: the one left alone goes."""
    probe = make_manager()
    run(model, probe, [text(60, 1)])
    manager = make_manager(2.5 * probe.resident_bytes())
    said = {}
    for seed in (1, 2, 1, 3):
        (reply,), _ = run(model, manager, [text(60, seed)])
        said[seed] = text(60, seed) + reply
    assert manager.resident_bytes() <= manager.memory_max_bytes
    for seed in (3, 1):
        _, (cached,) = run(model, manager, [said[seed] + text(3, 8)], max_tokens=1)
        assert cached == 68
    assert run(model, manager, [said[2] + text(3, 8)])[1] == [0]


def test_prompt_beyond_the_budget_evicts_nobody(model):
    probe = make_manager()
    run(model, probe, [text(40, 1)])
    manager = make_manager(2 * probe.resident_bytes())
    run(model, manager, [text(40, 1)])
    run(model, manager, [text(400, 2)])
    assert run(model, manager, [text(40, 1)])[1] == [39]


def test_cancelled_prefill_keeps_its_chunks(model, manager):
    prompt = text(80, 1)
    generator = make_generator(model, manager)
    (uid,) = insert(generator, model, [prompt])
    for _ in range(3):
        generator.next()
    assert generator.remove(uid)
    tokens, (cached,) = run(model, manager, [prompt])
    assert 32 <= cached < 80
    assert tokens == run(model, None, [prompt])[0]


def test_failed_chunk_stores_what_was_whole(dense, manager):
    prompt = text(80, 1)
    generator = make_generator(dense, manager)
    insert(generator, dense, [prompt])
    generator.next()
    generator.next()
    batch = generator._prompt_batch

    def fail(*args, **kwargs):
        raise RuntimeError("no memory")

    batch.model = fail
    with pytest.raises(RuntimeError):
        batch.prompt_step()
    tokens, (cached,) = run(dense, manager, [prompt])
    assert cached >= 32
    assert tokens == run(dense, None, [prompt])[0]


@pytest.mark.parametrize("rows", [1, 2])
def test_quantized_keys_and_values_stay_packed(dense, manager, rows):
    settings = {"kv_bits": 8, "kv_group_size": 32, "kv_quant_scheme": "uniform"}
    prompts = [text(40 + 6 * row, row) for row in range(rows)]
    cold, _ = run(dense, None, prompts, **settings)
    first, _ = run(dense, manager, prompts, **settings)
    again, cached = run(dense, manager, prompts, **settings)
    assert first == cold and again == cold
    assert cached == [len(prompt) - 1 for prompt in prompts]


def test_salts_share_nothing(model, manager):
    prompt = text(40, 1)
    run(model, manager, [prompt])
    generator = make_generator(model, manager)
    inputs = model.get_input_embeddings(mx.array([prompt])).to_dict()
    inputs = {key: value for key, value in inputs.items() if value is not None}
    kwargs = [{**inputs, "_apc_semantic_hash": 2}]
    (uid,) = generator.insert([prompt], max_tokens=2, prompt_kwargs=kwargs)
    assert drain(generator)[1][uid] == 0


def test_nothing_is_held_after_requests_and_clear(model, manager):
    run(model, manager, [text(40, 1), text(33, 2)])
    run(model, manager, [text(40, 1), text(33, 2)])
    assert manager.stats_snapshot()["leases"] == 0
    manager.clear()
    assert manager.resident_bytes() == 0
