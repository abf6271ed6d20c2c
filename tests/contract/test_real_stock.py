"""The same on the real stock: a served model, a reload worker, a drifted copy, and the way back."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from mlx_vlm_cacheplus.changes import ORDER, load_changes
from mlx_vlm_cacheplus.fingerprint import StockTree

from .stock import clean_environment, run_python

MODEL = Path(__file__).resolve().parents[1] / "fakes" / "models" / "dense"
START_LIMIT = 90


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def get(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())


def wait_until_healthy(process: subprocess.Popen, base: str, log: Path) -> dict:
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(urllib.error.URLError, OSError):
            return get(f"{base}/health")
        time.sleep(0.1)
    raise AssertionError(f"no server within {START_LIMIT} s: {log.read_text()}")


@contextlib.contextmanager
def serving(tmp_path: Path, *words: str, **environ: str):
    """A stock server on the loopback, with its own cache folder; yields its address and its log."""
    port = free_port()
    log = tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "mlx_vlm.server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    environ = clean_environment(MLX_VLM_CACHE_HOME=str(tmp_path / "cache"), **environ)
    with log.open("w") as stream:
        # A group of its own: a reload parent is stopped together with its worker.
        process = subprocess.Popen(
            [*command, *words],
            env=environ,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            cwd=tmp_path,
        )
    try:
        wait_until_healthy(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}", log
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def is_patched(name: str) -> bool:
    tree = StockTree.installed()
    return next(change for change in load_changes() if change.name == name).probe(tree)


@pytest.mark.skipif(not MODEL.is_dir(), reason="the bundled models are not there")
def test_flag_serves_a_model_with_the_prefix_cache_on(tmp_path):
    with serving(tmp_path, "--cacheplus", "--model", str(MODEL)) as (base, log):
        lines = log.read_text().splitlines()
        for name in ORDER:
            state = "already_upstream" if is_patched(name) else "applied"
            assert any(
                x.startswith(f"mlx-vlm-cacheplus: {name}: {state}") for x in lines
            ), lines
        assert any(x.startswith("mlx-vlm-cacheplus: prefix cache: on") for x in lines)
        first_ours = next(i for i, x in enumerate(lines) if "mlx-vlm-cacheplus" in x)
        loading = next(i for i, x in enumerate(lines) if "Loading model" in x)
        assert first_ours < loading
        body = {
            "model": str(MODEL),
            "max_tokens": 4,
            "messages": [{"role": "user", "content": "dump the list, please " * 20}],
        }
        request = urllib.request.Request(
            f"{base}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        cached = []
        for _ in range(2):
            with urllib.request.urlopen(request, timeout=60) as answer:
                usage = json.loads(answer.read())["usage"]
            cached.append(
                (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            )
        assert cached[0] == 0 and cached[1] > 0


def test_reload_worker_inherits_the_flag(tmp_path):
    with serving(tmp_path, "--cacheplus=row-positions", "--reload") as (_, log):
        text = log.read_text()
        assert "mlx-vlm-cacheplus: row-positions: " in text
        assert "mlx-vlm-cacheplus: output-tokens: off" in text
        worker = text[text.index("Started reloader process") :]
        assert "mlx-vlm-cacheplus: row-positions: " in worker


def test_variable_reaches_an_application_server(tmp_path):
    """Without stock's own main(): `uvicorn mlx_vlm.server:app` and its like."""
    code = "import mlx_vlm.server as s; print(s.runtime.config.apc_enabled, callable(s.app))"
    result = run_python("-c", code, MLX_VLM_CACHEPLUS="1")
    assert result.stdout == "True True\n", result.stderr
    assert f"mlx-vlm-cacheplus: {ORDER[0]}: " in result.stderr


def test_activate_in_a_process_that_the_variable_has_armed():
    """The check of a change imports the server; that import must not apply in between."""
    code = (
        "from mlx_vlm_cacheplus import _startup, activate, activation; _startup.main()\n"
        "assert activation._process.armed is ARMED; activate()\n"
        "owners = [p.owner for p in activation._process.patcher._patches]\n"
        "print([o for o in owners if o != activation.FLAG_OWNER])"
    )
    plain = run_python("-c", code.replace("ARMED", "False"))
    armed = run_python("-c", code.replace("ARMED", "True"), MLX_VLM_CACHEPLUS="1")
    assert armed.stdout and armed.stdout == plain.stdout, armed.stderr + plain.stderr


