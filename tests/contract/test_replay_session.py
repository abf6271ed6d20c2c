"""Session files, the history a client builds from them, and the two sessions that come with the package."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mlx_vlm_cacheplus.replay import session as sessions
from mlx_vlm_cacheplus.replay.history import UNANSWERED, History, Reply, recorded_reply
from mlx_vlm_cacheplus.replay.session import Session, SessionError, Turn, dump, parse

ROOT = Path(__file__).resolve().parents[2]
HEADER = '{"session": 1, "name": "x"}'
TURN = '{"turn": 1, "add": [{"role": "user", "content": "hello"}]}'


def call(number, name="read"):
    function = {"name": name, "arguments": "{}"}
    return {"id": f"id{number}", "type": "function", "function": function}


def result(text, name="read"):
    return {"role": "tool", "name": name, "content": text}


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "empty"),
        (HEADER, "no turns"),
        ("{\n", "line 1 is not JSON"),
        (f"{HEADER}\n\n[1]", "line 3 is not a JSON object"),
        (TURN, 'line 1: the first line must be a header with "session": 1'),
        ('{"session": 2}\n' + TURN, "line 1: the first line must be a header"),
        (HEADER + '\n{"turn": 1}', 'line 2: "add" must list'),
        (HEADER + '\n{"add": [{"role": "system", "content": ""}]}', "line 2: an added"),
        (HEADER + '\n{"add": [{"role": "user"}]}', "line 2: an added message"),
        (f'{HEADER}\n{TURN[:-1]}, "brnch": 1}}', "line 2: unknown key 'brnch'"),
        ('{"session": 1, "defaults": []}\n{}', "line 2"),
        ('{"session": 1, "defaults": [1]}', "is not an object"),
        ('{"session": 1, "defaults": {"max_tokens": "9"}}', "must be 1 or more"),
        (f'{HEADER}\n{TURN[:-1]}, "max_tokens": 0}}', 'line 2: "max_tokens"'),
        (f'{HEADER}\n{TURN[:-1]}, "expected": "x"}}', 'line 2: "expected"'),
        ('{"session": 1, "defaults": {"top_p": 1}}\n' + TURN, "unknown key 'top_p'"),
    ],
)
def test_a_wrong_line_is_named(text, message):
    with pytest.raises(SessionError, match="file.jsonl: ") as error:
        parse(text, "file.jsonl")
    assert message in str(error.value)


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(SessionError, match="s.jsonl: not UTF-8"):
        sessions.load(path)


def test_an_unknown_name_lists_the_bundled_ones(tmp_path):
    with pytest.raises(SessionError, match="bundled: coding-agent-18, short"):
        sessions.load(tmp_path / "nothing.jsonl")


@pytest.mark.parametrize("name", ["coding-agent-18", "short"])
def test_dump_and_parse_are_inverse(name):
    played = sessions.load(name)
    assert parse(dump(played)) == played


def test_a_result_goes_to_the_call_at_its_place():
    history = History(Session("x", []))
    history.add_reply(Reply("", tool_calls=[call(1), call(2, "run")]))
    history.add_turn(Turn([result("first"), result("second", "other")]))
    answers = [
        (m["tool_call_id"], m["name"], m["content"]) for m in history.messages[1:]
    ]
    assert answers == [("id1", "read", "first"), ("id2", "run", "second")]


def test_a_result_without_a_call_is_said_by_the_user():
    history = History(Session("x", []))
    history.add_reply(Reply("I call nothing"))
    history.add_turn(Turn([result("first"), {"role": "user", "content": "go on"}]))
    said = [(m["role"], m["content"]) for m in history.messages[1:]]
    assert said == [("user", "Result of read:\nfirst"), ("user", "go on")]


def test_a_call_without_a_result_is_answered():
    history = History(Session("x", []))
    history.add_reply(Reply("", tool_calls=[call(1), call(2)]))
    history.add_turn(Turn([result("first"), {"role": "user", "content": "go on"}]))
    said = [(m["role"], m["content"]) for m in history.messages[1:]]
    assert said == [("tool", "first"), ("tool", UNANSWERED), ("user", "go on")]


def recorded(name):
    """The run as it was recorded: each prompt's characters and words, and what was written."""
    played = sessions.load(name)
    history, prompts = History(played), []
    tools = json.dumps(played.tools, ensure_ascii=False)
    for number, turn in enumerate(played.turns, 1):
        history.add_turn(turn)
        prompts.append(tools + json.dumps(history.messages, ensure_ascii=False))
        history.add_reply(recorded_reply(turn, number))
    written = [recorded_reply(turn, 1).text() for turn in played.turns]
    return played, prompts, written


# docs/REPLAY.md states tokens of a real tokenizer, which is not at hand here. Characters are: they fix the text that was
# counted, so an edit that moves the figures fails here and asks for a new count (tools/count_session.py).
@pytest.mark.parametrize(
    "name, turns, prompts, last, written",
    [
        ("coding-agent-18", 18, 378954, 40895, 11454),
        ("short", 7, 18882, 4284, 1443),
    ],
)
def test_bundled_session_is_the_one_that_was_counted(
    name, turns, prompts, last, written
):
    played, texts, replies = recorded(name)
    assert len(played.turns) == turns
    assert sum(map(len, texts)) == prompts
    assert len(texts[-1]) == last
    assert sum(map(len, replies)) == written


def figures(name):
    """The row of docs/REPLAY.md: turns, prompt tokens in all, tokens at the end, tokens written."""
    text = (ROOT / "docs" / "REPLAY.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| `{name}`"))
    return [int(cell.replace(",", "")) for cell in row.split("|")[2:6]]


def test_the_coding_session_has_the_size_it_was_written_for():
    turns, prompts, end, written = figures("coding-agent-18")
    assert turns == 18
    assert prompts == pytest.approx(96_500, rel=0.03)
    assert end == pytest.approx(10_500, rel=0.03)
    assert written == pytest.approx(3_000, rel=0.03)


def test_the_short_session_counts_as_documented():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import count_session
    finally:
        sys.path.pop(0)
    count = count_session.model_counter(ROOT / "tests" / "fakes" / "models" / "hybrid")
    rows = count_session.table(sessions.load("short"), count)
    end = sum(rows[-1])
    totals = [sum(prompt for prompt, _ in rows), end, sum(wrote for _, wrote in rows)]
    assert [len(rows), *totals] == figures("short")


def test_each_recorded_result_has_its_recorded_call():
    for name in sessions.bundled():
        calls: list[str] = []
        for turn in sessions.load(name).turns:
            results = [m["name"] for m in turn.add if m["role"] == "tool"]
            assert results == calls
            calls = [c["name"] for c in (turn.expected or {}).get("tool_calls", [])]
        assert calls == []


def test_the_coding_session_uses_the_tools_it_lists():
    played = sessions.load("coding-agent-18")
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in played.tools}
    used = [c for t in played.turns for c in t.expected.get("tool_calls", [])]
    assert {c["name"] for c in used} == set(schemas)
    for each in used:
        schema = schemas[each["name"]]
        assert (
            set(schema["required"])
            <= set(each["arguments"])
            <= set(schema["properties"])
        )
