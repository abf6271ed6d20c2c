"""Reading what the user said, without a process: names, numbers, and no traceback for any text."""

from __future__ import annotations

import argparse
import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_vlm_cacheplus import settings
from mlx_vlm_cacheplus.change import Change, Option
from mlx_vlm_cacheplus.settings import UsageError, read_selection

VARIABLE = "MLX_VLM_CACHEPLUS"


def change(name: str, *requires: str) -> Change:
    made = Change()
    made.name, made.requires = name, requires
    return made


@pytest.mark.parametrize("text", ["0", "off", "No", "FALSE"])
def test_off(text):
    assert not read_selection(["--cacheplus=a"], {VARIABLE: text}, ["b"]).on


@pytest.mark.parametrize("text", ["1", "on", "Yes", "TRUE", "all"])
def test_all(text):
    assert read_selection([], {VARIABLE: text}).names is None


def test_names_are_kept_in_order_and_once():
    assert read_selection(["--cacheplus=b, a,b,"], {}).names == ("b", "a")
    assert read_selection(["--cacheplus", "b", "--port", "1"], {}).names == ("b",)
    assert read_selection(["--cacheplus", "--port", "1"], {}).names is None
    assert read_selection(["--cacheplus=a", "--cacheplus=b"], {}).names == ("b",)
    assert read_selection([], {VARIABLE: " "}) == settings.Selection(False)


def test_some_are_left_out_with_what_requires_them():
    changes = [change("a"), change("b", "a"), change("c", "b"), change("d")]
    for text in ("-a", "-b,-d", " -d , -c "):
        chosen = read_selection([f"--cacheplus={text}"], {})
        assert chosen.on and chosen.names is None
        assert read_selection([], {VARIABLE: chosen.as_env}).left_out == chosen.left_out
        left = {name.strip(" -") for name in text.split(",")}
        left |= {"a": {"b", "c"}, "b": {"c"}}.get(min(left), set())
        kept = settings.choose_changes(chosen, changes)
        assert {one.name for one in kept} == set("abcd") - left
    with pytest.raises(UsageError, match="takes some changes and leaves out others"):
        read_selection(["--cacheplus=a,-b"], {})
    with pytest.raises(UsageError, match="unknown name 'x'"):
        settings.choose_changes(read_selection(["--cacheplus=-x"], {}), changes)


def test_code_wins_over_flag_and_variable():
    assert read_selection(["--cacheplus=a"], {VARIABLE: "c"}, ["b"]).names == ("b",)
    assert read_selection([], {}, "b").names == ("b",)


@given(st.text(max_size=40))
def test_every_text_is_a_selection_or_one_line(text):
    try:
        chosen = read_selection([f"--cacheplus={text}"], {})
        if chosen.on:
            settings.choose_changes(chosen, [change("fast")])
    except UsageError as problem:
        assert len(str(problem).splitlines()) == 1 and str(problem).isprintable()


def refusal(environ: dict[str, str]) -> str | None:
    """What is said against these settings of the prefix cache; None where they will do."""
    try:
        settings.check_prefix_cache(environ, "--cacheplus")
    except UsageError as problem:
        return str(problem)
    return None


# Any text at all is a number once in a blue moon.
@given(st.text(max_size=20) | st.integers().map(str) | st.floats().map(str))
def test_every_text_is_a_setting_or_an_error(text):
    for name in (
        *settings.APC_INTEGERS,
        *settings.APC_NUMBERS_OR_EMPTY,
        "APC_ENABLED",
        "APC_DISK_ENABLED",
    ):
        problem = refusal({name: text})
        if problem is not None:
            assert name in problem
        elif name in settings.APC_INTEGERS:
            assert int(text) >= settings.APC_INTEGERS[name]
        elif name in settings.APC_NUMBERS_OR_EMPTY:
            assert text == "" or float(text) >= 0
        else:
            assert text.lower() in settings.STOCK_TRUE | settings.STOCK_FALSE


