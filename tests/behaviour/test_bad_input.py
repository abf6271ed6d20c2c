"""Input at the edge of what a prefix cache can take: it serves, and keeps what is right."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import shutil
from pathlib import Path

import pytest

from tests.behaviour.sessions import BLOCK, assert_reads_only_new, common
from tests.behaviour.stored import stored as entries
from tests.fakes.models import model_dir
from tests.fakes.replies import RequestFailed
from tests.fakes.server import system, user

MODELS = ["dense", "hybrid", "window"]
ENDPOINTS = ["chat", "responses", "messages"]
RULES = system("You look words up.\n" + "amber = fox yak sun\n" * 8)
ASK = [RULES, user("get: amber")]
WRITTEN = " ".join(["fox yak sun"] * 12)

generation = importlib.import_module("mlx_vlm.server.generation")


def stored(manager):
    """Key lengths of everything in the cache: whole states, then blocks."""
    states = [len(key) for key, _ in entries(manager)]
    return states + [BLOCK] * len(getattr(manager, "hash_table", ()))


def next_turn(reply, text="get: amber again"):
    return [*ASK, reply.message(), user(text)]


# -- a model whose caches cannot be restored -------------------------------------------
@pytest.fixture
def unrestorable(make_server, monkeypatch):
    """A dense model whose layers have no snapshot contract that stock knows."""
    adapters = importlib.import_module("mlx_vlm.apc_adapters")
    cache = importlib.import_module("mlx_vlm.models.cache")

    class Unknown(cache.KVCache):
        """As a cache type of a third party."""

    adapters.resolve_capability(cache.KVCache())
    monkeypatch.setitem(adapters._CAPABILITY, Unknown, adapters.Capability.UNSUPPORTED)
    # Settings of its own, so that no other test gets this model.
    server = make_server("dense", apc_num_blocks=1999)
    layers = len(server.language_model.make_cache())
    monkeypatch.setattr(
        type(server.language_model),
        "make_cache",
        lambda model: [Unknown() for _ in range(layers)],
    )
    yield server
    monkeypatch.undo()
    server.host.app_module.unload_model_sync()
    server.host.current = None


@pytest.mark.guard
def test_caches_that_cannot_be_restored_are_told_once(unrestorable, caplog):
    server = unrestorable
    with caplog.at_level(logging.WARNING):
        server.reload()
        one = server.chat(ASK, script=WRITTEN, max_tokens=60)
        two = server.chat(next_turn(one), max_tokens=8)
        three = server.cancel(ASK, after=3, script=WRITTEN)
    assert [r.cached_tokens for r in (one, two)] == [0, 0]
    assert two.prefilled == len(two.prompt_ids)
    assert len(three.ids) >= 3 and stored(server.manager) == []
    told = [r.getMessage() for r in caplog.records if "APC" in r.getMessage()]
    assert len(told) == 1 and "self-check failed" in told[0]
    assert not [r for r in caplog.records if "not kept" in r.getMessage()]


# -- short prompts ---------------------------------------------------------------------
def raw_request(server, text, max_tokens=6):
    """A prompt without a chat template: (ids of the reply, tokens restored)."""
    args = generation.GenerationArguments(max_tokens=max_tokens, temperature=0.0)
    context, tokens = server.generator.generate(text, args=args)
    got = list(tokens)
    server.wait_idle()
    return [t.token for t in got], max(t.cached_tokens for t in got)


@pytest.mark.guard
@pytest.mark.parametrize("model", MODELS)
def test_prompts_of_a_few_tokens(make_server, model):
    server = make_server(model, apc_checkpoint_entries=8)
    for text in ("f", "fox", "fox yak", "fox yak sun"):
        ids = server.encode(text)
        cold = server.cold_ids(ids, 6)
        for _ in range(3):
            got, cached = raw_request(server, text)
            assert got == cold[: len(got)] and len(got) >= 1
            assert cached < len(ids)


@pytest.mark.guard
@pytest.mark.parametrize("model", MODELS)
def test_an_empty_prompt_does_not_stop_the_server(make_server, model):
    server = make_server(model)
    with contextlib.suppress(Exception):  # whether it is an error is stock's choice
        raw_request(server, "", max_tokens=2)
    reply = server.chat(ASK, max_tokens=4)
    server.assert_cold(reply)


# -- prompts over the limit ------------------------------------------------------------
@pytest.mark.guard
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_a_prompt_over_the_limit_stores_nothing(make_server, model, endpoint, stream):
    server = make_server(model, max_kv_size=128)
    ask = getattr(server, endpoint)
    with pytest.raises(RequestFailed) as failed:
        ask([user("fox yak sun " * 60)], stream=stream)
    # An error that comes in a stream has its status in the text.
    assert failed.value.status == 400 or "400: Request needs" in failed.value.text
    assert stored(server.manager) == []
    reply = ask([user("fox yak")], max_tokens=6, stream=stream)
    server.assert_cold(reply)


# -- the same again --------------------------------------------------------------------
@pytest.mark.guard
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("model", MODELS)
def test_c48_exact_repeats_compute_at_least_one_token(
    make_server, model, endpoint, stream
):
    server = make_server(model)
    ask = getattr(server, endpoint)
    first = ask(ASK, max_tokens=24, stream=stream)
    for _ in range(3):
        again = ask(ASK, max_tokens=24, stream=stream)
        assert 1 <= again.prefilled <= BLOCK
        assert again.cached_tokens == len(again.prompt_ids) - again.prefilled
        assert again.ids == first.ids


@pytest.mark.guard
@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_that_is_exactly_prompt_and_reply_computes_a_token(make_server, model):
    server = make_server(model, apc_checkpoint_entries=8)
    text = " ".join(["fox yak sun amber"] * 10)
    prompt = server.encode(text)
    free, _ = raw_request(server, text, max_tokens=40)
    # The most that the tokenizer spells as the model did.
    n = max(
        n
        for n in range(len(free) + 1)
        if server.encode(server.decode(prompt + free[:n])) == prompt + free[:n]
    )
    assert n, "no reply that can be asked for again"
    server.clear_cache()
    raw_request(server, text, max_tokens=n)
    whole = prompt + free[:n]
    for _ in range(2):
        got, cached = raw_request(server, server.decode(whole), max_tokens=6)
        assert len(prompt) - BLOCK - 1 <= cached < len(whole)
        assert got == server.cold_ids(whole, 6)[: len(got)]


# -- several models in one process -----------------------------------------------------
@pytest.mark.change("output-tokens")
@pytest.mark.parametrize("second", ["hybrid", "window"])
@pytest.mark.given_by_others("output-tokens")
def test_a_second_model_in_the_same_process(make_server, second):
    for name in ("dense", second, "dense"):
        server = make_server(name, apc_checkpoint_entries=8)
        one = server.chat(ASK, script=WRITTEN, max_tokens=60)
        assert one.cached_tokens == 0
        server.assert_cold(server.chat(next_turn(one, "x"), max_tokens=8))
        two = server.chat(next_turn(one), max_tokens=8)
        assert_reads_only_new(two, [one], name)
        server.assert_cold(two)


@pytest.mark.change("output-tokens")
@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_unload_and_load_again(make_server, model):
    server = make_server(model)
    one = server.chat(ASK, script=WRITTEN, max_tokens=60)
    assert server.post("/unload", {})["status"] == "success"
    server.host.use(server.settings)
    two = server.chat(next_turn(one), max_tokens=20)
    assert two.cached_tokens == 0
    server.assert_cold(two)
    three = server.chat([*next_turn(one), two.message(), user("on")], max_tokens=4)
    assert_reads_only_new(three, [one, two], model)
    server.assert_cold(three)


# -- identity --------------------------------------------------------------------------
def make_adapter(folder: Path, server, seed: int) -> str:
    """Write a random LoRA for the query and value projections of a text model."""
    import mlx.core as mx

    rank = 4
    model = server.generator.model
    weights, keys = {}, []
    with mx.stream(mx.cpu):
        random = mx.random.key(seed)
        for name, module in model.named_modules():
            if not name.startswith("language_model") or "vision" in name:
                continue
            if name.split(".")[-1] in ("q_proj", "v_proj"):
                out, inp = module.weight.shape
                random, a, b = mx.random.split(random, 3)
                keys.append(name)
                weights[f"{name}.lora_a"] = 0.5 * mx.random.normal((inp, rank), key=a)
                weights[f"{name}.lora_b"] = 0.5 * mx.random.normal((rank, out), key=b)
        folder.mkdir(parents=True)
        mx.eval(weights)
        mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {
        "fine_tune_type": "lora",
        "num_layers": -1,
        "lora_parameters": {"rank": rank, "dropout": 0.0, "scale": 1.0, "keys": keys},
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def disk_of(server):
    """Stock's disk tier, or None where segment trees are in its place."""
    return getattr(server.manager, "disk", None)


