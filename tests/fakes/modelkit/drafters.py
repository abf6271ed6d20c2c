"""The trained drafters: their configurations, how they start, and their folders.

A drafter is stock's own class, bound to its target: it reads the target's hidden
states and uses the target's embeddings and head. docs/MODELS.md says what each of
them accepts with, and without, the prompt that it drafts for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.utils import get_model_and_args
from tokenizers import Tokenizer

from .configs import CONFIGS, CONTEXT
from .tokenizer import VOCAB_SIZE

#: Turns so slowly that most rotary pairs stand still over a whole prompt: what is
#: matched by content stays the same at any distance.
SLOW_THETA = 1e8
SHARP = 1.7
RESIDUAL = 0.3
QUIET = 0.2

Config = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """A drafter: whom it drafts for, stock's round loop, and its configuration.

    noise: what ``add_noise`` is given after training; 0 keeps the trained weights.
    """

    target: str
    kind: str
    config: Callable[[Tokenizer], Config]
    seed: int
    noise: float = 0.0


def _mtp_config(tokenizer: Tokenizer) -> Config:
    # One layer is all that stock 0.7.10 loads: its loader reads ``text_config`` a
    # second time and forgets ``mtp_num_hidden_layers``.
    return {
        "model_type": "qwen3_5_mtp",
        "text_config": CONFIGS["hybrid"](tokenizer),
        "block_size": 4,
        "tie_word_embeddings": True,
    }


def _eagle3_config(tokenizer: Tokenizer) -> Config:
    layer = {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT,
        "rope_theta": SLOW_THETA,
    }
    return {
        "model_type": "eagle3",
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": VOCAB_SIZE,
        "target_hidden_size": 128,
        "tie_word_embeddings": True,
        "norm_before_residual": True,
        "block_size": 4,
        "target_layer_ids": [1, 2, 4],
        "capture_layer_ids": [0, 1, 3],
    }


def _dflash_config(tokenizer: Tokenizer) -> Config:
    # Stock adds "_dflash" to the type of a configuration with a "dflash_config".
    return {
        "model_type": "gemma4",
        "architectures": ["DFlashDraftModel"],
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT,
        "rope_theta": SLOW_THETA,
        "block_size": 5,
        "num_target_layers": 4,
        "dflash_config": {
            "mask_token_id": tokenizer.token_to_id("<|video_pad|>"),
            "target_layer_ids": [0, 1, 3],
        },
    }


DRAFTERS: dict[str, Spec] = {
    "hybrid-mtp": Spec("hybrid", "mtp", _mtp_config, 31),
    "hybrid-eagle3": Spec("hybrid", "eagle3", _eagle3_config, 32, noise=0.1),
    "dense-eagle3": Spec("dense", "eagle3", _eagle3_config, 33, noise=0.65),
    "dense-dflash": Spec("dense", "dflash", _dflash_config, 34),
}


def new_drafter(name: str, config: Config, target: nn.Module) -> nn.Module:
    """Instantiate stock's class with starting weights and bind it to ``target``."""
    package, _ = get_model_and_args(config=config)
    drafter = package.Model(package.ModelConfig.from_dict(config))
    rng = np.random.default_rng(DRAFTERS[name].seed)
    for path, module in drafter.named_modules():
        if isinstance(module, nn.Linear):
            scale = module.weight.shape[1] ** -0.5
            if path.endswith(("o_proj", "down_proj")):
                scale *= RESIDUAL
            values = rng.standard_normal(module.weight.shape) * scale
            module.weight = mx.array(values.astype(np.float32))
        elif path.endswith(("q_norm", "k_norm")):
            module.weight = mx.full(module.weight.shape, SHARP)
    bind_frozen(drafter, target)
    # The head is the target's, so its last norm is a good start for the drafter's;
    # smaller, since a drafter that knows nothing shall not be sure of it.
    drafter.norm.weight = target.language_model.model.norm.weight * QUIET
    mx.eval(drafter.parameters())
    return drafter


def add_noise(drafter: nn.Module, level: float, seed: int) -> None:
    """Add gaussian noise to every matrix, ``level`` times as wide as its own values.

    A drafter that knows its target by heart is never rejected, and then nothing is
    ever rolled back. The same seed draws the same noise on any machine. Embeddings
    are the target's and stay.
    """
    rng = np.random.default_rng(seed)
    for _, module in sorted(drafter.named_modules(), key=lambda pair: pair[0]):
        if isinstance(module, nn.Linear):
            width = level * float(np.std(np.array(module.weight)))
            values = rng.standard_normal(module.weight.shape) * width
            module.weight = module.weight + mx.array(values.astype(np.float32))
    mx.eval(drafter.parameters())


def bind_frozen(drafter: nn.Module, target: nn.Module) -> None:
    """Bind ``drafter`` to ``target``, whose embeddings stay as they are."""
    drafter.bind(target)
    if isinstance(getattr(drafter, "embed_tokens", None), nn.Module):
        drafter.embed_tokens.freeze()


def open_drafter(folder: Path, target: nn.Module) -> nn.Module:
    """Load a drafter as stock does and return it in float32, bound to ``target``."""
    drafter, _ = load_drafter(str(folder))
    drafter.set_dtype(mx.float32)
    bind_frozen(drafter, target)
    return drafter


def save_drafter(folder: Path, drafter: nn.Module, config: Config) -> None:
    """Write the two files that stock's ``load_drafter`` needs, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.astype(mx.bfloat16)
        for name, value in tree_flatten(drafter.parameters())
        # Only an EAGLE3 drafter has embeddings of its own, though bind() replaces them.
        if config["model_type"] == "eagle3" or not name.startswith("embed_tokens")
    }
    part = folder / "part.safetensors"
    mx.save_safetensors(str(part), weights, metadata={"format": "mlx"})
    part.replace(folder / "model.safetensors")
    text = json.dumps({**config, "torch_dtype": "bfloat16"}, indent=2)
    (folder / "config.json").write_text(text + "\n")
