"""Run the behaviour tests in the five legs, each in a process of its own, and say how it went.

    python tools/run_legs.py                    all five legs
    python tools/run_legs.py --legs S,M         some of them
    python tools/run_legs.py --patch-tests      also: the tests of all patches, on the whole series
    python tools/run_legs.py --each-patch       also: every patch in series order, with its own tests, then all of these
    python tools/run_legs.py --each-alone       also: every patch that can be taken alone, with its own tests
    python tools/run_legs.py --each-off         also: leg M without each change, which its tests must notice
    python tools/run_legs.py --legs "" --off NAME,NAME      those alone
    python tools/run_legs.py --legs "" --releases 0.7.6     leg M on releases that pip brings, those alone
    python tools/run_legs.py --each-release     also: leg M on each older release that the plugin knows
    python tools/run_legs.py -- -k cancel       arguments behind -- go to pytest

What a leg is stands in tests/legs.py.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mlx_vlm_cacheplus.change import SUPPORTED_VERSIONS  # noqa: E402
from tests.legs import series  # noqa: E402
from tools.make_patches import alone_patches  # noqa: E402

LEGS = ("S", "P", "M", "PM", "R")
PATCHED = ("P", "PM")
# A leg that takes longer hangs; single tests have a shorter limit, slow ones their own.
LEG_SECONDS = 3600
# Unless all is asked for, a leg runs so many tests of each file, evenly spread: fewer
# where it shows the same of every test (that it fails without its change, or that a
# patched tree takes no second change).
SAMPLES = {"S": 2, "P": 4, "M": 7, "PM": 2, "R": 2, "release": 2}
TEST_SECONDS = 120
# Slow tests run where all tests run, once on each tree.
SLOW = ("P", "M")
QUICK = ["-m", "not slow"]
COUNTS = ("passed", "failed", "xfailed", "xpassed", "errors", "deselected", "skipped")


@dataclass
class Outcome:
    """How one process ended."""

    label: str
    code: int
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    output: str = ""

    @property
    def is_good(self) -> bool:
        """Whether every expectation of the leg was met, and there were any."""
        return self.code == 0

    def row(self) -> str:
        """Return the line of the table."""
        numbers = "".join(f"{self.counts.get(name, 0):>11}" for name in COUNTS)
        verdict = "ok" if self.is_good else f"FAILED (exit {self.code})"
        return f"{self.label:<30}{numbers}{self.seconds:>9.1f} s  {verdict}"


class NoTree(Exception):
    """The patch series cannot be made, or a release not be had."""


_making = threading.Lock()


def patched_tree(trees: Path, upto: str | None = None, alone: bool = False) -> Path:
    """Return a tree with the patches up to a change, or with it alone, made at first use."""
    tree = trees / ("alone" if alone else "series") / (upto or "all")
    with _making:
        if not tree.exists():
            make_tree(tree, upto, alone)
    return tree


def make_tree(folder: Path, upto: str | None = None, alone: bool = False) -> None:
    """Write a patched tree."""
    command = [sys.executable, str(ROOT / "tools" / "make_patches.py")]
    which = "--alone" if alone else "--upto"
    command += ["--tree", str(folder), *([which, upto] if upto else [])]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        raise NoTree(done.stderr)


def release_tree(trees: Path, version: str) -> Path:
    """Return a tree with a published release of mlx-vlm, brought by pip."""
    tree = trees / "releases" / version
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(tree), f"mlx-vlm=={version}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise NoTree(done.stderr)
    (wheel,) = tree.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tree)
    return tree


def run(label: str, arguments: list[str], environment: dict[str, str]) -> Outcome:
    """Run pytest in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    env = {**os.environ, **environment}
    env.setdefault("HF_HUB_OFFLINE", "1")
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LEG_SECONDS,
            check=False,
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as problem:
        code, output = 124, str(problem.stdout or "") + f"\n{problem}"
    return Outcome(label, code, time.monotonic() - started, _counts(output), output)


def _counts(output: str) -> dict[str, int]:
    """Return the numbers of pytest's last line."""
    lines = [line for line in output.splitlines() if re.search(r" in [\d.]+s", line)]
    found = re.findall(r"(\d+) ([a-z]+)", lines[-1]) if lines else []
    counts = {name: int(number) for number, name in found}
    counts["errors"] = counts.pop("error", 0) + counts.get("errors", 0)
    return counts


def leg_environment(leg: str, tree: Path | None, upto: str | None) -> dict[str, str]:
    """Return the variables that bring a process into its leg."""
    env = {"CACHEPLUS_LEG": leg, "CACHEPLUS_UPTO": upto or ""}
    # Other switches in the caller's environment must not decide.
    env |= {"CACHEPLUS_OFF": "", "CACHEPLUS_ONLY": ""}
    env["MLX_VLM_CACHEPLUS"] = "" if leg in ("M", "PM", "R") else "0"
    paths = [str(tree)] if tree is not None else []
    env["PYTHONPATH"] = os.pathsep.join([*paths, str(ROOT)])
    return env


def run_leg(
    leg: str,
    trees: Path,
    extra: list[str],
    upto: str | None = None,
    sample: bool = False,
    slow: bool = False,
) -> Outcome:
    """Run one leg, the part of it that a shorter series has, a sample, or its slow tests."""
    tree = None
    label = leg if upto is None else f"{leg} upto {upto}"
    label += ", slow tests" if slow else ""
    if leg in PATCHED:
        try:
            tree = patched_tree(trees, upto)
        except NoTree as problem:
            return Outcome(label, 1, 0.0, {}, str(problem))
    arguments = ["-q", "-rfEX", "--timeout", str(TEST_SECONDS)]
    arguments += [*(["-m", "slow"] if slow else QUICK), *extra]
    env = leg_environment(leg, tree, upto)
    env["CACHEPLUS_SAMPLE"] = str(SAMPLES[leg]) if sample else ""
    return run(label, ["tests/behaviour", *arguments], env)


