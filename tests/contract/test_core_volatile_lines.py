"""What is left out in front of the system text, and how that is chosen."""

from __future__ import annotations

import pytest

from mlx_vlm_cacheplus import settings
from mlx_vlm_cacheplus.changes.volatile_lines import CHANGE, ENV
from mlx_vlm_cacheplus.core.volatile_lines import PATTERNS, without_volatile_lines

LINE = "x-anthropic-billing-header: cc_version=2.1; cch=00001;"


def conversation(text):
    return [{"role": "system", "content": text}, {"role": "user", "content": LINE}]


@pytest.mark.parametrize("setting", [None, "", "on", "1"])
def test_known_lines_go_by_default(setting):
    messages = conversation(f"{LINE}\n{LINE}\nBe brief.")
    kept = without_volatile_lines(messages, setting)
    assert kept == conversation("Be brief.")
    assert messages[0]["content"].startswith(LINE), "the caller's message is its own"


@pytest.mark.parametrize("setting", ["off", "0", "No"])
def test_off_leaves_everything(setting):
    messages = conversation(f"{LINE}\nBe brief.")
    assert without_volatile_lines(messages, setting) is messages


def test_a_conversation_without_such_lines_is_not_copied():
    messages = conversation("Be brief.")
    assert without_volatile_lines(messages) is messages
    assert without_volatile_lines([]) == []


@pytest.mark.parametrize("words", [["--cacheplus-volatile-lines", "("], []])
def test_a_bad_expression_is_an_error_at_start(words):
    environ = {} if words else {ENV: "("}
    with pytest.raises(settings.UsageError, match="regular expression"):
        settings.read_options(words, CHANGE.options, environ)


def test_patterns_are_listed_in_the_readme():
    from pathlib import Path

    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert all(pattern.split(":")[0] in text for pattern in PATTERNS)
