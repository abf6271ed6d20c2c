"""Tiny random models and drafters, and a generator to run them, for tests of drafting."""

from types import SimpleNamespace

import mlx.core as mx
from mlx.utils import tree_map
from mlx_vlm.apc import APCManager
from mlx_vlm.generate.ar import BatchGenerator
from mlx_vlm.models import qwen3_5_text
from mlx_vlm.speculative.drafters import eagle3, qwen3_5_mtp, qwen3_dflash

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
LAYER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
}
DRAFTERS = {
    "mtp": (
        qwen3_5_mtp,
        {
            "model_type": "qwen3_5_mtp",
            "text_config": {**HYBRID, "mtp_num_hidden_layers": 1},
        },
    ),
    "eagle3": (
        eagle3,
        {
            "model_type": "eagle3",
            "transformer_layer_config": LAYER,
            "draft_vocab_size": 96,
            "target_layer_ids": [1, 2, 3],
        },
    ),
    "dflash": (
        qwen3_dflash,
        {
            **LAYER,
            "model_type": "qwen3",
            "mask_token_id": 1,
            "target_layer_ids": [0, 2],
            "num_target_layers": 4,
        },
    ),
}
BLOCK = 4


def build(module, config, seed=0):
    """A random model; wide weights, so that greedy text varies."""
    mx.random.seed(seed)
    model = module.Model(module.ModelConfig.from_dict(config))
    model.update(tree_map(lambda w: w * 3 if w.ndim > 1 else w, model.parameters()))
    mx.eval(model.parameters())
    return model


def build_target():
    return build(qwen3_5_text, HYBRID)


def build_drafter(kind, seed=0):
    """A random drafter, which notes its proposals in ``proposed``: rows of tokens."""
    module, config = DRAFTERS[kind]
    drafter = build(module, {**config, "block_size": BLOCK}, seed)
    base, proposed = type(drafter), []
    name = "draft_block" + ("_greedy" if hasattr(base, "draft_block_greedy") else "")

    def propose(self, *args, **kwargs):
        tokens = getattr(base, name)(self, *args, **kwargs)
        proposed.extend(tokens.tolist())
        return tokens

    drafter.__class__ = type("Proposing", (base,), {name: propose})
    drafter.proposed = proposed
    return drafter


def prompt_of(length, seed):
    return [(7 * i * i + 3 * i + 11 * seed) % 90 + 2 for i in range(length)]


def make_manager():
    return APCManager(
        num_blocks=256, block_size=16, overrides={"checkpoint_entries": 8}
    )


class StopAt:
    def __init__(self, *tokens):
        self.tokens = tokens

    def add_eos_token_ids(self, ids):
        pass

    def __call__(self, token):
        return token in self.tokens


class Run:
    """One generator, what its rows have said, and which of them have ended."""

    def __init__(self, model, manager=None, stop=(), step=16, **drafting):
        self.generator = BatchGenerator(
            model.language_model,
            SimpleNamespace(stopping_criteria=StopAt(*stop)),
            apc_manager=manager,
            prefill_step_size=step,
            greedy_sampling=True,
            **drafting,
        )
        self.model = model
        self.said, self.cached, self.ended = {}, {}, set()

    def insert(self, prompts, max_tokens=8):
        kwargs = [
            {
                **{
                    key: value
                    for key, value in self.model.get_input_embeddings(
                        mx.array([prompt])
                    )
                    .to_dict()
                    .items()
                    if value is not None
                },
                "_apc_semantic_hash": 1,
            }
            for prompt in prompts
        ]
        return self.generator.insert(
            prompts, max_tokens=max_tokens, prompt_kwargs=kwargs
        )

    def step(self):
        progress, responses = self.generator.next()
        self.cached.update({p.uid: p.cached_tokens for p in progress})
        for response in responses:
            if response.token is not None:
                self.said.setdefault(response.uid, []).append(response.token)
            if response.finish_reason is not None:
                self.ended.add(response.uid)

    def drain(self):
        while self.generator.has_work:
            self.step()
        return self.said
