"""Replay against a server whose counts are planted: rows, the history that goes back, and the re-read arithmetic."""

from __future__ import annotations

import json

import pytest

from mlx_vlm_cacheplus.replay import cli, client, demo
from mlx_vlm_cacheplus.replay.rows import ESTIMATE, REPORT, TOKENIZER, total
from mlx_vlm_cacheplus.replay.session import Session, Turn, dump
from mlx_vlm_cacheplus.replay.tokens import NewCounter
from mlx_vlm_cacheplus.replay.wire import ServerFault

from .replay_server import FakeServer, WordTokenizer

CALL = {
    "id": "call_7",
    "type": "function",
    "function": {"name": "look", "arguments": '{"key": "birch"}'},
}


def user(text):
    return Turn([{"role": "user", "content": text}])


def session(*turns, **options):
    return Session("planted", list(turns), system="be brief", **options)


def play(server, played, counter=None, **options):
    return client.run(played, client.Options(server.base, **options), counter)


THREE = session(
    user("one two three"),
    user("four five"),
    Turn([{"role": "tool", "name": "look", "content": "oak elm"}]),
)
# Words: "<system> be brief </system> <user> one two three </user> <assistant>" are 10, the reply "red green </assistant>"
# is 3, and "<user> four five </user> <assistant>" are 5 more.
REPLIES = [
    {"content": "red green"},
    {"reasoning_content": "hm", "content": "blue", "tool_calls": [CALL]},
    {"content": "done"},
]


def script(number):
    return REPLIES[number % 3]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
@pytest.mark.parametrize(
    "keeps, prefilled", [("prompts", [10, 8, 11]), ("replies", [10, 5, 5])]
)
def test_rows_hold_the_planted_counts(api, stream, keeps, prefilled):
    with FakeServer(script, keeps) as server:
        rows = play(
            server, THREE, NewCounter(WordTokenizer()), api=api, stream=stream
        ).rows
    assert [row.prompt for row in rows] == [10, 18, 29]
    assert [row.prefilled for row in rows] == prefilled
    assert [row.generated for row in rows] == [3, 6, 2]
    if (
        api == "chat"
    ):  # in the others a call's arguments may be written anew, and the ids differ
        assert [row.new for row in rows] == [10, 5, 5]
        assert {row.new_from for row in rows} == {TOKENIZER}
        assert total(rows).ratio == pytest.approx(sum(prefilled) / 20)
    assert all((row.ttft is not None) == stream for row in rows)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_the_models_own_replies_go_back_word_for_word(api, stream):
    with FakeServer(script) as server:
        play(server, THREE, api=api, stream=stream)
    last = server.asked[-1]
    assert [message["role"] for message in last] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
    ]
    assert last[2]["content"] == "red green"
    assert last[4]["content"] == "blue" and last[4]["reasoning_content"] == "hm"
    function = last[4]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == (
        "look",
        {"key": "birch"},
    )
    assert last[5]["content"] == "oak elm"


def test_reasoning_stays_out_of_the_history_when_the_session_says_so():
    with FakeServer(script) as server:
        play(server, session(*THREE.turns, echo_reasoning=False))
    assert "reasoning_content" not in server.asked[-1][4]


def test_without_a_tokenizer_new_is_an_estimate():
    with FakeServer(script) as server:
        rows = play(server, THREE).rows
    assert [row.new for row in rows] == [10, 18 - (10 + 3), 29 - (18 + 6)]
    assert {row.new_from for row in rows} == {ESTIMATE}


def test_a_reply_that_was_cut_off_has_no_end_token_yet():
    def cut(number):
        return {"content": "red green", "finish": "length"}

    with FakeServer(cut, "replies") as server:
        rows = play(
            server, session(user("one"), user("two")), NewCounter(WordTokenizer())
        ).rows
    assert (
        rows[1].new == rows[1].prefilled == 5
    )  # </assistant> <user> two </user> <assistant>
    assert rows[1].new_from == TOKENIZER