@pytest.mark.change("output-tokens")
@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_c26_an_adapter_of_other_identity_reuses_nothing(make_server, tmp_path, model):
    """In RAM and on disk; back at the first identity, the disk has its reply."""
    base = make_server(model)
    adapters = [
        make_adapter(tmp_path / f"adapter-{seed}", base, seed) for seed in (1, 2)
    ]
    disk = tmp_path / "disk"
    # The model's own reply could be any text: every identity is asked the same.
    turn = None
    seen = {}
    for adapter in (None, *adapters):
        server = make_server(model, disk=disk, adapter=adapter)
        one = server.chat(ASK, script=WRITTEN, max_tokens=60)
        turn = turn or next_turn(one)
        assert one.cached_tokens == 0
        seen[adapter] = server.chat(turn, max_tokens=12)
        assert_reads_only_new(seen[adapter], [one], model)
        if disk_of(server) is not None:
            disk_of(server).flush()
    assert len({tuple(reply.ids) for reply in seen.values()}) > 1
    for adapter, before in seen.items():
        server = make_server(model, disk=disk, adapter=adapter)
        again = server.chat(turn, max_tokens=12)
        if disk_of(server) is not None:
            assert again.cached_tokens > len(before.prompt_ids) - 2 * BLOCK
        assert again.ids == before.ids


