"""What a drafter is trained on: its own use, on all positions of a chat at once.

An MTP or EAGLE3 drafter reads pairs of the target's hidden state at one token and the
next token, and says the token after. While it drafts, its own last hidden state stands
in for the target's: ``chain_loss`` unrolls that from every position of a row. A DFlash
drafter reads the hidden states of everything before the last token and fills a block
of mask tokens behind it: ``block_loss`` does so from some positions of a row.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.speculative.utils import (
    speculative_hidden_state,
    speculative_prefill_kwargs,
)

LATER = 0.8  # weight of a step or slot, of that before it


def target_hidden(
    text: nn.Module, drafter: nn.Module, kind: str, ids: mx.array
) -> mx.array:
    """Return what stock's prefill hands to the drafter, [batch, tokens, features]."""
    rows, size = ids.shape
    extra: dict[str, Any] = speculative_prefill_kwargs(kind, drafter)
    if "qwen3" in text.model_type:
        positions = mx.arange(size)[None]
        extra["position_ids"] = mx.broadcast_to(positions, (rows, size))
    return speculative_hidden_state(kind, text(ids, **extra))


class ChainCache:
    """Keys of unrolled steps: a step sees the prompt before it and its own chain.

    ``size`` chains start at the row's positions. Step 0 holds what the prompt leaves
    in the cache; a later step of chain i sees step 0 up to i, and chain i alone of
    the steps between.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def offset(self) -> int:
        """How many keys are held."""
        return 0 if self.keys is None else self.keys.shape[2]

    def make_mask(self, count: int, **_: Any) -> mx.array:
        """Return which keys each of ``count`` chains sees, its own step included."""
        chains = mx.arange(count)
        prompt = chains[:, None] >= chains[None]
        own = chains[:, None] == chains[None]
        return mx.concatenate([prompt] + [own] * (self.offset // self.size), axis=1)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Append a step's keys and values; returns all of them."""
        if self.keys is not None and self.values is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values = keys, values
        return keys, values


def chain_loss(
    drafter: nn.Module, hidden: mx.array, ids: mx.array, answers: mx.array, steps: int
) -> tuple[mx.array, mx.array]:
    """Unroll an MTP or EAGLE3 drafter; returns its loss and each step's accuracy.

    hidden: [batch, tokens, features]; ids, answers: [batch, tokens], the latter 1
    where a token is to be drafted.
    """
    size = ids.shape[1] - 1 - steps
    drafter._cache = [ChainCache(size) for _ in drafter.layers]
    first = 1 if hasattr(drafter, "_prepare_target_hidden") else 0
    state = hidden[:, :size]
    total, hits, share = mx.array(0.0), [], 1.0
    for step in range(steps):
        drafter._next_position = first + step
        tokens = ids[:, 1 + step : 1 + step + size]
        state = drafter._forward_tokens(tokens, state, ids.dtype)
        head = drafter._logits if first else drafter._lm_head_fn
        wanted = slice(2 + step, 2 + step + size)
        loss, hit = _scored(head(state), ids[:, wanted], answers[:, wanted])
        total, share = total + share * loss, share * LATER
        hits.append(hit)
    drafter._cache = []
    return total, mx.stack(hits)


def _scored(
    logits: mx.array, wanted: mx.array, weights: mx.array
) -> tuple[mx.array, mx.array]:
    count = mx.maximum(weights.sum(), 1e-6)
    losses = nn.losses.cross_entropy(logits.astype(mx.float32), wanted)
    right = (mx.argmax(logits, axis=-1) == wanted) * weights
    return (losses * weights).sum() / count, right.sum() / count