def test_revert_gives_every_target_back():
    """Identity of each target's raw object before, while and after; applied twice, reverted twice."""
    code = """
import importlib, sys
from mlx_vlm_cacheplus import activate, activation, deactivate
from mlx_vlm_cacheplus.changes import load_changes
from mlx_vlm_cacheplus.patching import raw_value, resolve_holder
targets = {t for change in load_changes() for t in change.targets}
def raws():
    return {t: raw_value(*resolve_holder(t.module, t.qualname)) for t in targets}
before = raws()
for _ in range(2):
    report = activate(); activate()
    activation._process.patcher.check_invariants()
    held = raws()
    changed = {t for t in targets if held[t] is not before[t]}
    patched = set(activation._process.patcher.targets())
    assert changed <= patched and {p for p in patched if p.qualname != "app"} <= changed, changed ^ patched
    assert all(f.state.is_good for f in report.findings), report.lines()
    assert set(deactivate()) == set(report.applied) and deactivate() == ()
    after = raws()
    assert all(after[t] is before[t] for t in targets)
print("good")
"""
    result = run_python("-c", code)
    assert result.stdout == "good\n", result.stderr


def test_edited_stock_starts_as_stock_and_says_which_symbol(tmp_path):
    installed = StockTree.installed().folder
    copy = tmp_path / "mlx_vlm"
    shutil.copytree(installed, copy, ignore=shutil.ignore_patterns("tests"))
    target = next(t for t in load_changes()[0].targets if t.must_exist)
    path = StockTree(copy).path(target.module)
    text = path.read_text()
    source = StockTree(copy).source(target)
    assert source in text
    path.write_text(text.replace(source, source + "  # edited by hand", 1))
    result = run_python(
        "-c", "import mlx_vlm.server", PYTHONPATH=str(tmp_path), MLX_VLM_CACHEPLUS="1"
    )
    assert result.returncode == 0, result.stderr
    line = next(x for x in result.stderr.splitlines() if f" {ORDER[0]}: " in x)
    if "already_upstream" not in line:
        assert "drifted" in line and f"{target.qualname} in mlx_vlm/" in line
        assert "fingerprint refresh" in line
    named = run_python(
        "-c",
        "import mlx_vlm.server",
        PYTHONPATH=str(tmp_path),
        MLX_VLM_CACHEPLUS=ORDER[0],
    )
    assert named.returncode == (0 if "already_upstream" in line else 2)


def test_functions_that_are_targets_are_bound_under_one_name():
    """A module that imported one by value would go on calling the stock's. `app` is changed within, not replaced.
    The round loops of speculative decoding import their walks, and what clamps and commits a round, by name: each loop's own
    name is a target, and where a walk is defined or handed on nobody on the server calls it. The cache of pictures has salts of its own.
    The name `asyncio` is a target in the modules whose handlers wait for replies, and in no other.
    Embeddings and reranking hold `get_chat_template` of their own: what they render is no conversation, and none is cached.
    """
    code = """
import sys
import mlx_vlm.server, mlx_vlm.server.cli
from mlx_vlm_cacheplus.changes import load_changes
from mlx_vlm_cacheplus.patching import ABSENT, raw_value, resolve_holder
targets = {t for change in load_changes() for t in change.targets if "." not in t.qualname}
handed_on = {"mlx_vlm.speculative." + name for name in ("common", "cache_state", "utils", "mtp", "eagle3", "dflash")} | {"mlx_vlm.server"}
for target in targets:
    raw = raw_value(*resolve_holder(target.module, target.qualname))
    for name, module in list(sys.modules.items()):
        if raw is ABSENT or target.qualname in ("app", "asyncio") or name == target.module or not name.startswith("mlx_vlm."):
            continue
        rounds = "_walk" in target.qualname or target.qualname in ("run_speculative_server_rounds", "speculative_stats_since", "_mtp_verify_target",
            "_requires_uniform_batch_acceptance", "commit_speculative_round")
        if rounds and name in handed_on:
            continue
        if target.qualname == "semantic_extra_hash" and name == "mlx_vlm.vision_cache":
            continue
        if target.qualname == "get_chat_template" and name.rpartition(".")[2] in ("embeddings", "reranking"):
            continue
        if any(value is raw for value in list(vars(module).values())):
            print(target, "is also held by", name)
"""
    result = run_python("-c", code)
    assert result.returncode == 0 and result.stdout == "", (
        result.stdout,
        result.stderr,
    )
