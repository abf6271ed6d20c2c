"""Small random targets of families that no bundled model is of, and drafters for them.

Made in a moment, in a temporary folder. What they say means nothing, but it is the same
every time, and each row says something else.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from tests.fakes.modelkit.rendering import shared_tokenizer
from tests.fakes.modelkit.tokenizer import END, STOP, VOCAB_SIZE
from tests.fakes.modelkit.weights import build_model, favour_words, save_model
from tests.fakes.oracle import write_drafter

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 32768,
}
LFM2 = {
    **SIZES,
    "norm_eps": 1e-6,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 128,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "rope_theta": 10000.0,
    "layer_types": ["conv", "full_attention"] * 2,
}
NEMOTRON_H = {
    **SIZES,
    "num_hidden_layers": 6,
    "attention_bias": False,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_proj_bias": False,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "n_groups": 2,
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "hybrid_override_pattern": list("M*EM*-"),
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
LAGUNA = {
    **SIZES,
    "rope_theta": 10000.0,
    "layer_types": ["full_attention"] * 4,
}
# Without sparse indexes, and so with plain caches throughout.
MINIMAX_M3_VL = {
    **SIZES,
    "text_config": {
        **SIZES,
        "dense_intermediate_size": 128,
        "rope_theta": 10000.0,
        "moe_layer_freq": [0] * 4,
        "sparse_attention_config": {"use_sparse_attention": False},
    },
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "image_size": 28,
        "patch_size": 14,
        "projection_dim": 64,
    },
    "projector_hidden_size": 64,
}
GLM_OCR = {
    **SIZES,
    "text_config": {
        **SIZES,
        "rope_parameters": {"rope_theta": 10000, "mrope_section": [4, 2, 2]},
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
    },
}
CONFIGS = {
    "lfm2": LFM2,
    "nemotron_h": NEMOTRON_H,
    "laguna": LAGUNA,
    "minimax_m3_vl": MINIMAX_M3_VL,
    "glm_ocr": GLM_OCR,
}
# Random matrices of the usual size let a token predict itself, so that replies are one
# word, said again and again; and attend to everything alike, so that what a row sees of
# its prompt hardly matters.
SCALE, EMBEDDING, SHARP = 3.0, 0.1, 3.0


def make_target(folder: Path, family: str, seed: int = 3) -> str:
    """Write a random model of this family; float32 where the server casts it."""
    import mlx.core as mx

    tokenizer = shared_tokenizer()
    config = {
        **CONFIGS[family],
        "model_type": family,
        "eos_token_id": [tokenizer.token_to_id(END), tokenizer.token_to_id(STOP)],
        "pad_token_id": tokenizer.token_to_id(STOP),
    }
    with mx.stream(mx.cpu):
        mx.random.seed(seed)
        model = build_model(config)
        _draw(model)
        favour_words(model, tokenizer)
        save_model(folder, model, config, tokenizer)
    return str(folder)


def _draw(model: Any) -> None:
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    def drawn(name: str, value: mx.array) -> mx.array:
        if value.ndim < 2:
            return SHARP * value if ".q_" in name or ".k_" in name else value
        fan_in = value[0].size if "conv" in name else value.shape[-1]
        scale = SCALE / (3 * fan_in) ** 0.5
        if "embed" in name:
            scale *= EMBEDDING
        return mx.random.normal(value.shape) * scale

    model.update(tree_map_with_path(drawn, model.parameters()))
    mx.eval(model.parameters())


def make_drafter_for(
    folder: Path, target: str, kind: str, block_size: int = 4, seed: int = 7
) -> str:
    """Write a random drafter of one layer, EAGLE3 or DFlash, for a target of this module."""
    known = json.loads((Path(target) / "config.json").read_text())
    layer = {**{name: known[name] for name in SIZES}, "num_hidden_layers": 1}
    layers = known["num_hidden_layers"]
    if kind == "eagle3":
        config = {
            "model_type": "eagle3",
            "transformer_layer_config": {**layer, "rms_norm_eps": 1e-6},
            "draft_vocab_size": VOCAB_SIZE,
            "target_layer_ids": [1, layers - 2, layers - 1],
        }
        package = "eagle3"
    else:
        config = {
            "model_type": "qwen3",
            **layer,
            "dflash_config": {
                "mask_token_id": 4,
                "num_target_layers": layers,
                "target_layer_ids": [0, layers - 2],
            },
        }
        package = "qwen3_dflash"
    config["block_size"] = block_size
    module = importlib.import_module(f"mlx_vlm.speculative.drafters.{package}")
    return write_drafter(folder, module, config, seed)