def test_what_stock_takes_is_taken(monkeypatch):
    taken = {
        "APC_ENABLED": "TRUE",
        "APC_DISK_ENABLED": "no",
        "APC_BLOCK_SIZE": " 32 ",
        "APC_CHECKPOINT_ENTRIES": "0",
        "APC_DISK_MAX_GB": "",
        "APC_MEMORY_MAX_GB": "1.5",
        "APC_DISK_PATH": "",
        "APC_DISK_SYNC": "reply",
        "APC_SOMETHING_NEW": "x",
    }
    assert refusal(taken) is None
    assert "APC_DISK_SYNC" in str(refusal({**taken, "APC_DISK_SYNC": "always"}))
    assert "APC_BLOCK_SIZE" in str(refusal({**taken, "APC_BLOCK_SIZE": "32.5"}))
    for name, text in taken.items():
        monkeypatch.setenv(name, text)
    config = importlib.import_module("mlx_vlm.server.runtime_config")
    read = config.RuntimeConfig.from_env()
    assert (read.apc_enabled, read.apc_disk_enabled) == (True, False)
    assert (read.apc_block_size, read.apc_checkpoint_entries) == (32, 0)
    assert (read.apc_disk_max_gb, read.apc_memory_max_gb) == (None, 1.5)
    assert read.apc_disk_path == ""


def test_requirements_come_along_in_the_order_of_the_changes():
    changes = [change("a"), change("b", "a"), change("c", "b", "gone"), change("d")]
    chosen = settings.choose_changes(settings.Selection(True, ("d", "c")), changes)
    assert [c.name for c in chosen] == ["a", "b", "c", "d"]
    assert settings.choose_changes(settings.Selection(True), changes) == changes


def test_unknown_name_with_nothing_known():
    with pytest.raises(UsageError, match="known: none"):
        settings.choose_changes(settings.Selection(True, ("a",), "--cacheplus=a"), [])


def test_defaults_do_not_touch_what_is_set():
    made = change("a")
    made.env_defaults = {"APC_CHECKPOINT_ENTRIES": "8"}
    assert settings.prefix_cache_defaults([made]) == {
        "APC_ENABLED": "1",
        "APC_CHECKPOINT_ENTRIES": "8",
    }


def test_options_move_into_their_variables():
    option = Option(
        "--cacheplus-depth", "MLX_VLM_CACHEPLUS_DEPTH", "How deep.", check=int
    )
    environ = {"MLX_VLM_CACHEPLUS_DEPTH": "1"}
    assert settings.read_options([], [option], environ) == {"MLX_VLM_CACHEPLUS_DEPTH"}
    settings.read_options(["--cacheplus-depth=2", "--other"], [option], environ)
    assert environ["MLX_VLM_CACHEPLUS_DEPTH"] == "2"
    assert settings.read_options([], [option], {}) == set()
    with pytest.raises(UsageError, match="--cacheplus-depth='x'"):
        settings.read_options(["--cacheplus-depth", "x"], [option], {})


def test_percent_signs_in_help_texts_do_not_break_the_parser():
    parser = argparse.ArgumentParser()
    settings.add_options(
        parser, [Option("--cacheplus-x", "MLX_VLM_CACHEPLUS_X", "10 % more.")]
    )
    assert "10 % more." in parser.format_help()


def test_prefix_cache_line():
    class Config:
        apc_enabled = True
        apc_block_size, apc_num_blocks, apc_checkpoint_entries = 16, 2048, 2
        apc_memory_max_gb, apc_disk_max_gb, apc_disk_enabled = 1.5, 0.0, True
        apc_disk_path = "/x"

    assert settings.describe_prefix_cache(Config()) == (
        "prefix cache: on, 2048 blocks of 16 tokens, 2 whole states, memory 1.5 GB, disk /x, no limit"
    )
    Config.apc_enabled = False
    assert settings.describe_prefix_cache(Config()) == "prefix cache: off"


def test_the_line_of_a_tree_names_no_blocks_and_says_that_the_disk_is_off():
    class Config:
        apc_enabled, apc_memory_max_gb, apc_disk_enabled = True, 1.5, True

    line = settings.describe_prefix_cache(Config(), tree=True)
    assert "tree of segments, memory 1.5 GB, disk off" in line
    assert "blocks of" not in line
    line = settings.describe_prefix_cache(Config(), True, "/there, 20 GB")
    assert line.endswith("memory 1.5 GB, disk /there, 20 GB")


@pytest.mark.parametrize(
    ("value", "before", "after"),
    [
        ("off", None, "0"),
        ("OFF", None, "0"),
        ("off", "1", "1"),
        ("/somewhere", None, None),
    ],
)
def test_off_holds_for_the_disk_tier_of_stock_too(value, before, after):
    """Where durable-disk is left out or cannot be applied, stock would write in its place."""
    from mlx_vlm_cacheplus.changes.durable_disk import CHANGE

    environ = {} if before is None else {"APC_DISK_ENABLED": before}
    settings.read_options(["--cacheplus-disk", value], CHANGE.options, environ)
    assert environ.get("APC_DISK_ENABLED") == after