def test_a_reply_that_comes_back_otherwise_is_marked():
    """The server counts more tokens than the history shows: its template drops some."""

    class Server(FakeServer):
        def answer(self, history):
            return {**super().answer(history), "generated": 9}

    with Server(script) as server:
        rows = play(
            server, session(user("one"), user("two")), NewCounter(WordTokenizer())
        ).rows
    assert rows[1].new_from == ESTIMATE and "not sent back" in rows[1].note


def test_a_tokenizer_that_counts_otherwise_is_reported():
    class Server(FakeServer):
        def answer(self, history):
            answer = super().answer(history)
            return {**answer, "prompt": answer["prompt"] + 1}

    with Server(script) as server:
        rows = play(server, session(user("one")), NewCounter(WordTokenizer())).rows
    assert (
        rows[0].new_from == ESTIMATE
        and rows[0].note == "tokenizer gives 8 tokens, the server 9"
    )


def test_the_servers_own_record_wins():
    records = [
        {"prompt": 18, "generated": 6, "new": 4},
        {"prompt": 10, "generated": 3, "new": 9},
    ]
    with FakeServer(script, report=records) as server:
        rows = play(server, THREE).rows
    assert [(row.new, row.new_from) for row in rows] == [
        (9, REPORT),
        (4, REPORT),
        (5, ESTIMATE),
    ]


@pytest.mark.parametrize("share", [False, True])
def test_sessions_differ_by_a_marker_unless_they_share(share):
    with FakeServer(lambda number: {"content": "red"}) as server:
        result = play(
            server, session(user("one")), sessions=3, stagger=0.01, share=share
        )
    systems = {history[0]["content"] for history in server.asked}
    assert len(systems) == (1 if share else 3)
    assert sorted(row.session for row in result.rows) == [1, 2, 3]


def test_the_marker_goes_into_the_first_user_text_without_a_system_text():
    with FakeServer(script) as server:
        play(server, Session("bare", [user("one"), user("two")]), marker="second run")
    assert [m["content"] for m in server.asked[-1] if m["role"] == "user"] == [
        "[second run]\none",
        "two",
    ]


def test_forced_sends_the_recorded_reply_back():
    turns = [Turn(user("one").add, expected={"content": "recorded"}), user("two")]
    with FakeServer(script) as server:
        play(server, session(*turns), forced=True)
    assert server.asked[-1][2]["content"] == "recorded"


def test_limits_and_settings_reach_the_server():
    with FakeServer(script) as server:
        play(server, session(user("one"), max_tokens=33))
        play(server, session(Turn(user("one").add, max_tokens=44)), model="m")
        play(server, session(Turn(user("one").add, max_tokens=44)), max_tokens=55)
    assert [body["max_tokens"] for body in server.bodies] == [33, 44, 55]
    assert [body["model"] for body in server.bodies] == ["words", "m", "words"]
    assert all(
        body["temperature"] == 0 and body["stream_options"] == {"include_usage": True}
        for body in server.bodies
    )


@pytest.mark.parametrize(
    "reply, text",
    [
        ({"status": 400, "detail": "too long"}, "HTTP 400.*too long"),
        ({"broken": "out of memory"}, "error in the stream.*out of memory"),
        ({"content": "red", "silent": True}, "without usage"),
        ({"garbled": True}, "the answer is no reply"),
    ],
)
def test_a_fault_names_session_and_turn_and_keeps_the_rows(reply, text):
    with FakeServer(lambda number: reply if number else {"content": "red"}) as server:
        kept = client.Replayed()
        with pytest.raises(ServerFault, match=f"session 1, turn 2: .*{text}"):
            client.run(THREE, client.Options(server.base), into=kept)
    assert [row.turn for row in kept.rows] == [1]


