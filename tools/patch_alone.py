"""Each change's patch for a tree with what the change requires, and nothing else.

Such a patch can be taken by itself.  It stands in ``alone/`` where it differs from the
series' patch, and its ``Applies-to`` field names the patches that must be in the tree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from mlx_vlm_cacheplus.change import Change
from mlx_vlm_cacheplus.changes import load_changes
from tools.patch_series import Step, build_step, note_borrowed, patch_text
from tools.patch_tree import PatchProblem, Tree

# What the series alone has.  The first two stand on several changes that do not require
# each other, so that no single patch leads from one of these to the next; durable-disk
# writes drafters' parts, whose form draft-state brings.
SERIES_ONLY = ("draft-state", "speculative-turns", "durable-disk")


@dataclass
class Alone:
    """A change's patch, and the steps that lead to the tree that it is for."""

    step: Step
    before: list[Step] = field(default_factory=list)

    @property
    def steps(self) -> list[Step]:
        """All steps from the stock to the tree with the change."""
        return [*self.before, self.step]


def build_alone(stock: Path, series: list[Step]) -> list[Alone]:
    """Return the patch of each change that can be taken by itself, in order.

    series: the steps of the series; a patch that is the same there is left there.
    """
    changes = with_patch()
    in_series = {step.change.name: step for step in series}
    made: dict[str, Alone] = {}
    for name, change in changes.items():
        if not can_be_taken(name):
            continue
        names = closure(name, changes)
        before = []
        for length, needed in enumerate(names[:-1], 1):
            if closure(needed, changes) == names[:length]:
                before.append(made[needed].step)
            elif [s.change.name for s in series[:length]] == names[:length]:
                before.append(in_series[needed])
            else:
                raise PatchProblem(
                    f"{name} alone: no patch leads to {needed} behind what it does not "
                    "require; leave the change to the series (SERIES_ONLY)"
                )
        step = build_step(change, *_tree_with(before, stock))
        step.on = tuple(s.filename for s in before)
        note_borrowed(step, [*before, step])
        if patch_text(step) == patch_text(in_series[name]):
            step = in_series[name]
        else:
            step.folder = "alone/"
            note_borrowed(step, [*before, step])
        made[name] = Alone(step, before)
    return list(made.values())


def _tree_with(steps: list[Step], stock: Path) -> tuple[Tree, dict[str, str]]:
    """Return the tree with these steps, and the core files in it by upstream path."""
    tree, moved = Tree(stock), {}
    for step in steps:
        for path, text in step.after.items():
            tree.write(path, text)
        for path in step.removed:
            tree.write(path, None)
        moved |= step.core
    return tree, moved


def with_patch() -> dict[str, Change]:
    """Return the changes that have a patch by name, in order."""
    return {change.name: change for change in load_changes() if change.has_patch}


def can_be_taken(name: str) -> bool:
    """Whether a change has a patch for a tree with what it requires and nothing else."""
    return not set(closure(name, with_patch())) & set(SERIES_ONLY)


def closure(name: str, changes: dict[str, Change]) -> list[str]:
    """Return a change and all that it requires, at any distance, in the order of the changes."""
    found = {name}
    while more := {n for f in found for n in changes[f].requires} - found:
        found |= more
    return [n for n in changes if n in found]


def alone_files(patches: list[Alone]) -> dict[str, str]:
    """Return the files of the folder ``alone`` by name."""
    return {a.step.filename: patch_text(a.step) for a in patches if a.step.folder}


def needed_patches(patch: Path) -> list[str]:
    """Return the patch files that a patch applies behind, as its header names them."""
    head = patch.read_text(encoding="utf-8").split("\n---\n")[0]
    found = re.search(r"^Applies-to: (.*(?:\n .*)*)", head, re.MULTILINE)
    return re.findall(r"\S+\.patch", found[1]) if found else []
