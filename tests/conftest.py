"""Keeps the behaviour tests out of a plain ``pytest``: each of their legs is a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

BEHAVIOUR = Path(__file__).resolve().parent / "behaviour"


def _asked_for(config: pytest.Config) -> bool:
    """Whether a leg was chosen, or the command line names the folder or a file of it."""
    named = [Path(str(argument).split("::")[0]).resolve() for argument in config.args]
    return bool(os.environ.get("CACHEPLUS_LEG")) or any(
        path == BEHAVIOUR or BEHAVIOUR in path.parents for path in named
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/behaviour to tools/run_legs.py, unless somebody asks for it."""
    if collection_path == BEHAVIOUR and not _asked_for(config):
        return True
    return None


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say what does not run."""
    if _asked_for(config):
        return None
    return "tests/behaviour: not here; run tools/run_legs.py, or name the folder"
