"""A stand-in for the stock package: the same module names and the same way of starting, without mlx.

The doors, the checks and the patcher see only names, files and the order of imports, so that a process with this tree in
front of the path starts in a tenth of a second. A few tests of each kind run on the real stock as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from mlx_vlm_cacheplus.change import Target
from mlx_vlm_cacheplus.fingerprint import StockTree

AR = "mlx_vlm.generate.ar"
FILES = {
    "version.py": '__version__ = "{version}"\n',
    "__init__.py": "from .version import __version__\nfrom .generate import generate\n",
    "generate/__init__.py": '''
from .ar import GenerationBatch


def generate():
    """As an attribute of the package it hides the sub-package, as on the real stock."""
''',
    "generate/ar.py": """
import functools


def logged(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


class Base:
    def inherited(self):
        return "stock"


class GenerationBatch(Base):
    limit = 3

    def filter(self, keep):
        return ["stock", keep]

    @staticmethod
    def pack(value):
        return ["stock", value]

    @classmethod
    def make(cls, value):
        return [cls.__name__, "stock", value]

    @property
    def size(self):
        return 1

    @logged
    def step(self):
        return "stock"


def run():
    return "stock"
""",
    "server/__init__.py": """
from ..generate import generate
from ..generate.ar import GenerationBatch
from . import app as _app_module


def __getattr__(name):
    return getattr(_app_module, name)
""",
    "server/__main__.py": 'from . import main\n\nif __name__ == "__main__":\n    main()\n',
    "__main__.py": """
import importlib
import sys

if __name__ == "__main__":
    importlib.import_module(f"mlx_vlm.{sys.argv.pop(1)}").main()
""",
    "server/app.py": """
from .runtime import runtime


def main():
    from .cli import main as cli_main

    cli_main()
""",
    "server/runtime_config.py": """
import os


class RuntimeConfig:
    def __init__(self):
        self.apc_enabled = os.environ.get("APC_ENABLED", "0").lower() in ("1", "true", "yes")
        self.apc_block_size = int(os.environ.get("APC_BLOCK_SIZE", "16"))
        self.apc_num_blocks = int(os.environ.get("APC_NUM_BLOCKS", "2048"))
        self.apc_checkpoint_entries = int(os.environ.get("APC_CHECKPOINT_ENTRIES", "2"))
        self.apc_memory_max_gb = None
        self.apc_disk_enabled = os.environ.get("APC_DISK_ENABLED", "1") == "1"
        self.apc_disk_path = None
        self.apc_disk_max_gb = None
""",
    "server/runtime.py": """
from .runtime_config import RuntimeConfig


class Runtime:
    response_generator = None
    model_cache = {}
    config = RuntimeConfig()


runtime = Runtime()
""",
    "server/cli.py": """
import argparse
import json
import os
import subprocess
import sys

from ..generate.ar import GenerationBatch
from .runtime import runtime

CHILD = (
    "import mlx_vlm.server, json; "
    "print(json.dumps(mlx_vlm.server.GenerationBatch().filter(1)))"
)


def main():
    parser = argparse.ArgumentParser(description="stand-in")
    parser.add_argument("--model")
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    state = {
        "model": args.model,
        "filter": GenerationBatch().filter(1),
        "apc": runtime.config.apc_enabled,
        "env": {k: v for k, v in os.environ.items() if k.startswith(("MLX_VLM_", "APC_"))},
    }
    if args.child:
        state["child"] = json.loads(subprocess.check_output([sys.executable, "-c", CHILD]))
    print("LOADED " + json.dumps(state))
""",
}

# Registered through sitecustomize, which runs after the .pth files and before any program: the doors find the changes
# as they would find those of an installed plugin. Our own changes are taken out: they know the real stock only.
SITE = """
import json
import os
import mlx_vlm_cacheplus.changes
from mlx_vlm_cacheplus import hookspecs, plugins
from mlx_vlm_cacheplus.change import Change, Option, Target

AR = "mlx_vlm.generate.ar"
HASHES = json.loads(open(os.path.join(os.path.dirname(__file__), "hashes.json")).read())
mlx_vlm_cacheplus.changes.ORDER = ()


def check_number(text):
    if not text.isdigit():
        raise ValueError("expected a whole number")


class Fast(Change):
    name = "fast"
    targets = (Target(AR, "GenerationBatch.filter"),)
    fingerprints = HASHES
    options = (Option("--cacheplus-depth", "MLX_VLM_CACHEPLUS_DEPTH", "How deep.", check=check_number),)

    def apply(self, patcher):
        def wrapper(wrapped, instance, args, kwargs):
            return ["fast", *wrapped(*args, **kwargs)]

        patcher.wrap(AR, "GenerationBatch.filter", wrapper)


class Second(Change):
    name = "second"
    requires = ("fast",)
    targets = (Target(AR, "GenerationBatch.pack"), Target(AR, "GenerationBatch.extra", must_exist=False))
    fingerprints = HASHES

    def apply(self, patcher):
        patcher.set(AR, "GenerationBatch.extra", 1)
        if os.environ.get("TEST_RAISE"):
            raise RuntimeError("planted")
        patcher.replace_method(AR, "GenerationBatch.pack", lambda original: lambda value: ["second", *original(value)])


class Promise(Change):
    name = "promise"
    guarantee = True
    targets = (Target(AR, "run"),)
    fingerprints = HASHES
    options = (Option("--cacheplus-isolate", "MLX_VLM_CACHEPLUS_ISOLATE", "Keep tenants apart."),)

    def apply(self, patcher):
        patcher.replace_method(AR, "run", lambda original: lambda: "promise")


CHANGES = [Fast(), Second(), Promise()]


class Plugin:
    @hookspecs.hookimpl
    def cacheplus_register_changes(self):
        return CHANGES


plugins.manager().register(Plugin(), name="test changes")
"""
HASHED = (
    "GenerationBatch.filter",
    "GenerationBatch.pack",
    "GenerationBatch.extra",
    "run",
)


class Stock:
    """A stand-in tree in a folder, and ways to run programs with it in front of the path."""

    def __init__(self, folder: Path, version: str = "0.7.10") -> None:
        self.folder = folder
        for name, text in FILES.items():
            path = folder / "mlx_vlm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("{version}", version).lstrip("\n"))
        (folder / "mlx_vlm.server").write_text(
            "import sys\nfrom mlx_vlm.server import main\n"
            "if __name__ == '__main__':\n    sys.exit(main())\n"
        )
        hashes = {str(t): self.tree.hash(t) for t in (Target(AR, q) for q in HASHED)}
        (folder / "hashes.json").write_text(json.dumps({"0.7.10": hashes}))
        (folder / "sitecustomize.py").write_text(SITE)

    @property
    def tree(self) -> StockTree:
        return StockTree(self.folder / "mlx_vlm")

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.folder / "mlx_vlm" / name
        text = path.read_text()
        assert old in text, f"{old!r} is not in {name}"
        path.write_text(text.replace(old, new))

    def python(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return run_python(*words, PYTHONPATH=str(self.folder), **environ)

    def script(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """The console script of the stock server."""
        return self.python(str(self.folder / "mlx_vlm.server"), *words, **environ)

    def code(self, text: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.python("-c", text, **environ)


def clean_environment(**environ: str) -> dict[str, str]:
    """This process's environment without anything that speaks to us or to the prefix cache."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MLX_VLM_", "APC_", "PYTHON"))
    }
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", **environ}


def run_python(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env=clean_environment(**environ),
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def loaded_state(result: subprocess.CompletedProcess[str]) -> dict:
    """What the stand-in server said when it came to load its model."""
    assert result.returncode == 0, result.stderr
    line = next(x for x in result.stdout.splitlines() if x.startswith("LOADED "))
    return json.loads(line.removeprefix("LOADED "))


def error_line(result: subprocess.CompletedProcess[str]) -> str:
    """The one line of a refused start: exit code 2, no model, nothing else said."""
    assert result.returncode == 2, (result.returncode, result.stderr)
    assert "LOADED" not in result.stdout
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("mlx-vlm-cacheplus: error: ")
    return lines[0]
