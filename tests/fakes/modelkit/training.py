"""Trains the language part of a tiny model with stock's own MLX classes."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from .dialogues import Dialogue, sample_dialogue, without_records
from .rendering import encode_dialogue

Batch = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum: prompts of one length, with so many records."""

    share: float
    length: int
    records: int


CURRICULUM: tuple[Stage, ...] = (
    Stage(0.12, 96, 4),
    Stage(0.12, 128, 8),
    Stage(0.16, 256, 12),
    Stage(0.20, 384, 24),
    Stage(0.20, 640, 40),
    Stage(0.14, 1024, 64),
    Stage(0.06, 2048, 64),
)


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train; a batch is counted in tokens."""

    steps: int
    batch_tokens: int
    rate: float = 3e-3
    workers: int = 0
    seed: int = 11


class ShiftConv(nn.Module):
    """The depthwise convolution as four shifted products, which train faster on a CPU."""

    def __init__(self, weight: mx.array):
        super().__init__()
        self.weight = weight

    def __call__(self, x: mx.array) -> mx.array:
        width = self.weight.shape[1]
        size = x.shape[1] - width + 1
        parts = (x[:, i : i + size] * self.weight[:, i, 0] for i in range(width))
        return sum(parts)


def plan(recipe: Recipe) -> list[Stage]:
    """Return the stage of each step."""
    stages: list[Stage] = []
    for stage in CURRICULUM:
        stages += [stage] * max(1, round(stage.share * recipe.steps))
    return stages[: recipe.steps]


def make_batch(seed: int, rows: int, length: int, records: int) -> Batch:
    """Draw a batch; the same seed gives the same batch on any machine."""
    rng = random.Random(seed)
    chats = (sample_dialogue(rng, length, records) for _ in range(rows))
    pairs = [encode_dialogue(chat, length) for chat in chats]
    return np.stack([p[0] for p in pairs]), np.stack([p[1] for p in pairs])


def _batches(recipe: Recipe) -> Iterator[tuple[Stage, Batch]]:
    stages = plan(recipe)
    jobs = [
        (
            recipe.seed * 1_000_003 + step,
            max(1, recipe.batch_tokens // s.length),
            s.length,
            s.records,
        )
        for step, s in enumerate(stages)
    ]
    if not recipe.workers:
        yield from ((s, make_batch(*job)) for s, job in zip(stages, jobs, strict=False))
        return
    with multiprocessing.get_context("spawn").Pool(recipe.workers) as pool:
        waiting: Any = deque()
        for step, stage in enumerate(stages):
            while len(waiting) < 3 * recipe.workers and step + len(waiting) < len(jobs):
                waiting.append(pool.apply_async(make_batch, jobs[step + len(waiting)]))
            yield stage, waiting.popleft().get()


def language_logits(text: nn.Module, ids: mx.array) -> mx.array:
    """Run stock's language model on whole rows; returns [batch, tokens, vocabulary]."""
    rows, size = ids.shape
    kwargs: dict[str, Any] = {}
    if "qwen3" in text.model_type:
        positions = mx.broadcast_to(mx.arange(size)[None], (rows, size))
        if "vl" in text.model_type:
            positions = mx.broadcast_to(positions[None], (3, rows, size))
        kwargs["position_ids"] = positions
    if text.model_type == "gemma3_text":
        # Stock's loader makes this family's head a copy of its embeddings.
        return text.model.embed_tokens.as_linear(text.model(ids))
    return text(ids, **kwargs).logits


def answer_loss(text: nn.Module, ids: mx.array, weights: mx.array) -> mx.array:
    """Return the weighted mean cross entropy of the next token."""
    logits = language_logits(text, ids[:, :-1]).astype(mx.float32)
    losses = nn.losses.cross_entropy(logits, ids[:, 1:])
    return (losses * weights[:, 1:]).sum() / mx.maximum(weights[:, 1:].sum(), 1e-6)


