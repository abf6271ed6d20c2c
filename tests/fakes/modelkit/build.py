"""From a name to a model folder: build, train, measure, write."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.utils import load_model
from rich.console import Console
from rich.table import Table

from .configs import CONFIGS, NAMES
from .rendering import shared_tokenizer
from .start import prepare
from .training import Recipe, measure, steps_for, train
from .weights import build_model, favour_words, randomise, save_model

__all__ = ["NAMES", "build", "evaluate"]

#: Steps that give the committed weights; see docs/MODELS.md.
STEPS: dict[str, int] = {"dense": 2400, "hybrid": 1200, "window": 2400, "vlm": 2400}
BATCH_TOKENS = 3072
SEEDS: dict[str, int] = {"dense": 21, "hybrid": 22, "window": 23, "vlm": 24}


def build(name: str, options: argparse.Namespace) -> None:
    """Build model ``name`` as the command line asks and write its folder."""
    tokenizer = shared_tokenizer()
    config = CONFIGS[name](tokenizer)
    model = build_model(config)
    randomise(model, SEEDS[name])
    favour_words(model, tokenizer)
    steps = STEPS[name] if options.steps is None else options.steps
    seconds = 0.0
    if steps:
        if options.resume:
            model = load_model(options.resume / name)
            model.set_dtype(mx.float32)
        else:
            prepare(model, name, SEEDS[name])
        recipe = Recipe(
            steps=steps,
            batch_tokens=options.batch_tokens or BATCH_TOKENS,
            rate=options.rate,
            workers=options.workers,
        )
        if options.seconds:
            steps = steps_for(model, options.seconds, recipe)
            recipe = replace(recipe, steps=steps)
        seconds = train(model, name, recipe)
    folder = options.out / name
    save_model(folder, model, config, tokenizer)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    Console().print(
        f"{name}: {folder} ({size:.1f} MiB, {steps} steps, {seconds:.0f} s)"
    )
    report(name, model)


def report(name: str, model: nn.Module) -> None:
    """Print the answer loss with and without the records in the prompt."""
    table = Table(title=name)
    for heading in ("tokens", "records", "loss", "loss without records"):
        table.add_column(heading, justify="right")
    for length, records in ((128, 8), (384, 24), (640, 40), (1024, 64), (2048, 64)):
        kept, removed = measure(model, length, records)
        table.add_row(str(length), str(records), f"{kept:.3f}", f"{removed:.3f}")
    Console().print(table)


def evaluate(name: str, out: Path) -> None:
    """Measure a model that is already there, in float32."""
    model = load_model(out / name)
    model.set_dtype(mx.float32)
    report(name, model)
