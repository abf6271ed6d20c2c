"""From a drafter's name to its folder: train, measure, write."""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.utils import load_model
from rich.console import Console
from rich.table import Table

from .build import report
from .configs import CONFIGS
from .drafter_measure import TASKS, mean_acceptance
from .drafter_training import DraftRecipe, train_drafter
from .drafters import DRAFTERS, add_noise, new_drafter, open_drafter, save_drafter
from .rendering import shared_tokenizer
from .weights import save_model

__all__ = ["build_drafter", "evaluate_drafter"]

STEPS = 1200
BATCH_TOKENS = 3072
MODELS = Path(__file__).resolve().parents[1] / "models"


def _open_target(name: str, out: Path) -> nn.Module:
    """Load the target from ``out`` if it is there, else the committed one."""
    folder = out / name
    target = load_model(folder if folder.exists() else MODELS / name)
    target.set_dtype(mx.float32)
    return target


def build_drafter(name: str, options: argparse.Namespace) -> None:
    """Train drafter ``name`` as the command line asks, write its folder, measure it."""
    spec, tokenizer = DRAFTERS[name], shared_tokenizer()
    config = spec.config(tokenizer)
    target = _open_target(spec.target, options.out)
    if options.resume:
        drafter = open_drafter(options.resume / "drafters" / name, target)
    else:
        drafter = new_drafter(name, config, target)
    folder = options.out / "drafters" / name

    def save() -> None:
        save_drafter(folder, drafter, config)
        if options.joint:
            target_config = CONFIGS[spec.target](tokenizer)
            save_model(options.out / spec.target, target, target_config, tokenizer)

    steps = STEPS if options.steps is None else options.steps
    recipe = DraftRecipe(
        steps=0 if options.seconds else steps,
        seconds=options.seconds,
        batch_tokens=options.batch_tokens or BATCH_TOKENS,
        rate=options.rate,
        workers=options.workers,
        joint=options.joint,
    )
    done, seconds = 0, 0.0
    if recipe.steps or recipe.seconds:
        done, seconds = train_drafter(target, drafter, spec, recipe, save)
    noise = spec.noise if options.noise is None else options.noise
    if noise:
        add_noise(drafter, noise, spec.seed)
    save()
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    Console().print(f"{name}: {folder} ({size:.2f} MiB, {done} steps, {seconds:.0f} s)")
    evaluate_drafter(name, options.out, options.chats)
    if options.joint:
        report(spec.target, target)


def evaluate_drafter(name: str, out: Path, chats: int) -> None:
    """Print the acceptance of a drafter that is already there, in float32."""
    spec = DRAFTERS[name]
    target = _open_target(spec.target, out)
    drafter = open_drafter(out / "drafters" / name, target)
    block = int(drafter.config.block_size)
    table = Table(title=name)
    for heading in ("task", "block", "primed", "starved", "first primed", "starved"):
        table.add_column(heading, justify="right")
    sizes = (2, block) if spec.kind == "eagle3" else (block,)
    for task, records in TASKS:
        for size in sizes:
            primed, starved = (
                mean_acceptance(
                    target,
                    drafter,
                    spec.kind,
                    task,
                    records,
                    primed=whole,
                    block_size=size,
                    chats=chats,
                )
                for whole in (True, False)
            )
            table.add_row(
                f"{task} {records}",
                str(size),
                f"{primed.rate:.2f}",
                f"{starved.rate:.2f}",
                f"{primed.first_rate:.2f}",
                f"{starved.first_rate:.2f}",
            )
    Console().print(table)
