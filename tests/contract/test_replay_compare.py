"""Comparison and demo: what is refused, what the verdict says, and how servers are started and ended."""

from __future__ import annotations

import json
import struct
import sys

import pytest

from mlx_vlm_cacheplus.replay import compare, demo
from mlx_vlm_cacheplus.replay.compare import PLUS, STOCK, Comparison, UnequalWork
from mlx_vlm_cacheplus.replay.rows import ESTIMATE, REPORT, TOKENIZER, Row, total
from mlx_vlm_cacheplus.replay.serving import Server, StartFailed
from mlx_vlm_cacheplus.replay.widen import widened_copy

from .replay_server import FakeServer, WordTokenizer


def rows(*counts, new_from=TOKENIZER):
    """(prompt, restored, generated, new) for each turn."""
    made = []
    for number, (prompt, restored, generated, new) in enumerate(counts, 1):
        row = Row(
            1,
            number,
            prompt,
            restored,
            generated,
            new,
            new_from,
            text=f"reply {number}",
        )
        made.append(row)
    return made


STOCK_ROWS = ((10, 0, 3, 10), (18, 9, 6, 5), (29, 17, 2, 5))
PLUS_ROWS = ((10, 0, 3, 10), (18, 13, 6, 5), (29, 23, 2, 5))


def comparison(stock=STOCK_ROWS, plus=PLUS_ROWS):
    return Comparison("words", {STOCK: [rows(*stock)], PLUS: [rows(*plus)]})


def test_verdict_gives_the_figures():
    verdict = compare.judge(comparison(), slack=1)
    assert verdict.met and verdict.reasons == ()
    assert verdict.line == (
        "words: 20 of 57 prompt tokens were new. "
        "Stock prefilled 31, 11 of them again (re-read ratio 1.55), "
        "plus 21, 1 of them again (re-read ratio 1.05): stock 1.48 times as many. "
        "3 of 3 replies are identical."
    )


@pytest.mark.parametrize(
    "plus, message",
    [
        (PLUS_ROWS[:2], "stock answered 3 requests, plus 2"),
        (
            (*PLUS_ROWS[:2], (30, 23, 2, 5)),
            "turn 3: prompt tokens differ, stock 29, plus 30",
        ),
        (
            (PLUS_ROWS[0], (18, 13, 7, 5), PLUS_ROWS[2]),
            "turn 2: generated tokens differ, stock 6, plus 7",
        ),
    ],
)
def test_no_ratio_for_unequal_work(plus, message):
    with pytest.raises(UnequalWork, match=message):
        compare.prefilled_ratio(rows(*STOCK_ROWS), rows(*plus))
    verdict = compare.judge(comparison(plus=plus), slack=1)
    assert not verdict.met
    assert (
        "no comparison" in verdict.line
        and message in verdict.line
        and "times" not in verdict.line
    )


def test_a_reply_that_is_read_again_fails_the_claim():
    verdict = compare.judge(comparison(plus=(*PLUS_ROWS[:2], (29, 22, 2, 5))), slack=1)
    assert not verdict.met
    assert verdict.reasons == ("plus reads again: turn 3: 7 prefilled, 5 new",)


def test_other_replies_fail_the_claim():
    both = comparison()
    both.rows[PLUS][0][1].text = "something else"
    assert compare.judge(both, slack=1).reasons == (
        "the replies differ: session 1, turn 2",
    )


def test_no_gain_fails_the_claim():
    assert not compare.judge(comparison(plus=STOCK_ROWS), slack=99).met


def test_new_is_the_same_on_both_sides():
    stock, plus = rows(*STOCK_ROWS, new_from=ESTIMATE), rows(
        *PLUS_ROWS, new_from=REPORT
    )
    stock[1].new = 4
    compare.share_new(stock, plus)
    assert [(row.new, row.new_from) for row in stock] == [
        (10, REPORT),
        (5, REPORT),
        (5, REPORT),
    ]


def test_rounds_alternate():
    assert list(compare.order(3)) == [STOCK, PLUS, PLUS, STOCK, STOCK, PLUS]


def test_speed_is_weighted_by_tokens():
    made = rows((1, 0, 101, 1), (1, 0, 11, 1))
    made[0].decode_seconds, made[1].decode_seconds = 1.0, 1.0
    assert total(made).speed == pytest.approx(110 / 2)


def python(code):
    """A server command that runs something else."""
    return lambda self, port: [sys.executable, "-c", code, str(port)]


def test_a_server_that_dies_shows_the_end_of_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(
        Server, "command", python("print('no such weights'); raise SystemExit(3)")
    )
    with (
        pytest.raises(StartFailed, match="status 3\n.*no such weights"),
        Server("m", tmp_path),
    ):
        pytest.fail("it did not start")


