"""pytest plugin: activates the changes before a test module imports a name by value."""

from __future__ import annotations

import os
from typing import Any

import mlx_vlm_cacheplus


def pytest_configure(config: Any) -> None:
    """Apply every change; one that cannot be applied ends the run.

    The defaults that the doors set with them (the prefix cache is on, with more places)
    are taken back: upstream's tests check stock's own.
    """
    before = dict(os.environ)
    report = mlx_vlm_cacheplus.activate()
    os.environ.clear()
    os.environ.update(before)
    wrong = [f.line() for f in report.findings if str(f.state) != "applied"]
    if wrong or not report.findings:
        raise RuntimeError(f"not applied: {'; '.join(wrong) or 'no change at all'}")


def pytest_report_header() -> list[str]:
    """Say what was applied."""
    return mlx_vlm_cacheplus.status().lines()