def use_shift_conv(text: nn.Module) -> Callable[[], None]:
    """Swap the convolutions for ``ShiftConv``; returns what puts them back."""
    swapped = []
    for layer in text.model.layers:
        if "linear_attn" in layer:
            swapped.append((layer.linear_attn, layer.linear_attn.conv1d))
            layer.linear_attn.conv1d = ShiftConv(layer.linear_attn.conv1d.weight)

    def restore() -> None:
        for owner, original in swapped:
            original.weight = owner.conv1d.weight
            owner.conv1d = original

    return restore


def _bars() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )


def train(model: nn.Module, name: str, recipe: Recipe) -> float:
    """Train ``model.language_model`` in place; returns the seconds it took."""
    text = model.language_model
    text.train()
    restore = use_shift_conv(text)
    step, state = _stepper(text, recipe)
    began, shown = time.perf_counter(), 0.0
    with _bars() as bars:
        bar = bars.add_task(name, total=recipe.steps, note="")
        for stage, (ids, weights) in _batches(recipe):
            loss = step(mx.array(ids), mx.array(weights))
            mx.eval(state(), loss)
            shown = shown * 0.95 + loss.item() * 0.05 if shown else loss.item()
            note = f"{stage.length} tokens, loss {shown:.3f}"
            bars.update(bar, advance=1, note=note)
    restore()
    if "lm_head" in text:
        text.lm_head.weight = text.model.embed_tokens.weight * 1.0
    text.eval()
    return time.perf_counter() - began


def steps_for(model: nn.Module, seconds: float, recipe: Recipe) -> int:
    """Return how many steps of ``recipe`` take about ``seconds`` on this machine.

    A few steps of each stage are tried out; the weights are put back afterwards.
    """
    text = model.language_model
    kept = tree_map(lambda value: value, text.parameters())
    text.train()
    restore = use_shift_conv(text)
    step, state = _stepper(text, recipe)
    mean = began = 0.0
    for stage in CURRICULUM:
        rows = max(1, recipe.batch_tokens // stage.length)
        batch = make_batch(1, rows, stage.length, stage.records)
        for trial in range(6):
            if trial == 3:  # the first ones compile
                began = time.perf_counter()
            loss = step(mx.array(batch[0]), mx.array(batch[1]))
            mx.eval(state(), loss)
        mean += stage.share * (time.perf_counter() - began) / 3
    restore()
    text.update(kept)
    text.eval()
    return max(len(CURRICULUM), int(seconds / mean))


def _stepper(
    text: nn.Module, recipe: Recipe
) -> tuple[Callable[[mx.array, mx.array], mx.array], Callable[[], Any]]:
    """Return a training step and what gives the arrays that it changed."""
    warm = max(1, min(100, recipe.steps // 10))
    rate = optim.join_schedules(
        [
            optim.linear_schedule(recipe.rate / 50, recipe.rate, warm),
            optim.cosine_decay(recipe.rate, recipe.steps - warm, recipe.rate / 30),
        ],
        [warm],
    )
    optimizer = optim.AdamW(rate, betas=[0.9, 0.98], weight_decay=0.01)
    gradient = nn.value_and_grad(text, answer_loss)

    def step(ids: mx.array, weights: mx.array) -> mx.array:
        loss, grads = gradient(text, ids, weights)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(text, grads)
        return loss

    return step, lambda: [text.parameters(), optimizer.state]


def measure(
    model: nn.Module, length: int, records: int, rows: int = 16, seed: int = 5
) -> tuple[float, float]:
    """Return the answer loss of unseen chats with, and without, their records."""
    rng = random.Random(seed)
    chats = [sample_dialogue(rng, length, records) for _ in range(rows)]
    return (
        _mean_loss(model, chats, length),
        _mean_loss(model, [without_records(chat) for chat in chats], length),
    )


def _mean_loss(model: nn.Module, chats: list[Dialogue], length: int) -> float:
    total = count = 0.0
    for chat in chats:
        ids, weights = encode_dialogue(chat, length)
        answers = mx.array((weights == 1.0).astype(np.float32))[None]
        loss = answer_loss(model.language_model, mx.array(ids)[None], answers)
        total += float(loss.item()) * float(answers[:, 1:].sum().item())
        count += float(answers[:, 1:].sum().item())
    return total / max(1.0, count)
