"""From changes and edits to the patch series.

A patch is what its change adds to the tree as the patch before it left it: the core
files and a test file of its own, byte for byte (import lines aside), and the call-site edits.
Generation is deterministic: no times, no hashes of git, three lines of context.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from mlx_vlm_cacheplus.change import Change
from mlx_vlm_cacheplus.changes import load_changes
from tools.patch_tree import (
    PatchProblem,
    Tree,
    apply_edit,
    as_upstream,
    code_without_imports,
    formatted,
    imported_names,
)

ROOT = Path(__file__).resolve().parent.parent
VERSION = "0.7.10"
FOLDER = ROOT / "patches" / VERSION
TESTS = "patches/tests"
UPSTREAM_TESTS = "mlx_vlm/tests"
CONTEXT = 3


@dataclass
class Step:
    """One change's patch: the files it touches, before and after."""

    change: Change
    before: dict[str, str | None] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    core: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    # Files that its test imports and an earlier patch brings: that patch.
    borrowed: dict[str, str] = field(default_factory=dict)
    # Where the patch is for another tree than the series': its folder, and the patches
    # that are in that tree.
    folder: str = ""
    on: tuple[str, ...] = ()

    @property
    def filename(self) -> str:
        """The patch file's name, below patches/<version>/."""
        return f"{self.folder}{self.change.name}.patch"


def edits_of(change: Change) -> ModuleType:
    """Return the data module of a change's edits."""
    name = f"tools.patch_edits.{change.name.replace('-', '_')}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name != name:
            raise
        raise PatchProblem(
            f"{change.name} has no edits: write {name.replace('.', '/')}.py, "
            "or set has_patch = False where the plugin alone needs it"
        ) from problem


def build_series(stock: Path) -> list[Step]:
    """Return the steps of all changes that have a patch, in order."""
    tree = Tree(stock)
    moved: dict[str, str] = {}
    steps = []
    for change in load_changes():
        if change.has_patch:
            steps.append(build_step(change, tree, moved))
            note_borrowed(steps[-1], steps)
    return steps


def note_borrowed(step: Step, steps: list[Step]) -> None:
    """Note which of ``steps``, the last of which is ``step``, bring what its test imports."""
    step.borrowed = {}
    for file in with_fixtures(test_of(step.change)):
        path = f"{UPSTREAM_TESTS}/{file}"
        bringer = next(s for s in steps if path in s.after)
        if bringer is not step:
            step.borrowed[path] = bringer.filename


def build_step(change: Change, tree: Tree, moved: dict[str, str]) -> Step:
    """Apply a change to a tree; return what that did.

    moved: the core files of the changes before, by upstream path; its own are added.
    """
    data = edits_of(change)
    old = tree.copy()
    step = Step(change, core=dict(data.CORE))
    moved.update(data.CORE)
    for source, target in data.CORE.items():
        if tree.read(target) is not None:
            raise PatchProblem(f"{change.name}: {target} exists already in this stock")
        text = (ROOT / source).read_text(encoding="utf-8")
        made = as_upstream(text, source, target, moved)
        if code_without_imports(made) != code_without_imports(text):
            raise PatchProblem(
                f"{source}: more than its imports would change; format it with black"
            )
        tree.write(target, made)
    for edit in data.EDITS:
        apply_edit(tree, edit, change.name)
    for path in {edit.path for edit in data.EDITS}:
        _tidy(tree, old, path)
    _add_test(change, tree)
    for path, text in tree.files.items():
        if text == old.read(path):
            continue
        step.before[path] = old.read(path)
        if text is None:
            step.removed.append(path)
        else:
            step.after[path] = text
    return step


def _tidy(tree: Tree, old: Tree, path: str) -> None:
    """Sort and wrap what the edits inserted, where the file was tidy before them."""
    before, after = old.read(path), tree.read(path)
    if before is not None and after is not None and formatted(before) == before:
        tree.write(path, formatted(after))


def _add_test(change: Change, tree: Tree) -> None:
    name = test_of(change)
    if not (ROOT / TESTS / name).is_file():
        raise PatchProblem(
            f"{change.name} brings no test: write {TESTS}/{name}, with tiny random "
            "models built in the test"
        )
    for file in with_fixtures(name):
        text = (ROOT / TESTS / file).read_text(encoding="utf-8")
        tree.write(f"{UPSTREAM_TESTS}/{file}", formatted(text))


def test_of(change: Change) -> str:
    """Return the name of the test file that goes upstream with a change."""
    return f"test_{change.name.replace('-', '_')}.py"


def with_fixtures(name: str) -> list[str]:
    """Return a file of ``patches/tests`` and all those there that it imports, at any distance."""
    found = [name]
    for file in found:
        source = ROOT / TESTS / file
        if not source.is_file():
            raise PatchProblem(f"{name} imports {TESTS}/{file}, which is not there")
        for module in imported_names(source.read_text(encoding="utf-8")):
            folder, _, stem = module.replace(".", "/").rpartition("/")
            if folder == UPSTREAM_TESTS and f"{stem}.py" not in found:
                found.append(f"{stem}.py")
    return found


