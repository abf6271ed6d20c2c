"""Sessions from request logs."""

from __future__ import annotations

import json

import pytest

from mlx_vlm_cacheplus.replay import cli
from mlx_vlm_cacheplus.replay.importer import import_log
from mlx_vlm_cacheplus.replay.session import SessionError, parse

SYSTEM = {"role": "system", "content": "be brief"}
ASK = {"role": "user", "content": "list it"}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "ls", "arguments": '{"path": "."}'},
}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [CALL],
    "reasoning_content": "hm",
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "a\nb"}
SAID = {"role": "assistant", "content": "two files"}
MORE = {"role": "user", "content": "thanks"}
TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]

BODIES = [
    {"messages": [SYSTEM, ASK], "tools": TOOLS, "max_tokens": 90},
    {"messages": [SYSTEM, ASK, CALLED, RESULT], "tools": TOOLS},
    {"messages": [SYSTEM, ASK, CALLED, RESULT, SAID, MORE], "tools": TOOLS},
]


def lines(*records):
    return "\n".join(json.dumps(record) for record in records)


def test_a_growing_conversation_becomes_turns():
    played = import_log(lines(*BODIES)).session
    assert (played.system, played.tools, played.max_tokens) == ("be brief", TOOLS, 90)
    assert [turn.add for turn in played.turns] == [
        [ASK],
        [{"role": "tool", "name": "ls", "content": "a\nb"}],
        [MORE],
    ]
    assert played.turns[0].expected == {
        "content": "",
        "reasoning": "hm",
        "tool_calls": [{"name": "ls", "arguments": {"path": "."}}],
    }
    assert [turn.expected for turn in played.turns[1:]] == [
        {"content": "two files"},
        None,
    ]


def test_the_logged_response_is_the_last_recorded_reply():
    response = {"choices": [{"message": {"role": "assistant", "content": "bye"}}]}
    log = lines(*({"request": body, "response": response} for body in BODIES))
    assert import_log(log).session.turns[-1].expected == {"content": "bye"}


def test_parts_and_strings_are_the_same_text():
    parts = [{"type": "text", "text": "list it"}]
    again = {"messages": [SYSTEM, {"role": "user", "content": parts}, CALLED, RESULT]}
    imported = import_log(lines(BODIES[0], again))
    assert len(imported.session.turns) == 2 and imported.skipped == []


def test_other_conversations_are_left_out_and_named():
    title = {"messages": [{"role": "user", "content": "a title for this, please"}]}
    imported = import_log(lines(BODIES[0], title, BODIES[1], BODIES[2]), where="log")
    assert len(imported.session.turns) == 3
    assert imported.skipped == [
        "log: line 2 does not continue the conversation; left out"
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no requests"),
        ("{}", 'line 1 has no list "messages"'),
        (lines(BODIES[0]) + "\n\nnonsense", "line 3 is not JSON"),
        (lines({"messages": [{"content": "x"}]}), "line 1: a message without a role"),
        (lines({"messages": [SYSTEM]}), "line 1 adds no user or tool message"),
    ],
)
def test_a_wrong_line_is_named(text, message):
    with pytest.raises(SessionError, match="log.jsonl: ") as error:
        import_log(text, where="log.jsonl")
    assert message in str(error.value)


def test_command_writes_a_session(tmp_path, capsys):
    log, out = tmp_path / "log.jsonl", tmp_path / "session.jsonl"
    log.write_text(lines(*BODIES))
    assert cli.main(["--import", str(log), "-o", str(out)]) == 0
    assert "3 turns" in capsys.readouterr().out
    assert parse(out.read_text()).name == "log"
    assert cli.main(["--import", str(log)]) == 0
    assert capsys.readouterr().out == out.read_text()


def test_a_missing_log_is_one_line(tmp_path, capsys):
    assert cli.main(["--import", str(tmp_path / "no.jsonl")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        '{"messages":[{"role":"user","content":"a"}],"max_tokens":"many"}',
        '{"messages":[{"role":"user","content":"a"}],"max_tokens":-1}',
        '{"messages":[{"role":"user","content":"a"}],"max_tokens":1e400}',
        '{"messages":[{"role":"user","content":"a"}],"tools":"no"}',
        '{"messages":[{"role":"assistant","content":"a","tool_calls":"x"}]}',
        '{"messages":[{"role":"user","content":"\\ud800"}]}',
        '{"messages":' + "[" * 20000 + "]" * 20000 + "}",
    ],
    ids=["words", "negative", "infinite", "tools", "calls", "surrogate", "deep"],
)
def test_whatever_is_wrong_with_a_line_its_number_is_told(line):
    good = '{"messages":[{"role":"user","content":"a"}]}'
    with pytest.raises(SessionError, match="line 2"):
        import_log(f"{good}\n{line}\n")


def test_line_separators_of_unicode_are_text(tmp_path):
    log = tmp_path / "log.jsonl"
    content = "a\u2028b\u2029c\u0085d"
    body = {"messages": [{"role": "user", "content": content}]}
    log.write_text("\ufeff" + json.dumps(body, ensure_ascii=False) + "\n", "utf-8")
    session = import_log(log.read_text("utf-8")).session
    assert session.turns[0].add[0]["content"] == content
    out = tmp_path / "session.jsonl"
    assert cli.main(["--import", str(log), "-o", str(out)]) == 0
    assert parse(out.read_text("utf-8")).turns[0].add[0]["content"] == content
