"""A conversation that a server left on disk, in a file that mlx-lm reads."""

from __future__ import annotations

import json
import subprocess
import sys

import httpx
import pytest

from mlx_vlm_cacheplus import cli
from mlx_vlm_cacheplus.commands import cache_mlx_lm
from mlx_vlm_cacheplus.core.disk_store import DiskStore
from mlx_vlm_cacheplus.replay.serving import Server
from mlx_vlm_cacheplus.replay.widen import widened_copy
from tests.contract.disk_entries import put
from tests.fakes.models import model_dir

library = pytest.importorskip("mlx_lm", reason="the extra interop is not installed")

FAMILIES = {"dense": None, "hybrid": "qwen3_5", "window": "gemma3"}
SESSION = "agent-1"


def models(name, folder):
    """A float32 model for the server, and for mlx-lm, which has it under another name."""
    server = widened_copy(model_dir(name), folder / "model")
    family = FAMILIES[name]
    if family is None:
        return server, server
    other = widened_copy(model_dir(name), folder / "other")
    config = json.loads((other / "config.json").read_text())
    outer = {key: config[key] for key in ("eos_token_id", "vocab_size")}
    if "rope_global_base_freq" in config:  # what mlx-lm calls the same
        config["rope_theta"] = config["rope_global_base_freq"]
    config = {"model_type": family, "text_config": config, **outer}
    (other / "config.json").write_text(json.dumps(config))
    return server, other


def two_turns(server):
    """A conversation of two turns with a server that keeps it on disk."""
    messages = []
    for text in ("notes: " + "the quick brown fox " * 12, "get: amber3"):
        messages.append({"role": "user", "content": text})
        body = {"model": server.model, "messages": messages, "temperature": 0}
        answer = httpx.post(
            f"{server.base}/v1/chat/completions",
            json={**body, "max_tokens": 8},
            headers={"session-id": SESSION, "x-session-id": SESSION},
            timeout=60,
        )
        answer.raise_for_status()
        messages.append(answer.json()["choices"][0]["message"])


def exported(folder, file):
    found = DiskStore(folder)
    found.open()
    try:
        (session,) = {e.session for e in found.all_entries() if e.session}
    finally:
        found.close()
    words = ["cache", "export", session, str(file), "--format", "mlx-lm"]
    assert cli.main([*words, "--disk", str(folder)]) == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FAMILIES)
def test_mlx_lm_goes_on_where_the_server_stopped(name, tmp_path):
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import load_prompt_cache

    model, other = models(name, tmp_path)
    disk, file = tmp_path / "disk", tmp_path / "agent.safetensors"
    arguments = ("--log-level", "WARNING", "--cacheplus-disk", str(disk))
    with Server(str(model), tmp_path, plus=True, arguments=arguments) as server:
        two_turns(server)
    exported(disk, file)
    layers, metadata = load_prompt_cache(str(file), return_metadata=True)
    ids = json.loads(metadata["ids"])
    assert len(ids) > 64 and metadata["model"] == str(model)
    assert {getattr(c, "offset", len(ids)) for c in layers} == {len(ids)}
    loaded, tokenizer = library.load(str(other))
    more = tokenizer.encode(" fox quick")

    def greedy(prompt, prompt_cache):
        steps = generate_step(
            mx.array(prompt), loaded, max_tokens=12, prompt_cache=prompt_cache
        )
        return [int(token) for token, _ in steps]

    assert greedy(more, layers) == greedy([*ids, *more], None)
    if name == "dense":
        accepted_by_the_command(file)


def accepted_by_the_command(file):
    words = ["generate", "--prompt-cache-file", str(file), "--max-tokens", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "mlx_lm", *words, "--prompt", "get: amber3"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.fixture
def filled(tmp_path):
    store = DiskStore(tmp_path / "disk")
    store.open()
    root = store.root("weights", 0, '[["state"]]', "a model")
    put(store, root, [1, 2, 3], session="agent")
    store.close()
    return tmp_path / "disk"


def refused(capsys, filled, *words):
    status = cli.main(["cache", *map(str, words), "--disk", str(filled)])
    return status, capsys.readouterr().err


def test_what_cannot_be_such_a_file_is_refused(filled, tmp_path, capsys, monkeypatch):
    words = ("export", "agent", tmp_path / "a.tar", "--format", "mlx-lm")
    status, error = refused(capsys, filled, *words)
    assert status == 2 and ".safetensors" in error
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"kept")
    words = ("export", "agent", file, "--format", "mlx-lm")
    status, error = refused(capsys, filled, *words)
    assert status == 2 and "is there already" in error
    assert file.read_bytes() == b"kept"
    monkeypatch.setitem(sys.modules, "mlx_lm.models", None)
    status, error = refused(capsys, filled, *words)
    assert status == 2 and cache_mlx_lm.ADVICE in error
    words = ("import", file, "--format", "mlx-lm")
    status, error = refused(capsys, filled, *words)
    assert status == 2 and "which tokens" in error


def test_a_spoiled_entry_is_named(filled, tmp_path, capsys):
    (entry,) = (filled / "entries").iterdir()
    entry.write_bytes(b"x")
    for form, name in (("tar", "a.tar"), ("mlx-lm", "a.safetensors")):
        words = ("export", "agent", tmp_path / name, "--format", form)
        status, error = refused(capsys, filled, *words)
        assert status == 1 and entry.name in error
        assert not (tmp_path / name).exists()
