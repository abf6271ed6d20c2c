"""pytest plugin: lets test modules of an older release be collected against 0.7.10.

Upstream's newest public tests are those of 0.6.15, and some names that they import
are gone.  A missing name becomes a stub that raises ``DriftError`` when it is used,
so that only the tests that use it fail.  Two removed helpers of ``apc`` get their old
one-line bodies, since what they called still exists.
"""

from __future__ import annotations

import ast
import importlib
import sys
import types
from pathlib import Path
from typing import Any

MISSING: list[str] = []


class DriftError(RuntimeError):
    """A test used a name that the installed release no longer has."""


class Stub:
    """Stands for a name that is gone."""

    def __init__(self, name: str):
        object.__setattr__(self, "_name", name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise DriftError(f"gone since 0.6.15: {self._name}")

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise DriftError(f"gone since 0.6.15: {self._name}.{attribute}")


def stand_in_for_missing_names(path: Path) -> None:
    """Give a test module's top-level imports of mlx_vlm something to find."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        if node.module.split(".")[0] != "mlx_vlm":
            continue
        try:
            module = importlib.import_module(node.module)
        except ModuleNotFoundError:
            module = types.ModuleType(node.module)
            sys.modules[node.module] = module
            MISSING.append(f"{node.module} (module)")
        for alias in node.names:
            if not _has(module, node.module, alias.name):
                setattr(module, alias.name, Stub(f"{node.module}.{alias.name}"))
                MISSING.append(f"{node.module}.{alias.name}")


def _has(module: types.ModuleType, name: str, attribute: str) -> bool:
    if hasattr(module, attribute):
        return True
    try:
        importlib.import_module(f"{name}.{attribute}")
    except Exception:
        return False
    return True


def pytest_configure(config: Any) -> None:
    """Prepare every test module that the command line names."""
    apc = importlib.import_module("mlx_vlm.apc")
    adapters = importlib.import_module("mlx_vlm.apc_adapters")
    if not hasattr(apc, "_cache_entry_supports_block_apc"):
        apc._cache_entry_supports_block_apc = adapters.apc_block_eligible
        apc._cache_entry_supports_exact_apc = adapters.apc_exact_eligible
    for name in sorted({argument.split("::")[0] for argument in config.args}):
        if name.endswith(".py"):
            stand_in_for_missing_names(Path(name))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which names were missing."""
    terminalreporter.write_line(f"names gone: {', '.join(MISSING) or 'none'}")
