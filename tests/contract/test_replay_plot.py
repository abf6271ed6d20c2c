"""The picture, and what is said when it cannot be drawn."""

from __future__ import annotations

import sys

import pytest

from mlx_vlm_cacheplus.replay import cli, plot
from mlx_vlm_cacheplus.replay.rows import Row


def test_without_matplotlib_the_extra_is_named_before_any_request(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert (
        cli.main(["short", "--plot", "turns.png", "--base", "http://127.0.0.1:9"]) == 2
    )
    assert capsys.readouterr().err == f"replay: {plot.MISSING}\n"


def test_a_kind_of_picture_that_is_none_is_said_before_any_request(capsys):
    pytest.importorskip("matplotlib")
    assert cli.main(["short", "--plot", "x.xyz", "--base", "http://127.0.0.1:9"]) == 2
    error = capsys.readouterr().err
    assert "'xyz'" in error and ".png" in error and error.count("\n") == 1


def test_a_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "turns.png"
    plot.draw([Row(1, 1, 10, 0, 3, 10), Row(1, 2, 18, 13, 6, 5)], path, "two turns")
    assert path.read_bytes().startswith(b"\x89PNG")
