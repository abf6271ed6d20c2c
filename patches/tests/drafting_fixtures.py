"""Tiny random drafters, and a generator that drafts with them, for tests of drafting."""

from mlx_vlm.speculative.drafters import eagle3, qwen3_5_mtp, qwen3_dflash
from mlx_vlm.tests.generation_fixtures import MTP, Run, build_model, tiny_model

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
    "mtp": (qwen3_5_mtp, MTP),
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


def build_target():
    return tiny_model("hybrid")


def build_drafter(kind, seed=0):
    """A random drafter, which notes its proposals in ``proposed``: rows of tokens."""
    module, config = DRAFTERS[kind]
    drafter = build_model(module, {**config, "block_size": BLOCK}, seed)
    base, proposed = type(drafter), []
    name = "draft_block" + ("_greedy" if hasattr(base, "draft_block_greedy") else "")

    def propose(self, *args, **kwargs):
        tokens = getattr(base, name)(self, *args, **kwargs)
        proposed.extend(tokens.tolist())
        return tokens

    drafter.__class__ = type("Proposing", (base,), {name: propose})
    drafter.proposed = proposed
    return drafter


def drafted(model, drafter, kind, manager=None, stop=(), **options):
    """A generator with a drafter; one without where that is None."""
    return Run(
        model,
        manager,
        stop,
        draft_model=drafter,
        draft_kind=None if drafter is None else kind,
        draft_block_size=BLOCK,
        **options,
    )
