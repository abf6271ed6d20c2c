"""The worked example of docs/TREE.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

from mlx_vlm_cacheplus.core import eviction

PAGE = Path(__file__).parents[2] / "docs" / "TREE.md"
NUMBERS = {4: "four", 8: "eight"}


def test_the_worked_example_runs():
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    names: dict = {}
    for block in blocks:
        line = text[: text.index(block)].count("\n")
        exec(compile("\n" * line + block, str(PAGE), "exec"), names)
    names["cache"].check_invariants()


def test_the_page_names_files_that_exist_and_numbers_that_hold():
    text = PAGE.read_text(encoding="utf-8")
    root = PAGE.parents[1]
    for name in re.findall(r"`(core/\w+\.py)`", text):
        assert (root / "mlx_vlm_cacheplus" / name).is_file(), name
    for name in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert (root / name).is_file(), name
    assert f"keeps {NUMBERS[eviction.STATES_PER_PATH]} end" in text
    assert f"newest {NUMBERS[eviction.NEWEST]}" in text
