"""A line that differs in every request is left out of the rendered prompt."""

import copy

import pytest
from mlx_vlm.prompt_utils import get_chat_template
from mlx_vlm.volatile_lines import read_patterns, without_volatile_lines

LINE = "x-anthropic-billing-header: cc_version=2.1; cch=00001;"
USER = {"role": "user", "content": "hello"}


class Processor:
    chat_template = "any"

    def apply_chat_template(self, messages, **kwargs):
        return "|".join(f"{m['role']}:{m['content']}" for m in messages)


def system(content):
    return {"role": "system", "content": content}


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv("MLX_VLM_VOLATILE_LINES", raising=False)


def render(*messages):
    return get_chat_template(Processor(), list(messages), True)


def test_line_in_front_of_the_system_text():
    assert render(system(f"{LINE}\nBe brief."), USER) == "system:Be brief.|user:hello"


def test_system_text_of_nothing_else_is_no_message():
    assert render(system(LINE), USER) == "user:hello"


def test_switch(monkeypatch):
    monkeypatch.setenv("MLX_VLM_VOLATILE_LINES", "off")
    assert LINE in render(system(f"{LINE}\nBe brief."), USER)


@pytest.mark.parametrize(
    "first",
    [
        {"role": "user", "content": f"{LINE}\nWhat is this?"},
        system(f"Be brief.\n{LINE}"),
        system(f"About {LINE}\nBe brief."),
        "text",
    ],
)
def test_everything_else_is_kept(first):
    messages = [first, USER]
    assert without_volatile_lines(messages) is messages


@pytest.mark.parametrize("name", ["text", "content"])
def test_text_parts(name):
    messages = [
        system(
            [
                {"type": "text", name: LINE + "\nBe brief."},
                {"type": "text", name: "More."},
            ]
        ),
        USER,
    ]
    before = copy.deepcopy(messages)
    first, *rest = without_volatile_lines(messages)
    assert [part[name] for part in first["content"]] == ["Be brief.", "More."]
    assert rest == [USER] and messages == before
    messages[0]["content"][0][name] = LINE
    first, *_ = without_volatile_lines(messages)
    assert [part[name] for part in first["content"]] == ["More."]


def test_one_more_pattern():
    messages = [system(f"Request 12.\n{LINE}\nBe brief.")]
    assert without_volatile_lines(messages, r"Request \d+\.") == [system("Be brief.")]
    with pytest.raises(ValueError, match="regular expression"):
        read_patterns("(")
