"""Trains a drafter on the bundled dialogues, on its target's own hidden states."""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map

from .drafter_losses import block_loss, chain_loss, target_hidden
from .drafters import Spec
from .training import Batch, Stage, answer_loss, make_batch, use_shift_conv

CURRICULUM: tuple[Stage, ...] = (
    Stage(0.15, 96, 4),
    Stage(0.15, 160, 8),
    Stage(0.25, 256, 14),
    Stage(0.25, 384, 24),
    Stage(0.15, 640, 40),
    Stage(0.05, 1024, 64),
)
POLISH = 0.8  # from this share on, a target trained along stands still
CACHE_BYTES = 4 * 2**30  # kept for reuse, so that several can share a device
FOLLOW = 0.1  # until then, such a target's rate grows from nothing
TARGET_RATE = 0.2  # how much slower such a target learns than its drafter


@dataclass(frozen=True)
class DraftRecipe:
    """How long and how fast to train; the rate follows the steps or the clock."""

    steps: int = 0
    seconds: float = 0.0
    batch_tokens: int = 3072
    rate: float = 3e-3
    workers: int = 0
    unrolled: int = 3
    blocks: int = 12
    joint: bool = False
    save_every: float = 60.0


class Clock:
    """How much of a recipe is done, by its steps or by its seconds."""

    def __init__(self, recipe: DraftRecipe) -> None:
        self.recipe = recipe
        self.began = time.perf_counter()
        self.step = 0

    def share(self, ahead: int = 0) -> float:
        """Return what is done, from 0 to 1, ``ahead`` steps from now."""
        done = 0.0
        if self.recipe.steps:
            done = (self.step + ahead) / self.recipe.steps
        if self.recipe.seconds:
            done = max(done, self.seconds / self.recipe.seconds)
        return min(1.0, done)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.began


def _stage(share: float) -> Stage:
    for stage in CURRICULUM:
        share -= stage.share
        if share < 0:
            return stage
    return CURRICULUM[-1]


def _batches(recipe: DraftRecipe, clock: Clock, seed: int) -> Iterator[Batch]:
    def job(number: int, ahead: int) -> tuple[int, int, int, int]:
        stage = _stage(clock.share(ahead))
        rows = max(1, recipe.batch_tokens // stage.length)
        return seed * 1_000_003 + number, rows, stage.length, stage.records

    number = 0
    if not recipe.workers:
        while True:
            yield make_batch(*job(number, 0))
            number += 1
    with multiprocessing.get_context("spawn").Pool(recipe.workers) as pool:
        waiting: Any = deque()
        while True:
            while len(waiting) < 3 * recipe.workers:
                waiting.append(pool.apply_async(make_batch, job(number, len(waiting))))
                number += 1
            yield waiting.popleft().get()


class _Pair(nn.Module):
    """What is trained: the drafter, and the target's language model if it joins."""

    def __init__(self, drafter: nn.Module, text: nn.Module | None) -> None:
        super().__init__()
        self.drafter = drafter
        if text is not None:
            self.text = text


def draw_starts(
    rng: np.random.Generator, answers: np.ndarray, blocks: int, size: int
) -> np.ndarray:
    """Draw positions whose next token is drafted, int32 of [batch, blocks]."""
    last = answers.shape[1] - size
    starts = np.ones((answers.shape[0], blocks), dtype=np.int32)
    for row, marks in enumerate(answers):
        places = np.flatnonzero(marks[2 : last + 1]) + 1
        if len(places):
            starts[row] = rng.choice(places, blocks)
    return starts


def _loss_function(
    target: nn.Module, drafter: nn.Module, spec: Spec, recipe: DraftRecipe
) -> Callable[..., tuple[mx.array, mx.array]]:
    text = target.language_model

    def loss(
        pair: _Pair, ids: mx.array, weights: mx.array, starts: mx.array, joint: bool
    ) -> tuple[mx.array, mx.array]:
        answers = (weights == 1.0).astype(mx.float32)
        hidden = target_hidden(text, drafter, spec.kind, ids)
        if not joint:
            hidden = mx.stop_gradient(hidden)
        if spec.kind == "dflash":
            total, hits = block_loss(drafter, hidden, ids, answers, starts)
        else:
            total, hits = chain_loss(drafter, hidden, ids, answers, recipe.unrolled)
        if joint:
            total = total + 2.0 * answer_loss(text, ids, weights)
        return total, hits

    return loss


def train_drafter(
    target: nn.Module,
    drafter: nn.Module,
    spec: Spec,
    recipe: DraftRecipe,
    save: Callable[[], None],
) -> tuple[int, float]:
    """Train ``drafter`` (and, if joint, ``target``) in place, saving now and then.

    Returns steps and seconds.
    """
    text = target.language_model
    mx.set_cache_limit(CACHE_BYTES)
    text.train(recipe.joint)
    text.unfreeze() if recipe.joint else text.freeze()
    restore = use_shift_conv(text)
    pair = _Pair(drafter, text if recipe.joint else None)
    clock, joint = Clock(recipe), recipe.joint
    rng = np.random.default_rng(spec.seed)
    loss_of = _loss_function(target, drafter, spec, recipe)
    step = _stepper(pair, loss_of, recipe, joint)
    saved = 0.0
    for ids, weights in _batches(recipe, clock, spec.seed):
        if clock.share() >= 1.0:
            break
        if joint and clock.share() >= POLISH:
            joint = False
            text.freeze()
            step = _stepper(pair, loss_of, recipe, joint)
        size = int(drafter.config.block_size)
        starts = draw_starts(rng, weights == 1.0, recipe.blocks, size)
        arrays = (mx.array(ids), mx.array(weights), mx.array(starts))
        loss, hits = step(clock.share(), *arrays, joint)
        clock.step += 1
        if clock.step % 20 == 0 or clock.step < 4:
            _note(clock, ids.shape[1], loss, hits)
        if clock.seconds - saved > recipe.save_every:
            saved = clock.seconds
            restore()
            save()
            restore = use_shift_conv(text)
    restore()
    text.eval()
    return clock.step, clock.seconds


def _stepper(
    pair: _Pair, loss: Callable[..., Any], recipe: DraftRecipe, joint: bool
) -> Callable[..., tuple[mx.array, mx.array]]:
    optimizer = optim.AdamW(recipe.rate, betas=[0.9, 0.98], weight_decay=0.01)
    gradient = nn.value_and_grad(pair, loss)

    def step(share: float, *batch: Any) -> tuple[mx.array, mx.array]:
        warm = min(1.0, 0.02 + share / 0.03)
        cosine = 0.03 + 0.97 * (1 + math.cos(math.pi * share)) / 2
        optimizer.learning_rate = recipe.rate * warm * cosine
        before = pair.text.parameters() if joint else {}
        (value, hits), grads = gradient(pair, *batch)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(pair, grads)
        if joint:
            part = TARGET_RATE * min(1.0, share / FOLLOW)
            after = pair.text.parameters()
            pair.text.update(tree_map(partial(_moved, part), before, after))
        mx.eval(pair.parameters(), optimizer.state, value, hits)
        return value, hits

    return step


def _moved(part: float, before: mx.array, after: mx.array) -> mx.array:
    return before + part * (after - before)


def _note(clock: Clock, length: int, loss: mx.array, hits: mx.array) -> None:
    shown = [round(hit, 3) for hit in hits.tolist()]
    line = {
        "step": clock.step,
        "seconds": round(clock.seconds),
        "tokens": length,
        "loss": round(float(loss.item()), 3),
        "right": shown,
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