def test_no_server_is_one_line(capsys):
    assert cli.main(["short", "--base", "http://127.0.0.1:9", "--model", "m"]) == 2
    assert capsys.readouterr().err.startswith(
        "replay: http://127.0.0.1:9: ConnectError"
    )


def test_command_prints_the_table_and_writes_the_rows(tmp_path, capsys):
    path, rows = tmp_path / "s.jsonl", tmp_path / "rows.json"
    path.write_text(dump(THREE))
    with FakeServer(script, "replies") as server:
        assert (
            cli.main(
                [
                    str(path),
                    "--base",
                    server.base,
                    "--json",
                    str(rows),
                    "--api-key",
                    "secret",
                ]
            )
            == 0
        )
    out = capsys.readouterr().out
    assert "planted on words" in out and "~ estimated" in out
    totals = next(
        line.split() for line in out.splitlines() if line.split()[:1] == ["total"]
    )
    assert totals[1:6] == ["57", "37", "20", "~20", "11"] and totals[-1] == "~1.00"
    data = json.loads(rows.read_text())
    assert [row["prefilled"] for row in data["rows"]] == [10, 5, 5]
    assert "secret" not in rows.read_text()


def test_a_server_that_was_warm_before_is_said(capsys, tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text(dump(THREE))
    with FakeServer(script, "replies") as server:
        cli.main([str(path), "--base", server.base])
        assert "warm before" not in capsys.readouterr().out
        cli.main([str(path), "--base", server.base])
    assert "warm before" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, text",
    [
        (["--sessions", "x"], "--sessions: give a whole number from 1, not 'x'"),
        (["--turns", "0"], "--turns: give a whole number from 1, not '0'"),
        (["--max-tokens", "1.5"], "--max-tokens: give a whole number from 1"),
        (["--timeout", "-1"], "--timeout: give seconds above 0, not '-1'"),
        (["--timeout", "nan"], "--timeout: give seconds above 0, not 'nan'"),
        (["--stagger", "-1"], "--stagger: give seconds from 0, not '-1'"),
        (["--stagger", "soon"], "--stagger: give seconds from 0, not 'soon'"),
        (["--json", "/nowhere/x.json"], "--json: there is no folder /nowhere: make it"),
        (["--json", "/"], "--json: / is a folder: name a file in it"),
        (["--plot", "/nowhere/x.png"], "--plot: there is no folder /nowhere"),
        (["--base", "http://127.0.0.1:99999"], "--base: give an address such as"),
        (["--base", "localhost"], "--base: give an address such as"),
    ],
)
def test_a_mistake_is_one_line_before_any_request(words, text, capsys):
    with FakeServer(script) as server:
        with pytest.raises(SystemExit) as leaving:
            cli.main(["short", "--base", server.base, *words])
        assert leaving.value.code == 2 and not server.asked
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_what_is_found_out_later_is_said_before_any_request_too(tmp_path, capsys):
    with FakeServer(script) as server:
        for words, text in (
            (["--api-key", "schl\u00fcssel"], "the API key (--api-key,"),
            (["--tokenizer", str(tmp_path)], f"--tokenizer {tmp_path}: no tokenizer"),
            (["--import", "log"], "leave out 'short'"),
            (["-o", str(tmp_path / "x")], "-o is where --import writes"),
        ):
            assert cli.main(["short", "--base", server.base, *words]) == 2
            error = capsys.readouterr().err
            assert error.startswith("replay: ") and error.count("\n") == 1
            assert text in error
        assert not server.asked


@pytest.mark.parametrize(
    "words",
    [["--rounds", "0"], ["--turns", "x"], ["--slack", "-1"], ["--json", "/nowhere/x"]],
)
def test_a_mistake_for_the_demo_is_one_line(words, capsys):
    with pytest.raises(SystemExit) as leaving:
        demo.main(words)
    error = capsys.readouterr().err
    assert leaving.value.code == 2 and error.count("\n") == 1 and words[0] in error