def run_on_release(
    version: str, trees: Path, extra: list[str], sample: bool
) -> Outcome:
    """Run leg M on another release than the installed one, whole or a sample."""
    label = f"M on {version}"
    try:
        tree = release_tree(trees, version)
    except NoTree as problem:
        return Outcome(label, 1, 0.0, {}, str(problem))
    env = leg_environment("M", tree, None)
    env["CACHEPLUS_SAMPLE"] = str(SAMPLES["release"]) if sample else ""
    arguments = ["-q", "-rfEX", "--timeout", str(TEST_SECONDS), *QUICK, *extra]
    return run(label, ["tests/behaviour", *arguments], env)


def run_without(name: str, extra: list[str]) -> Outcome:
    """Run all tests that name a change with everything on but that change."""
    env = leg_environment("M", None, None)
    env |= {"CACHEPLUS_OFF": name, "CACHEPLUS_ONLY": name, "CACHEPLUS_SAMPLE": ""}
    arguments = ["-q", "-rfEX", "--timeout", str(TEST_SECONDS), *QUICK, *extra]
    outcome = run(f"M without {name}", ["tests/behaviour", *arguments], env)
    if not outcome.code and not outcome.counts.get("xfailed"):
        outcome.code = 1
        outcome.output += f"\nNo test notices that {name} is not there."
    return outcome


def run_patch_tests(name: str, trees: Path, alone: bool = False) -> Outcome:
    """Run the tests that go upstream with a patch, on the tree that ends with it."""
    label = f"alone: {name}" if alone else f"its tests: {name}"
    file = f"test_{name.replace('-', '_')}.py"
    return _run_in_tree(label, trees, file, name, alone)


def run_all_patch_tests(trees: Path) -> Outcome:
    """Run the tests of all patches on the whole series: a later patch may break an earlier
    one's, and upstream runs them all with every patch."""
    return _run_in_tree("all patches' tests", trees)


def _run_in_tree(
    label: str,
    trees: Path,
    file: str = "",
    upto: str | None = None,
    alone: bool = False,
) -> Outcome:
    try:
        tree = patched_tree(trees, upto, alone)
    except NoTree as problem:
        return Outcome(label, 1, 0.0, {}, str(problem))
    env = leg_environment("P", tree, upto)
    env["PYTHONPATH"] = str(tree)
    arguments = ["-q", "--rootdir", str(tree), "--timeout", str(TEST_SECONDS)]
    return run(label, [*arguments, str(tree / "mlx_vlm" / "tests" / file)], env)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--legs", default=",".join(LEGS), help="default: %(default)s")
    add("--patch-tests", action="store_true", help="and the tests of all patches")
    add("--each-patch", action="store_true", help="and each patch by itself")
    add("--each-alone", action="store_true", help="and each patch on what it requires")
    add("--each-off", action="store_true", help="and leg M without each change")
    add("--off", default="", help="and leg M without these changes")
    add("--each-release", action="store_true", help="and leg M on each older release")
    add("--releases", default="", help="and leg M on these, which pip brings")
    add("--whole", action="store_true", help="every test in every leg")
    add("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="at once")
    return parser


def _tasks(
    options: argparse.Namespace, legs: list[str], trees: Path, extra: list[str]
) -> list[Callable[[], Outcome]]:
    """Return what the command line asks for, in the order of the table."""
    sample = not options.whole
    tasks: list[Callable[[], Outcome]] = [
        partial(run_leg, leg, trees, extra, sample=sample) for leg in legs
    ]
    if options.whole:
        slow = [leg for leg in legs if leg in SLOW]
        tasks += [partial(run_leg, leg, trees, extra, slow=True) for leg in slow]
    if options.each_patch:
        for name in series():
            tasks.append(partial(run_patch_tests, name, trees))
            tasks.append(partial(run_leg, "P", trees, extra, name))
    if options.each_patch or options.patch_tests:
        tasks.append(partial(run_all_patch_tests, trees))
    if options.each_alone:
        names = alone_patches()
        tasks += [partial(run_patch_tests, n, trees, alone=True) for n in names]
    # A change without behaviour tests fails there: pytest has nothing to run.
    off = series() if options.each_off else _names(options.off)
    tasks += [partial(run_without, name, extra) for name in off]
    older = SUPPORTED_VERSIONS[:-1]
    releases = older if options.each_release else _names(options.releases)
    tasks += [partial(run_on_release, r, trees, extra, sample) for r in releases]
    return tasks


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 0 when every leg met its expectation."""
    words = sys.argv[1:] if arguments is None else arguments
    extra: list[str] = []
    if "--" in words:
        at = words.index("--")
        words, extra = words[:at], words[at + 1 :]
    parser = _parser()
    options = parser.parse_args(words)
    legs = _names(options.legs)
    unknown = set(legs) - set(LEGS)
    if unknown:
        parser.error(f"no such leg: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as work:
        tasks = _tasks(options, legs, Path(work), extra)
        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = list(pool.map(lambda task: _told(task()), tasks))
    print(f"{'leg':<30}" + "".join(f"{name:>11}" for name in COUNTS))
    print("\n".join(outcome.row() for outcome in outcomes))
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def _told(outcome: Outcome) -> Outcome:
    if not outcome.is_good:
        print(f"--- {outcome.label}: exit {outcome.code} ---")
        print(outcome.output[-8000:])
    else:
        print(
            f"--- {outcome.label}: as it must be, {outcome.seconds:.1f} s", flush=True
        )
    return outcome


if __name__ == "__main__":
    sys.exit(main())
