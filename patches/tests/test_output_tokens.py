"""A reply enters the prefix cache when its row ends, however it ends."""

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


def make_generator(model, manager=None):
    return BatchGenerator(
        model.language_model,
        SimpleNamespace(stopping_criteria=NeverStop()),
        apc_manager=manager,
        prefill_step_size=16,
    )


def insert(generator, model, prompts, max_tokens=8):
    kwargs = [
        {
            **{
                key: value
                for key, value in model.get_input_embeddings(mx.array([prompt]))
                .to_dict()
                .items()
                if value is not None
            },
            "_apc_semantic_hash": 1,
        }
        for prompt in prompts
    ]
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


def prompt_of(length, seed):
    return [(7 * i * i + 3 * i + 11 * seed) % 90 + 2 for i in range(length)]


@pytest.fixture(params=["dense", "hybrid"])
def model(request):
    if request.param == "dense":
        return build_model(qwen3, DENSE)
    return build_model(qwen3_5_text, HYBRID)


@pytest.fixture
def manager():
    return APCManager(
        num_blocks=256, block_size=16, overrides={"checkpoint_entries": 8}
    )


def assert_turn_reads_only_new(model, manager, history, new=5):
    """The next turn restores the history, up to one block, and is a cold run's."""
    prompt = history + prompt_of(new, 9)
    generator = make_generator(model, manager)
    (uid,) = insert(generator, model, [prompt])
    tokens, cached = drain(generator)
    assert cached[uid] >= len(history) - 16
    assert cached[uid] > len(history) - 30, "the reply itself was not restored"

    cold = make_generator(model)
    (cold_uid,) = insert(cold, model, [prompt])
    assert tokens[uid] == drain(cold)[0][cold_uid]


@pytest.mark.parametrize("max_tokens", [[30], [34, 30, 45]])
def test_reply_is_restored(model, manager, max_tokens):
    prompts = [prompt_of(40, seed) for seed in range(len(max_tokens))]
    generator = make_generator(model, manager)
    uids = insert(generator, model, prompts, max_tokens=max_tokens)
    tokens, _ = drain(generator)
    for uid, prompt in zip(uids, prompts, strict=True):
        assert_turn_reads_only_new(model, manager, prompt + tokens[uid])


def test_removed_row_is_restored(model, manager):
    prompt = prompt_of(40, 1)
    generator = make_generator(model, manager)
    (uid,) = insert(generator, model, [prompt], max_tokens=60)
    tokens = []
    while len(tokens) < 32:
        tokens += drain(generator, steps=1)[0].get(uid, [])
    assert generator.remove(uid)
    assert_turn_reads_only_new(model, manager, prompt + tokens)


def test_rows_that_joined_are_restored(model, manager):
    first, second = prompt_of(40, 1), prompt_of(33, 2)
    generator = make_generator(model, manager)
    (one,) = insert(generator, model, [first], max_tokens=40)
    tokens = {one: []}
    while len(tokens[one]) < 3:
        tokens[one] += drain(generator, steps=1)[0].get(one, [])
    (two,) = insert(generator, model, [second], max_tokens=36)
    for uid, more in drain(generator)[0].items():
        tokens[uid] = tokens.get(uid, []) + more
    assert_turn_reads_only_new(model, manager, first + tokens[one])
    assert_turn_reads_only_new(model, manager, second + tokens[two])


def test_layers_that_disagree_store_nothing(model, manager):
    prompt = prompt_of(40, 1)
    generator = make_generator(model, manager)
    (uid,) = insert(generator, model, [prompt], max_tokens=60)
    tokens = []
    while len(tokens) < 32:
        tokens += drain(generator, steps=1)[0].get(uid, [])
    layers = generator._generation_batch.prompt_cache
    layer = next(c for c in layers if getattr(c, "offset", None) is not None)
    layer.offset = layer.offset - 1
    before = manager.stats_snapshot()
    generator.remove(uid)
    after = manager.stats_snapshot()
    for counter in ("stores", "exact_stores"):
        assert after.get(counter) == before.get(counter)