# -- text ------------------------------------------------------------------------


def patch_text(step: Step) -> str:
    """Return the text of a patch file."""
    parts = [header(step), "---\n"]
    for path in sorted([*step.after, *step.removed]):
        parts.extend(_diff(path, step.before[path], step.after.get(path)))
    return "".join(parts)


def header(step: Step) -> str:
    """Return DEP-3-like fields from the change's own data."""
    change = step.change
    borrowed = [f"{path} of {patch}" for path, patch in sorted(step.borrowed.items())]
    fields = [
        ("Subject", change.summary),
        ("Description", change.why),
        ("Origin", f"mlx-vlm-cacheplus, change {change.name}"),
        ("Forwarded", change.upstream),
        ("Applies-to", f"mlx-vlm {VERSION}" + _behind(step.on)),
        ("Requires", ", ".join(_required(step))),
        ("Test-requires", ", ".join(borrowed)),
        ("Remove-when", change.remove_when),
    ]
    return "".join(
        textwrap.fill(
            f"{name}: {' '.join(value.split())}",
            width=88,
            subsequent_indent=" ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        + "\n"
        for name, value in fields
        if value
    )


def _behind(patches: tuple[str, ...]) -> str:
    return f" with {', '.join(patches)}" if patches else ""


def _required(step: Step) -> list[str]:
    """Return the patch files of what a change requires; of those in its tree, where it has one."""
    there = {Path(name).stem: name for name in step.on}
    names = (*step.change.requires, *step.change.patch_requires)
    return [there.get(name, f"{name}.patch") for name in names]


def _diff(path: str, old: str | None, new: str | None) -> Iterator[str]:
    if any(text is not None and not text.endswith("\n") for text in (old, new)):
        raise PatchProblem(f"{path} does not end with a newline")
    yield f"diff --git a/{path} b/{path}\n"
    if old is None:
        yield "new file mode 100644\n"
    if new is None:
        yield "deleted file mode 100644\n"
    yield "--- /dev/null\n" if old is None else f"--- a/{path}\n"
    yield "+++ /dev/null\n" if new is None else f"+++ b/{path}\n"
    before = [] if old is None else old.splitlines(keepends=True)
    after = [] if new is None else new.splitlines(keepends=True)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    matcher.opcodes = _slid(matcher.get_opcodes(), before, after)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        yield from _hunk(group, before, after)


def _slid(opcodes: list, before: list[str], after: list[str]) -> list[tuple]:
    """Move insertions down while that is the same text: a block then ends with its own end."""
    out: list[tuple] = []
    moved = 0
    for k, (tag, i1, i2, j1, j2) in enumerate(opcodes):
        i1, j1, moved = i1 + moved, j1 + moved, 0
        if tag == "insert" and k + 1 < len(opcodes):
            room = opcodes[k + 1][2] - i2 - 1
            while moved < room and after[j1 + moved] == before[i1 + moved]:
                moved += 1
            if moved and out:  # the block above it, which is "equal", grows
                _, a1, a2, b1, b2 = out[-1]
                out[-1] = ("equal", a1, a2 + moved, b1, b2 + moved)
            elif moved:
                out.append(("equal", i1, i1 + moved, j1, j1 + moved))
            i1, i2, j1, j2 = (n + moved for n in (i1, i2, j1, j2))
        out.append((tag, i1, i2, j1, j2))
    return out


def _hunk(group: list, before: list[str], after: list[str]) -> Iterator[str]:
    first, last = group[0], group[-1]
    yield f"@@ -{_range(first[1], last[2])} +{_range(first[3], last[4])} @@\n"
    for tag, i1, i2, j1, j2 in group:
        if tag == "equal":
            yield from (" " + line for line in before[i1:i2])
            continue
        yield from ("-" + line for line in before[i1:i2])
        yield from ("+" + line for line in after[j1:j2])


def _range(start: int, stop: int) -> str:
    length = stop - start
    begin = start + 1 if length else start
    return str(begin) if length == 1 else f"{begin},{length}"


def series_text(steps: list[Step]) -> str:
    """Return the series file: the patches in the order in which they apply."""
    return "".join(f"{step.filename}\n" for step in steps)


def upstream_text(steps: list[Step], stock: Path) -> str:
    """Return the UPSTREAM file: what the series applies to, and the files it edits."""
    touched = sorted(
        {p for s in steps for p, old in s.before.items() if old is not None}
    )
    lines = [
        f"mlx-vlm {VERSION}",
        "",
        "Files of the published wheel that the series edits, by SHA-256:",
    ]
    for path in touched:
        place = stock / Path(path).relative_to("mlx_vlm")
        if place.is_file():
            digest = hashlib.sha256(place.read_bytes()).hexdigest()
            lines.append(f"{digest}  {path}")
    return "\n".join(lines) + "\n"


def generated_files(steps: list[Step], stock: Path) -> dict[str, str]:
    """Return every file of patches/<version>/ by name."""
    files = {step.filename: patch_text(step) for step in steps}
    files["series"] = series_text(steps)
    files["UPSTREAM"] = upstream_text(steps, stock)
    return files
