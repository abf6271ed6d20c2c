"""Builds stock's own model classes from a configuration and saves them for stock.

The models are stock's MLX classes, so what is trained here is what is served.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_vlm.utils import get_model_and_args, update_module_configs
from tokenizers import Tokenizer

from .configs import PROCESSORS
from .tokenizer import END, save_tokenizer
from .words import VALUES

# Random models answer with one repeated word unless their weights are larger
# than usual: three times keeps every layer's share of the output large.
RANDOM_SCALE = 3.0
EMBEDDING_SHARE = 0.1
QUIET, END_SHARE = 0.1, 0.8


def build_model(config: dict[str, Any]) -> nn.Module:
    """Instantiate stock's class for ``config``, as its loader would."""
    config = copy.deepcopy(config)
    package, _ = get_model_and_args(config=config)
    for part in ("text_config", "vision_config", "audio_config"):
        config.setdefault(part, {})
    settings = package.ModelConfig.from_dict(config)
    settings = update_module_configs(settings, package, config, ["text", "vision"])
    model = package.Model(settings)
    mx.eval(model.parameters())
    return model


def randomise(model: nn.Module, seed: int) -> None:
    """Give every matrix random values of about ``RANDOM_SCALE`` times the usual size."""
    mx.random.seed(seed)

    def draw(name: str, value: mx.array) -> mx.array:
        if value.ndim < 2:
            wide = "q_norm" in name or "k_norm" in name
            return value * RANDOM_SCALE if wide else value
        fan_in = value.size // value.shape[0]
        scale = RANDOM_SCALE / (3 * fan_in) ** 0.5
        if "embed_tokens" in name:
            # Gemma multiplies embeddings by sqrt(hidden): a small one keeps a token
            # from predicting itself for ever.
            scale *= EMBEDDING_SHARE
        return mx.random.normal(value.shape) * scale

    model.update(tree_map_with_path(draw, model.parameters()))
    mx.eval(model.parameters())


def favour_words(model: nn.Module, tokenizer: Tokenizer) -> None:
    """Let an untrained model write only words that come back as the same tokens.

    Random replies are full of broken bytes and word parts, which no chat can send back
    as they were. Small output vectors for everything but the value words keep those from
    winning; the end token is left in reach, so that some replies end by themselves.
    """
    target = model.language_model
    head = target.lm_head if "lm_head" in target else target.model.embed_tokens
    scale = [QUIET] * head.weight.shape[0]
    for value in VALUES:
        scale[tokenizer.encode(f" {value}").ids[0]] = 1.0
    scale[tokenizer.token_to_id(END)] = END_SHARE
    head.weight = head.weight * mx.array(scale)[:, None]


def save_model(
    folder: Path, model: nn.Module, config: dict[str, Any], tokenizer: Tokenizer
) -> None:
    """Write all files that stock needs to serve ``model`` from ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.astype(mx.bfloat16)
        for name, value in tree_flatten(model.parameters())
    }
    mx.save_safetensors(
        str(folder / "model.safetensors"), weights, metadata={"format": "mlx"}
    )
    _write_json(folder / "config.json", {**config, "torch_dtype": "bfloat16"})
    generation = {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", generation)
    save_tokenizer(folder, tokenizer)
    if config["model_type"] in ("gemma4", "qwen3_vl"):
        kind = "dense" if config["model_type"] == "gemma4" else "vlm"
        _write_json(folder / "processor_config.json", PROCESSORS[kind])


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
