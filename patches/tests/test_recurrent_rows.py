"""A warm row of a recurrent model, queued together with others, gives its solo tokens."""

from types import SimpleNamespace

import mlx.core as mx
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
    """Run the generator; ({uid: tokens}, {uid: cached tokens}, largest prefill batch)."""
    tokens, cached, rows = {}, {}, 0
    for _ in range(steps):
        if not generator.has_work:
            break
        progress, responses = generator.next()
        cached.update({p.uid: p.cached_tokens for p in progress})
        rows = max(rows, len(generator._prompt_batch or ()))
        for response in responses:
            tokens.setdefault(response.uid, []).append(response.token)
    return tokens, cached, rows


def prompt_of(length, seed):
    return [(7 * i * i + 3 * i + 11 * seed) % 90 + 2 for i in range(length)]


def solo(model, prompt):
    generator = make_generator(model)
    (uid,) = insert(generator, model, [prompt])
    return drain(generator)[0][uid]


def queue_together(model, prompts, stored=40):
    """Store the first prompt's beginning, then queue all prompts at once."""
    manager = APCManager(
        num_blocks=64, block_size=16, overrides={"checkpoint_entries": 8}
    )
    generator = make_generator(model, manager)
    insert(generator, model, [prompts[0][:stored]], max_tokens=1)
    drain(generator)
    generator = make_generator(model, manager)
    return insert(generator, model, prompts), *drain(generator)


def test_warm_row_beside_cold_rows_gives_its_solo_tokens():
    model = build_model(qwen3_5_text, HYBRID)
    prompts = [prompt_of(49, 1), prompt_of(70, 2), prompt_of(23, 3)]
    uids, tokens, cached, _ = queue_together(model, prompts)
    assert cached[uids[0]] > 30
    for uid, prompt in zip(uids, prompts, strict=True):
        assert tokens[uid] == solo(model, prompt)


def test_rows_with_features_in_a_list_go_one_at_a_time():
    """Of a list, all rows of a batch would be given the first row's."""
    model = build_model(qwen3, DENSE)
    manager = APCManager(num_blocks=64, block_size=16)
    generator = make_generator(model, manager)
    insert(generator, model, [prompt_of(49, 1), prompt_of(23, 3)])
    for number, row in enumerate(generator._unprocessed_sequences):
        row[3]["features_of_a_picture"] = [mx.array([number])]
    assert drain(generator)[2] == 1


def test_rows_without_recurrent_layers_stay_together():
    model = build_model(qwen3, DENSE)
    prompts = [prompt_of(49, 1), prompt_of(23, 3)]
    uids, tokens, cached, rows = queue_together(model, prompts)
    assert cached[uids[0]] >= 32 and rows == 2
    for uid, prompt in zip(uids, prompts, strict=True):
        assert tokens[uid] == solo(model, prompt)
