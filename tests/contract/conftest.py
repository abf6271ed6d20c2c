"""Fixtures of the contract tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from .stock import Stock


@pytest.fixture
def stock(tmp_path: Path) -> Stock:
    return Stock(tmp_path / "stock")