def block_logits(
    drafter: nn.Module, hidden: mx.array, ids: mx.array, starts: mx.array
) -> mx.array:
    """Run a DFlash drafter from many positions of each row.

    hidden: [batch, tokens, features]; starts: [batch, blocks], positions of the last
    known token. Returns [batch, blocks, block size - 1, vocabulary], the same as
    stock's call with the hidden states before each start.
    """
    rows, blocks = starts.shape
    size = int(drafter.config.block_size)
    last = mx.take_along_axis(ids, starts, axis=1)[..., None]
    masks = mx.full((rows, blocks, size - 1), drafter.config.mask_token_id, ids.dtype)
    tokens = mx.concatenate([last, masks], axis=2).reshape(rows * blocks, size)
    known = mx.arange(ids.shape[1])[None, None] < starts[..., None]
    own = mx.ones((rows, blocks, size), dtype=mx.bool_)
    mask = mx.concatenate([known, own], axis=2).reshape(rows * blocks, 1, 1, -1)
    context = drafter.hidden_norm(drafter.fc(hidden))
    state = drafter._embed_input_tokens(tokens)
    for layer in drafter.layers:
        drafted = layer.input_layernorm(state)
        state = state + _attend(
            layer.self_attn, drafter.rope, drafted, context, starts.reshape(-1), mask
        )
        state = state + layer.mlp(layer.post_attention_layernorm(state))
    logits = drafter._logits(drafter.norm(state)[:, 1:])
    return logits.reshape(rows, blocks, size - 1, -1)


def _rotate(rope: nn.Module, x: mx.array, starts: mx.array) -> mx.array:
    """``rope(x, offset=starts)``, whose CUDA kernel reads the first offset only."""
    half = rope.dims // 2
    turns = mx.exp(mx.arange(half) * (-math.log(rope.base) / half))
    places = starts[:, None] + mx.arange(x.shape[2])
    angles = places[:, None, :, None].astype(mx.float32) * turns
    cos, sin = mx.cos(angles), mx.sin(angles)
    left, right = mx.split(x, 2, axis=-1)
    return mx.concatenate([left * cos - right * sin, left * sin + right * cos], -1)


def _attend(
    attention: nn.Module,
    rope: nn.Module,
    drafted: mx.array,
    context: mx.array,
    starts: mx.array,
    mask: mx.array,
) -> mx.array:
    """Stock's DFlash attention, with several blocks to one row of context."""

    def heads(linear: nn.Module, x: mx.array, norm: Any = None) -> mx.array:
        split = linear(x).reshape(*x.shape[:2], -1, attention.head_dim)
        return (norm(split) if norm else split).transpose(0, 2, 1, 3)

    def join(shared: mx.array, own: mx.array) -> mx.array:
        shared = mx.repeat(shared, own.shape[0] // shared.shape[0], axis=0)
        return mx.concatenate([shared, own], axis=2)

    queries = _rotate(rope, heads(attention.q_proj, drafted, attention.q_norm), starts)
    keys = _rotate(rope, heads(attention.k_proj, drafted, attention.k_norm), starts)
    old_keys = rope(heads(attention.k_proj, context, attention.k_norm), offset=0)
    old_values = heads(attention.v_proj, context)
    output = mx.fast.scaled_dot_product_attention(
        queries,
        join(old_keys, keys),
        join(old_values, heads(attention.v_proj, drafted)),
        scale=attention.scale,
        mask=mask,
    )
    output = output.transpose(0, 2, 1, 3).reshape(*drafted.shape[:2], -1)
    return attention.o_proj(output)


def block_loss(
    drafter: nn.Module,
    hidden: mx.array,
    ids: mx.array,
    answers: mx.array,
    starts: mx.array,
) -> tuple[mx.array, mx.array]:
    """Return the loss of a DFlash drafter's blocks and each slot's accuracy."""
    drafter._fused_context_kv_weight = None  # stock's copy of weights that change here
    logits = block_logits(drafter, hidden, ids, starts)
    total, hits, share = mx.array(0.0), [], 1.0
    for slot in range(logits.shape[2]):
        at = starts + 1 + slot
        wanted = mx.take_along_axis(ids, at, axis=1)
        weights = mx.take_along_axis(answers, at, axis=1)
        loss, hit = _scored(logits[:, :, slot], wanted, weights)
        total, share = total + share * loss, share * LATER
        hits.append(hit)
    return total, mx.stack(hits)