def test_a_server_that_hangs_is_given_up_and_ended(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        Server,
        "command",
        python("import time; print('loading', flush=True); time.sleep(60)"),
    )
    server = Server("m", tmp_path, wait_seconds=1.0, on_wait=seen.append)
    started = []
    original = Server.stop
    monkeypatch.setattr(
        Server, "stop", lambda self: (started.append(self._process), original(self))
    )
    with pytest.raises(StartFailed, match="not ready after 1 s"), server:
        pytest.fail("it did not start")
    assert seen and started[0].poll() is not None


HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"loaded_model": "m"}')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_ended_by_its_own_id(tmp_path, monkeypatch):
    monkeypatch.setattr(Server, "command", python(HEALTHY))
    with Server("m", tmp_path) as server:
        process = server._process
        assert process.poll() is None
    assert process.poll() is not None


def test_both_sides_get_the_same_settings_but_the_flag(tmp_path, monkeypatch):
    monkeypatch.setenv("APC_MEMORY_MAX_GB", "3")
    monkeypatch.setenv("MLX_VLM_CACHEPLUS", "1")
    stock, plus = Server("m", tmp_path), Server("m", tmp_path, plus=True)
    assert plus.command(7) == [*stock.command(7), "--cacheplus"]
    left, right = stock.environment(), plus.environment()
    assert left.pop("MLX_VLM_CACHEPLUS") == "0"
    assert left == right
    assert "APC_MEMORY_MAX_GB" not in left and left["APC_DISK_PATH"].startswith(
        str(tmp_path)
    )


def test_demo_without_models_says_where_they_are(capsys):
    assert demo.main(["--model", "no-such-model"]) == 2
    assert "tests/fakes/models" in capsys.readouterr().err


def test_demo_shows_both_sides(capsys):
    assert demo.show(comparison(), 1, demo.table.console())
    out = capsys.readouterr().out
    last = next(
        line.split() for line in out.splitlines() if line.split()[:1] == ["total"]
    )
    assert last == [
        "total",
        "57",
        "20",
        "11",
        "26",
        "31",
        "1.55",
        "-",
        "36",
        "21",
        "1.05",
        "-",
    ]
    assert "3 of 3 replies are identical" in out


@pytest.mark.parametrize(
    "kept_by_plus, status, word",
    [
        ("replies", 0, "The claim is met"),
        ("prompts", 1, "THE CLAIM IS NOT MET"),
    ],
)
def test_demo_from_end_to_end(
    tmp_path, monkeypatch, capsys, kept_by_plus, status, word
):
    sides = []

    def start(model, home, plus, on_wait):
        sides.append(PLUS if plus else STOCK)
        keeps = kept_by_plus if plus else "prompts"
        return FakeServer(lambda number: {"content": f"reply {number}"}, keeps)

    monkeypatch.setattr(demo, "Server", start)
    monkeypatch.setattr(demo, "ModelTokenizer", lambda directory: WordTokenizer())
    (tmp_path / "hybrid").mkdir()
    (tmp_path / "hybrid" / "config.json").write_text("{}")
    arguments = ["--model", str(tmp_path / "hybrid"), "--turns", "3"]
    raw = tmp_path / "rows.json"
    assert demo.main([*arguments, "--rounds", "2", "--json", str(raw)]) == status
    assert sides == [STOCK, PLUS, PLUS, STOCK]
    out = capsys.readouterr().out
    assert word in out and "6 of 6 replies are identical" in out
    assert [len(json.loads(raw.read_text())[0][side]) for side in (STOCK, PLUS)] == [
        2,
        2,
    ]


def test_a_bfloat16_model_becomes_a_float32_one(tmp_path):
    source = tmp_path / "small"
    source.mkdir()
    header = {
        "__metadata__": {"format": "mlx"},
        "a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [4, 7]},
    }
    text = json.dumps(header).encode()
    body = struct.pack("<HH", 0x3FC0, 0xC000) + b"xyz"  # 1.5 and -2.0
    weights = len(text).to_bytes(8, "little") + text + body
    (source / "model.safetensors").write_bytes(weights)
    config = {"torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}, "n": 1}
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer.json").write_text("{}")

    wide = widened_copy(source, tmp_path / "wide")

    data = (wide / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % 8 == 0 and data[start + 8 :] == b"xyz"
    assert struct.unpack("<ff", data[start : start + 8]) == (1.5, -2.0)
    entries = json.loads(data[8:start])
    assert entries["a"] == {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert entries["b"]["data_offsets"] == [8, 11]
    assert json.loads((wide / "config.json").read_text()) == {
        "torch_dtype": "float32",
        "text_config": {"dtype": "float32"},
        "n": 1,
    }
    assert (wide / "tokenizer.json").read_text() == "{}"


def test_raw_rows_are_kept(tmp_path):
    path = tmp_path / "rows.json"
    compare.write(path, [comparison(), comparison()])
    data = json.loads(path.read_text())
    assert [len(part["plus"][0]) for part in data] == [3, 3]
    assert data[0]["stock"][0][1]["reread"] == 4
