"""Starting weights from which the tiny models learn to copy within minutes.

From the usual random weights, recall appears late or not at all at this size.
Two things bring it forward. The hybrid starts with slow decay, so that its states
remember from the first step. The others have no convolution that shows a token its
neighbours, so their first layer starts with heads that look one, two, three and four
tokens back: one embedding channel is the same for every token, the first layer's
queries and keys read only that channel, and the rotary angles make their product
largest at the wanted distance. All of it is trained further like any other weight.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

CONSTANT = 4.0  # the shared channel, in units of the other channels' spread
PAIRS = 4  # the fastest rotary pairs, which tell near positions apart
RESIDUAL = 0.3


def prepare(model: nn.Module, kind: str, seed: int) -> None:
    """Set the starting weights of the language part of ``model``."""
    rng = np.random.default_rng(seed)
    text = model.language_model
    for layer in text.model.layers:
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                size = module.weight.shape
                scale = size[1] ** -0.5
                if name.endswith(("o_proj", "down_proj", "out_proj")):
                    scale *= 1.0 if kind in ("dense", "window") else RESIDUAL
                module.weight = _normal(rng, size, scale)
        _prepare_layer(layer, kind, rng)
    _prepare_embedding(text, kind, rng)
    if kind != "hybrid":
        _look_back(text.model.layers[0], kind)
    mx.eval(text.parameters())


def _normal(rng: np.random.Generator, shape: Any, scale: float) -> mx.array:
    return mx.array((rng.standard_normal(shape) * scale).astype(np.float32))


def _prepare_layer(layer: nn.Module, kind: str, rng: np.random.Generator) -> None:
    if "linear_attn" in layer:
        gates = layer.linear_attn
        decay = rng.uniform(0.01, 0.5, gates.A_log.shape)
        gates.A_log = mx.array(np.log(decay).astype(np.float32))
        gates.conv1d.weight = _normal(rng, gates.conv1d.weight.shape, 0.5)
        return
    sharp = {"dense": 0.7, "window": 0.7, "hybrid": 1.7, "vlm": 1.7}[kind]
    shape = layer.self_attn.q_norm.weight.shape
    layer.self_attn.q_norm.weight = mx.full(shape, sharp)
    layer.self_attn.k_norm.weight = mx.full(shape, sharp)
    if kind in ("dense", "window"):
        # gemma3 adds one to each stored norm weight, gemma4 does not.
        stored = RESIDUAL - (1.0 if kind == "window" else 0.0)
        for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
            norm.weight = mx.full(norm.weight.shape, stored)


def _prepare_embedding(text: nn.Module, kind: str, rng: np.random.Generator) -> None:
    shape = text.model.embed_tokens.weight.shape
    spread = 0.1 if kind in ("dense", "window") else 0.2
    values = rng.standard_normal(shape) * spread
    if kind != "hybrid":
        values[:, 0] = CONSTANT * spread
    text.model.embed_tokens.weight = mx.array(values.astype(np.float32))
    if kind == "window":
        text.lm_head.weight = text.model.embed_tokens.weight * 1.0


def _look_back(layer: nn.Module, kind: str) -> None:
    """Make the first layer's heads look 1, 2, 3, ... tokens back."""
    attention = layer.self_attn
    size = attention.q_norm.weight.shape[0]
    half = size // 2
    turns = 10000.0 ** (-np.arange(PAIRS) / half)
    keys = np.zeros(size)
    keys[:PAIRS] = 1.0
    queries: list[np.ndarray] = []
    for head in range(attention.q_proj.weight.shape[0] // size):
        query = np.zeros(size)
        query[:PAIRS] = np.cos((head + 1) * turns)
        query[half : half + PAIRS] = -np.sin((head + 1) * turns)
        queries.append(query)
    attention.q_proj.weight = _reads_constant(attention.q_proj, np.concatenate(queries))
    copies = attention.k_proj.weight.shape[0] // size
    attention.k_proj.weight = _reads_constant(attention.k_proj, np.tile(keys, copies))
    # The product of the norms times the model's own scale shall be one.
    sharp = 1.0 if kind == "dense" else size**0.25
    stored = sharp - (1.0 if kind == "window" else 0.0)
    attention.q_norm.weight = mx.full((size,), stored)
    attention.k_norm.weight = mx.full((size,), stored)
    if kind in ("dense", "window"):
        norm = layer.post_attention_layernorm
        norm.weight = mx.full(norm.weight.shape, 0.0 if kind == "window" else 1.0)


def _reads_constant(linear: nn.Linear, column: np.ndarray) -> mx.array:
    weight = np.zeros(linear.weight.shape, dtype=np.float32)
    weight[:, 0] = column
    return mx.array(weight)
