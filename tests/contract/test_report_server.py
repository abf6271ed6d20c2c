"""The reuse record and the usage figures on the real stock, with tiny models. Each server is a process of its own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_vlm_cacheplus.reports.flight import BROKEN_OFF, ONLY_PROMPT

ROOT = Path(__file__).resolve().parents[2]
ALL, ALONE = "", "reuse-record"


@functools.cache
def run(program: str, *words: str) -> Any:
    # Off at the start of the interpreter: the program activates what it wants.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MLX_VLM_")}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.contract.{program}", *words],
        cwd=ROOT,
        env={**environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def probe(names: str) -> dict[str, Any]:
    return run("report_probe", *([names] if names else []))


def cells(plain: str) -> list[dict[str, Any]]:
    return run("usage_matrix", *([plain] if plain else []))


@pytest.mark.parametrize("plain", ["--plain", ""], ids=["stock", "plus"])
class TestUsage:
    """C37, C48: stock does this right; it must stay so."""

    def test_cached_and_computed_are_the_prompt(self, plain):
        for cell in cells(plain):
            assert cell["prompt"] == cell["ids"], cell
            assert cell["cached"] + cell["forwarded"] == cell["prompt"], cell
            assert cell["forwarded"] >= 1, cell

    def test_every_hit_is_seen_on_every_wire_format(self, plain):
        found = cells(plain)
        assert {cell["cached"] > 0 for cell in found if cell["kind"] == "cold"} == {
            False
        }
        warm = [cell for cell in found if cell["kind"] in ("full", "turn", "empty")]
        assert len(warm) == 2 * 3 * 2 * 3 and all(cell["cached"] for cell in warm)

    def test_anthropic_input_tokens_exclude_cached_ones(self, plain):
        for cell in cells(plain):
            if cell["endpoint"] == "messages":
                usage = cell["usages"][0]
                assert usage["cache_read_input_tokens"] == cell["cached"]
                assert usage["input_tokens"] == cell["forwarded"]

    def test_openai_counts_include_cached_ones(self, plain):
        for cell in cells(plain):
            usage = cell["usages"][-1]
            if cell["endpoint"] == "chat":
                assert usage["prompt_tokens"] == cell["ids"]
                assert usage["prompt_tokens_details"]["cached_tokens"] == cell["cached"]
            elif cell["endpoint"] == "responses":
                assert usage["input_tokens"] == cell["ids"]
                assert usage["input_tokens_details"]["cached_tokens"] == cell["cached"]

    def test_an_exact_repeat_computes_at_least_one_token(self, plain):
        repeats = [cell for cell in cells(plain) if cell["kind"] == "repeat"]
        assert {cell["ids"] % 16 for cell in repeats} >= {15, 0, 1}
        assert all(cell["cached"] < cell["ids"] for cell in repeats)


@pytest.mark.parametrize("names", [ALL, ALONE], ids=["all changes", "record alone"])
class TestRecords:
    @pytest.mark.parametrize("model", ["hybrid", "dense", "window"])
    def test_a_record_says_what_was_really_forwarded(self, names, model):
        session = probe(names)[model]["session"]
        assert len(session["records"]) == len(session["counted"])
        for record, counted in zip(session["records"], session["counted"], strict=True):
            for name in ("prompt", "generated", "prefilled", "finish"):
                assert record[name] == counted[name], (record, counted)
            assert record["prompt"] == record["restored"] + record["prefilled"]
            assert record["endpoint"] == "/chat/completions"
            assert record["source"] == ("ram" if record["restored"] else "none")

    @pytest.mark.parametrize("model", ["hybrid", "dense", "window"])
    def test_every_end_leaves_one_record(self, names, model):
        ends = probe(names)[model]["ends"]
        record, counted = ends["cancel"]
        assert record["finish"] == "cancel"
        assert record["generated"] == counted["generated"] >= 3
        assert record["prefilled"] == counted["prefilled"]
        records, replies = ends["together"]
        by_length = sorted(r["generated"] for r in records)
        assert by_length == sorted(r["generated"] for r in replies)
        assert all(r["finish"] in ("length", "stop") for r in records)
        assert ends["error"]["finish"] == "error" and ends["error"]["error"]
        assert ends["error"]["told"].startswith("HTTP 500")

    def test_a_hit_from_disk_is_told_from_one_in_ram(self, names):
        """From our tier as from stock's."""
        cold, warm = probe(names)["disk"]["records"]
        counted = probe(names)["disk"]["counted"][1]
        assert (cold["source"], warm["source"]) == ("none", "disk")
        # The state at the end of a prompt that was answered is not kept there.
        assert 1 <= warm["prefilled"] == counted["prefilled"] <= 4

    def test_with_the_cache_off_the_record_says_so(self, names):
        first, second = probe(names)["off"]["records"]
        for record in (first, second):
            assert record["committed"] == 0
            assert record["reason"] == "the prefix cache is off"
        assert second["shortfall"]["reason"] == "the prefix cache is off"

    def test_totals_are_the_sums_and_each_record_is_logged(self, names):
        out = probe(names)
        report, lines = out["report"], out["lines"]
        rows, totals = report["records"], report["totals"]
        assert totals["requests"] == len(rows) == len(lines)
        for name in ("prompt", "restored", "prefilled", "new", "re_read", "generated"):
            assert totals[name] == sum(row[name] for row in rows)
        for row, line in zip(rows, lines, strict=True):
            assert line.startswith(f"cacheplus: request={row['id']} ")
            assert f"prefilled={row['prefilled']} new={row['new']} " in line

    def test_the_report_names_changes_and_settings(self, names):
        report = probe(names)["report"]
        states = {change["name"]: change["state"] for change in report["changes"]}
        assert states["reuse-record"] == "applied"
        assert (states["output-tokens"] == "applied") == (names == ALL)
        assert report["settings"]["apc_enabled"] is True
        merges = {"auto"} if names == ALL else set()
        assert {
            v for k, v in report["settings"].items() if k == "draft_merge"
        } == merges

    def test_the_endpoint_refuses_bad_counts_and_missing_keys(self, names):
        door = probe(names)["door"]
        assert [door[q] for q in ("0", "-1", "x", "")] == [200, 400, 400, 400]
        assert door["post"] == 405
        assert door["no key"] == door["stock, no key"] == 401 and door["key"] == 200

    def test_a_revert_takes_the_endpoint_away(self, names):
        assert probe(names)["routes"] == [True, False]


@pytest.mark.parametrize("model", ["hybrid", "dense", "window"])
def test_with_output_tokens_a_turn_reads_what_is_new(model):
    for record in probe(ALL)[model]["session"]["records"]:
        assert record["prefilled"] <= record["new"] + 1
        assert record["committed"] == record["prompt"] + record["generated"]
        assert record["reason"] is None
    assert probe(ALL)[model]["ends"]["error"]["reason"] == BROKEN_OFF


@pytest.mark.parametrize("model", ["hybrid", "dense", "window"])
def test_without_output_tokens_the_record_shows_what_stock_reads_again(model):
    records = probe(ALONE)[model]["session"]["records"]
    assert all(r["reason"] == ONLY_PROMPT for r in records)
    assert sum(r["re_read"] for r in records) > 0
    assert ONLY_PROMPT in [r["shortfall"]["reason"] for r in records if r["shortfall"]]
