"""Positions come from the row: ragged batches, warm rows, and batches that meet."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_vlm.apc import APCManager
from mlx_vlm.generate.ar import BatchGenerator
from mlx_vlm.models import qwen3_5_text
from mlx_vlm.models.cache import make_prompt_cache

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
    """Run the generator until it is idle; {uid: [(token, logprob), ...]}."""
    out = {}
    for _ in range(steps):
        if not generator.has_work:
            break
        for response in generator.next()[1]:
            pair = (response.token, response.token_logprob)
            out.setdefault(response.uid, []).append(pair)
    return out


def cold_logprobs(model, ids):
    """Log-probabilities after ids, with positions given: what every row must see."""
    positions = mx.broadcast_to(mx.arange(len(ids))[None, None], (3, 1, len(ids)))
    cache = make_prompt_cache(model.language_model)
    logits = model.language_model(
        mx.array([ids]), cache=cache, position_ids=positions
    ).logits[0, -1]
    return logits - mx.logsumexp(logits)


def prompt_of(length, seed):
    return [(7 * i * i + 3 * i + 11 * seed) % 90 + 2 for i in range(length)]


def assert_row_is_cold(reference, prompt, pairs):
    ids = list(prompt)
    for token, logprob in pairs:
        expected = cold_logprobs(reference, ids)
        assert logprob == pytest.approx(expected[token].item(), abs=1e-3)
        assert expected[token].item() > mx.max(expected).item() - 1e-3
        ids.append(token)


@pytest.fixture
def model():
    """Fresh for each test: the object must not carry positions from one to the next."""
    return build_model(qwen3_5_text, HYBRID)


@pytest.fixture
def reference():
    return build_model(qwen3_5_text, HYBRID)


@pytest.mark.parametrize("lengths", [(13,), (5, 31, 13)])
def test_cold_rows_equal_single_rows(model, reference, lengths):
    prompts = [prompt_of(n, seed) for seed, n in enumerate(lengths)]
    generator = make_generator(model)
    uids = insert(generator, model, prompts)
    replies = drain(generator)
    for uid, prompt in zip(uids, prompts, strict=True):
        assert len(replies[uid]) == 8
        assert_row_is_cold(reference, prompt, replies[uid])


def test_warm_first_request_of_a_process(model, reference):
    manager = APCManager(num_blocks=64, block_size=16)
    prompt = prompt_of(40, 1)
    generator = make_generator(model, manager)
    insert(generator, model, [prompt])
    drain(generator)

    # The cache outlives the model object, as it does on disk.
    fresh = build_model(qwen3_5_text, HYBRID)
    generator = make_generator(fresh, manager)
    longer = prompt + prompt_of(9, 2)
    (uid,) = insert(generator, fresh, [longer])
    assert_row_is_cold(reference, longer, drain(generator)[uid])
    assert manager.stats_snapshot()["lookups_hit"] == 1


def test_row_joins_a_decoding_row(model, reference):
    first, second = prompt_of(21, 1), prompt_of(6, 2)
    generator = make_generator(model)
    (one,) = insert(generator, model, [first], max_tokens=16)
    replies = {}
    while len(replies.get(one, [])) < 3:
        for uid, pairs in drain(generator, steps=1).items():
            replies.setdefault(uid, []).extend(pairs)
    (two,) = insert(generator, model, [second])
    for uid, pairs in drain(generator).items():
        replies.setdefault(uid, []).extend(pairs)
    assert_row_is_cold(reference, first, replies[one])
    assert_row_is_cold(reference, second, replies[two])