@pytest.mark.guard
def test_a_copy_under_another_path_starts_cold(make_server, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(model_dir("dense"), copy)
    one = make_server("dense").chat(ASK, script=WRITTEN, max_tokens=60)
    server = make_server(str(copy))
    two = server.chat(next_turn(one), max_tokens=8)
    assert two.cached_tokens == 0
    server.assert_cold(two)


# -- quantised K/V ---------------------------------------------------------------------
@pytest.mark.guard
@pytest.mark.parametrize("model", MODELS)
def test_c28_sessions_with_quantised_kv(make_server, model):
    """A turn equals the same turn on an empty cache; a reply is kept, or read again."""
    server = make_server(
        model, kv_bits=8, apc_checkpoint_entries=8, env={"KV_GROUP_SIZE": "32"}
    )
    asked, seen = list(ASK), []
    for turn in range(3):
        reply = server.chat(asked, script=WRITTEN, max_tokens=60)
        seen.append((list(asked), reply))
        asked += [reply.message(), user(f"get: amber {turn}")]
    last = server.chat(asked, max_tokens=16)
    whole = [[*r.prompt_ids, *r.ids] for _, r in seen]
    assert 0 < last.cached_tokens <= max(common(last.prompt_ids, w) for w in whole)
    assert last.cached_tokens + last.prefilled == len(last.prompt_ids)
    server.clear_cache()
    cold = server.chat(asked, max_tokens=16)
    assert cold.cached_tokens == 0
    assert last.ids == cold.ids
