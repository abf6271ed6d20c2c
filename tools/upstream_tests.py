"""Run upstream's own tests as a second opinion: on stock, and with the plugin.

    python tools/upstream_tests.py DIR                   stock, then the plugin
    python tools/upstream_tests.py DIR --runs plugin     one of stock, plugin, patched

DIR holds upstream's `tests` folder, fetched by hand; see docs/UPSTREAM_TESTS.md. Only the
tests of tests/upstream/accept_<version>.txt run: those that pass on stock. Those of
tests/upstream/replaced_by_*.txt ask for internals that a change replaces: where they fail
with that change they are counted apart, and one that passes on the patched tree is stale.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ACCEPT = ROOT / "tests" / "upstream" / "accept_0.7.10.txt"
REPLACED = sorted((ROOT / "tests" / "upstream").glob("replaced_by_*.txt"))
RUNS = ("stock", "plugin", "patched")
RUN_SECONDS = 1200
TEST_SECONDS = 60


@dataclass
class Result:
    """How one run ended; ``failed`` without the tests that a change has replaced."""

    name: str
    passed: int
    failed: list[str]
    replaced: int
    stale: list[str]
    seconds: float
    tail: str


def run_tests(folder: Path, name: str, extra: list[str]) -> Result:
    """Run the accepted tests once."""
    plugins = ["-p", "tests.upstream.driftshim"]
    paths = [str(ROOT)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "MLX_VLM_CACHEPLUS": "0"}
    with tempfile.TemporaryDirectory() as work:
        if name == "plugin":
            env["MLX_VLM_CACHEPLUS"] = ""
            plugins = ["-p", "tests.upstream.loader", *plugins]
        elif name == "patched":
            make = [sys.executable, str(ROOT / "tools" / "make_patches.py")]
            subprocess.run([*make, "--tree", work], check=True, cwd=ROOT)
            paths.insert(0, work)
        env["PYTHONPATH"] = os.pathsep.join(paths)
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short"]
        command += ["-p", "no:cacheprovider", *plugins, "--timeout", str(TEST_SECONDS)]
        command += ["--rootdir", str(folder), *extra, f"@{ACCEPT}"]
        started = time.monotonic()
        done = subprocess.run(
            command,
            cwd=folder,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=RUN_SECONDS,
            check=False,
        )
    seconds = time.monotonic() - started
    broken = re.findall(
        r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE
    )
    counted = re.search(r"(\d+) passed", done.stdout)
    passed = int(counted.group(1)) if counted else 0
    known = set() if name == "stock" else replaced_tests()
    failed = [test for test in broken if test not in known]
    stale = sorted(known - set(broken)) if name == "patched" and not extra else []
    tail = done.stdout[-6000:]
    return Result(name, passed, failed, len(broken) - len(failed), stale, seconds, tail)


def replaced_tests() -> set[str]:
    """Return the tests that ask for what a change of ours replaces."""
    lines = [s for path in REPLACED for s in path.read_text("utf-8").splitlines()]
    return {line for line in lines if line and not line.startswith("#")}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 0 when every accepted test passes in every run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--runs", default="stock,plugin", help="default: %(default)s")
    parser.add_argument("pytest", nargs="*", help="arguments behind -- go to pytest")
    options = parser.parse_args(arguments)
    names = options.runs.split(",")
    if set(names) - set(RUNS):
        parser.error(f"--runs takes {', '.join(RUNS)}")
    folder = options.folder.resolve()
    if not (folder / "tests").is_dir():
        parser.error(f"{folder} has no tests folder: see docs/UPSTREAM_TESTS.md")
    accepted = len(ACCEPT.read_text(encoding="utf-8").splitlines())
    results = [run_tests(folder, name, options.pytest) for name in names]
    for result in results:
        if result.failed or not result.passed:
            print(f"--- {result.name} ---\n{result.tail}")
            print("\n".join(result.failed))
        for test in result.stale:
            print(f"{result.name}: listed as replaced, and passes: {test}")
    print(f"{'run':<10}{'accepted':>10}{'passed':>10}{'replaced':>10}{'failed':>10}")
    for result in results:
        numbers = f"{accepted:>10}{result.passed:>10}{result.replaced:>10}"
        print(
            f"{result.name:<10}{numbers}{len(result.failed):>10}{result.seconds:>9.1f} s"
        )
    good = all(r.passed and not r.failed and not r.stale for r in results)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
