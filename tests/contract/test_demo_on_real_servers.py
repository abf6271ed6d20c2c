"""The demo as `make demo` runs it; its counts are those of docs/REPLAY.md."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from mlx_vlm_cacheplus.replay import demo
from mlx_vlm_cacheplus.replay.rows import Row, total

ROOT = Path(__file__).resolve().parents[2]


def documented(model):
    """Prompt, new, stock prefilled and again, plus prefilled and again."""
    text = (ROOT / "docs" / "REPLAY.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| {model} |"))
    return [int(cell.replace(",", "")) for cell in row.split("|")[2:8]]


def sums(rows):
    names = {field.name for field in dataclasses.fields(Row)}
    return total([Row(**{k: v for k, v in row.items() if k in names}) for row in rows])


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("model", ["hybrid", "dense"])
def test_demo_counts_what_the_documentation_says(model, tmp_path, capsys):
    raw = tmp_path / "rows.json"
    assert demo.main(["--model", model, "--json", str(raw)]) == 0
    (sides,) = json.loads(raw.read_text(encoding="utf-8"))
    stock, plus = sums(sides["stock"][0]), sums(sides["plus"][0])
    assert documented(model) == [
        plus.prompt,
        plus.new,
        stock.prefilled,
        stock.prefilled - plus.new,
        plus.prefilled,
        plus.reread,
    ]
    assert "7 of 7 replies are identical" in capsys.readouterr().out
