"""Write patches/<version>/ from the changes, or check that it is current.

    python tools/make_patches.py                     write the series
    python tools/make_patches.py --check             fail where it is not current, then lint it
    python tools/make_patches.py --tree DIR          write a patched mlx_vlm into DIR
    python tools/make_patches.py --tree DIR --upto output-tokens
    python tools/make_patches.py --tree DIR --alone fair-queue

How a change gets its patch: add tools/patch_edits/<change>.py with

    CORE = {"mlx_vlm_cacheplus/core/row_positions.py": "mlx_vlm/generate/row_positions.py"}
    EDITS = [
        Edit(path, anchor, replacement), after(path, anchor, text, within="Class.method"),
        Delete(path, "Class.method"), Body(path, "Class.method", text), Cut(path, first, last),
    ]

and patches/tests/test_<change>.py, the test that goes upstream with it; run this. What
that test imports from mlx_vlm.tests lies beside it: the first patch that needs it brings
it, and the headers of the others say which one that is.

The folder alone/ has the patch for a tree of stock and what the change requires, where
that is another one. Where an edit's place depends on the patches before it, give both
with either(): of its edits exactly one must fit.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.patch_alone import (  # noqa: E402
    alone_files,
    build_alone,
    can_be_taken,
    needed_patches,
)
from tools.patch_lint import lint, lint_alone, read_series  # noqa: E402
from tools.patch_series import (  # noqa: E402
    FOLDER,
    VERSION,
    Step,
    build_series,
    generated_files,
)
from tools.patch_stock import require_pristine  # noqa: E402
from tools.patch_tree import PatchProblem  # noqa: E402

MARK = "CACHEPLUS_PATCHED"


def installed_stock() -> Path:
    """Return the folder of the installed mlx_vlm, found without importing it."""
    spec = importlib.util.find_spec("mlx_vlm")
    if spec is None or spec.origin is None:
        raise PatchProblem("mlx_vlm is not installed in this environment")
    return Path(spec.origin).parent


def write_series(files: dict[str, str], folder: Path) -> list[str]:
    """Make the folder hold these files and no other; return what changed."""
    folder.mkdir(parents=True, exist_ok=True)
    changed = stale_files(files, folder)
    for name in changed:
        if name in files:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(files[name], encoding="utf-8")
        else:
            (folder / name).unlink()
    return changed


def stale_files(files: dict[str, str], folder: Path) -> list[str]:
    """Return the names whose content on disk is not the generated one."""
    present = {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file()
    }
    names = sorted(set(files) | set(present))
    return [name for name in names if files.get(name) != present.get(name)]


def write_tree(steps: list[Step], stock: Path, target: Path, upto: str | None) -> Path:
    """Write a copy of the stock with the patches up to a change; return its folder."""
    names = [step.change.name for step in steps]
    if upto is not None and upto not in names:
        raise PatchProblem(f"no patch {upto}: one of {', '.join(names)}")
    chosen = names if upto is None else names[: names.index(upto) + 1]
    package = _copy_of(stock, target)
    for step in steps[: len(chosen)]:
        for path, text in step.after.items():
            place = target / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
        for path in step.removed:
            (target / path).unlink()
    (package / MARK).write_text("\n".join(chosen) + "\n", encoding="utf-8")
    return package


def apply_series(stock: Path, target: Path, upto: str | None) -> Path:
    """Write a copy of the stock with the patch files up to a change; return its folder."""
    names = [name.removesuffix(".patch") for name in read_series(FOLDER)]
    if upto is not None and upto not in names:
        raise PatchProblem(f"no patch {upto}: one of {', '.join(names)}")
    chosen = names if upto is None else names[: names.index(upto) + 1]
    return apply_files(stock, target, [f"{name}.patch" for name in chosen])


def apply_alone(stock: Path, target: Path, name: str) -> Path:
    """Write a copy of the stock with a change and what it requires; return its folder."""
    patches = alone_patches()
    if name not in patches:
        raise PatchProblem(
            f"{name} cannot be taken alone, only {', '.join(patches)} can"
        )
    needed = needed_patches(FOLDER / patches[name])
    return apply_files(stock, target, [*needed, patches[name]])


def alone_patches() -> dict[str, str]:
    """Return {change: patch file} of all that can be taken by themselves."""
    found = {}
    for file in read_series(FOLDER):
        name = file.removesuffix(".patch")
        if can_be_taken(name):
            alone = f"alone/{file}"
            found[name] = alone if (FOLDER / alone).is_file() else file
    return found


def apply_files(stock: Path, target: Path, patches: list[str]) -> Path:
    """Write a copy of the stock with these patch files; return its folder."""
    package = _copy_of(stock, target)
    for name in patches:
        command = ["git", "apply", "-p1", str((FOLDER / name).resolve())]
        # Outside a repository git takes the paths as they are.
        env = {**os.environ, "GIT_DIR": str(target / "none")}
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=target, env=env
        )
        if done.returncode:
            raise PatchProblem(f"{name} does not apply: {done.stderr.strip()}")
    chosen = [Path(name).stem for name in patches]
    (package / MARK).write_text("\n".join(chosen) + "\n", encoding="utf-8")
    return package


def _copy_of(stock: Path, target: Path) -> Path:
    package = target / "mlx_vlm"
    if package.exists():
        if not (package / MARK).is_file():
            raise PatchProblem(f"{package} exists and is none of ours: remove it")
        shutil.rmtree(package)
    shutil.copytree(stock, package, ignore=shutil.ignore_patterns("__pycache__"))
    return package


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 0 when all is well, 1 when something is to be done."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--tree", type=Path, metavar="DIR", help="write a patched tree")
    parser.add_argument("--upto", metavar="CHANGE", help="with --tree: the last patch")
    parser.add_argument("--alone", metavar="CHANGE", help="with --tree: that by itself")
    parser.add_argument("--stock", type=Path, metavar="DIR", help="an mlx_vlm folder")
    options = parser.parse_args(arguments)
    try:
        stock = options.stock or installed_stock()
        require_pristine(stock, VERSION)
        if options.tree:
            if options.alone:
                print(apply_alone(stock, options.tree, options.alone))
            else:
                print(apply_series(stock, options.tree, options.upto))
            return 0
        steps = build_series(stock)
        alone = build_alone(stock, steps)
        files = generated_files(steps, stock) | alone_files(alone)
        if options.check:
            stale = stale_files(files, FOLDER)
            problems = [f"{FOLDER.name}/{name} is not current" for name in stale]
            if stale:
                problems.append("run `make patches` and read the difference")
        else:
            changed = write_series(files, FOLDER)
            print(f"{len(files)} files, changed: {', '.join(changed) or 'none'}")
            problems = []
        problems += lint(FOLDER, steps, stock)
        problems += lint_alone(FOLDER, [a.steps for a in alone], stock)
    except PatchProblem as problem:
        problems = [str(problem)]
    for line in problems:
        print(f"error: {line}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
