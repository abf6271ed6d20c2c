"""Checks on a written patch series, each returning sentences about what is wrong."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tools.patch_series import CONTEXT, Step
from tools.patch_tree import formatted

HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@$")
SECONDS = 60


def lint(folder: Path, steps: list[Step], stock: Path) -> list[str]:
    """Return everything that is wrong with the series in ``folder``."""
    problems = check_series(folder)
    if problems:
        return problems
    for step in steps:
        problems += check_step(folder, step)
    return problems + check_applies(folder, steps, stock)


def lint_alone(folder: Path, ways: list[list[Step]], stock: Path) -> list[str]:
    """Return what is wrong with the last patch of each of these ways that start from the stock."""
    problems = []
    for steps in ways:
        problems += check_step(folder, steps[-1]) if steps[-1].folder else []
        problems += check_applies(folder, steps, stock)
    return problems


def check_step(folder: Path, step: Step) -> list[str]:
    """A patch's text, and the style of the files that it leaves."""
    text = (folder / step.filename).read_text(encoding="utf-8")
    problems = check_text(step.filename, text)
    for path, after in step.after.items():
        problems += check_style(f"{step.filename}: {path}", after)
    return problems


def read_series(folder: Path) -> list[str]:
    """Return the patch files that the series names, in order."""
    return (folder / "series").read_text(encoding="utf-8").split()


def check_series(folder: Path) -> list[str]:
    """Each patch of the series exists once, and there is no other."""
    if not (folder / "series").is_file():
        return [f"{folder} has no series file: run `make patches`"]
    named = read_series(folder)
    present = {path.name for path in folder.glob("*.patch")}
    problems = [
        f"{name} is in the series twice" for name in named if named.count(name) > 1
    ]
    problems += [
        f"{n} is in the series and not there" for n in named if n not in present
    ]
    problems += [f"{n} is not in the series" for n in sorted(present - set(named))]
    return problems


def check_text(name: str, text: str) -> list[str]:
    """Header fields, three lines of context, right counts, no trailing blanks in added lines."""
    problems = []
    for wanted in ("Subject", "Description", "Origin", "Applies-to"):
        if not re.search(rf"^{wanted}: \S", text, re.MULTILINE):
            problems.append(f"{name}: no {wanted} field")
    hunk: list[str] = []
    for number, line in enumerate([*text.splitlines(), "diff "], 1):
        if line.startswith("+") and line != line.rstrip():
            problems.append(f"{name}:{number}: trailing blanks in an added line")
        if line.startswith(("@@ ", "diff ")):
            problems += [f"{name}:{number}: {p}" for p in check_hunk(hunk)]
            hunk = [line] if line.startswith("@@ ") else []
        elif hunk:
            hunk.append(line)
    return problems


def check_hunk(lines: list[str]) -> list[str]:
    """The counts of a hunk are its lines, and its context is not shorter than it must be."""
    if not lines:
        return []
    found = HUNK.match(lines[0])
    if found is None:
        return [f"not a hunk header: {lines[0]}"]
    body = lines[1:]
    old = sum(line[:1] in " -" for line in body)
    new = sum(line[:1] in " +" for line in body)
    problems = []
    if (old, new) != (int(found[2] or 1), int(found[4] or 1)):
        problems.append("the hunk's counts are not its lines")
    lead = next((i for i, line in enumerate(body) if line[:1] in "+-"), 0)
    tail = next((i for i, line in enumerate(reversed(body)) if line[:1] in "+-"), 0)
    # Fewer lines are right only at the two ends of a file.
    starts_file = int(found[1]) <= 1
    if lead > CONTEXT or tail > CONTEXT or (lead < CONTEXT and not starts_file):
        problems.append(f"context of {lead} and {tail} lines, not {CONTEXT}")
    return problems


def check_style(where: str, text: str) -> list[str]:
    """As upstream's hooks (isort, black) leave a file."""
    if formatted(text) == text:
        return []
    return [f"{where} is not as isort and black leave it"]


def check_applies(folder: Path, steps: list[Step], stock: Path) -> list[str]:
    """In order, on the files they touch, with git and with patch, without fuzz or offset."""
    problems = []
    tools = {
        "git apply": ["git", "apply", "--whitespace=error-all", "-p1"],
        "patch": ["patch", "-p1", "--fuzz=0", "--batch", "--forward", "-i"],
    }
    for label, command in tools.items():
        if shutil.which(command[0]) is None:
            continue
        with tempfile.TemporaryDirectory() as work:
            problems += _apply_all(label, command, folder, steps, stock, Path(work))
    return problems


def _apply_all(
    label: str,
    command: list[str],
    folder: Path,
    steps: list[Step],
    stock: Path,
    work: Path,
) -> list[str]:
    for path in {p for step in steps for p, old in step.before.items() if old}:
        source = stock / Path(path).relative_to("mlx_vlm")
        if source.is_file():
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, work / path)
    for step in steps:
        done = subprocess.run(
            [*command, str((folder / step.filename).resolve())],
            cwd=work,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            env={"PATH": "/usr/bin:/bin:/usr/local/bin", "GIT_DIR": str(work / "none")},
        )
        said = (done.stdout + done.stderr).strip()
        if done.returncode or re.search(r"fuzz|offset", said):
            return [f"{step.filename} does not apply cleanly with {label}: {said}"]
        wrong = [path for path in step.removed if (work / path).exists()]
        wrong += [
            path
            for path, after in step.after.items()
            if (work / path).read_text(encoding="utf-8") != after
        ]
        if wrong:
            return [f"{step.filename} applied with {label} gives other text: {wrong}"]
    return []
