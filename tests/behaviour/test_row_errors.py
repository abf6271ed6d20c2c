"""An error in one row fails that row; everybody else gets a cold run's tokens."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.behaviour.sessions import assert_reads_only_new
from tests.fakes.replies import Reply, RequestFailed
from tests.fakes.server import system, user

pytestmark = pytest.mark.change("row-errors")

generation = importlib.import_module("mlx_vlm.server.generation")

POISON = "zebra zebra zebra"
MODELS = ["dense", "hybrid"]


class Planted(Exception):
    """What the tests plant."""


def ask(text):
    return [system("Copy what you are told, word by word."), user(text)]


def poison_ids(server):
    return server.encode(" zebra")


def plant(monkeypatch, owner, name, is_poisoned):
    """Make a method raise where its arguments are poisoned."""
    original = getattr(owner, name)

    def wrapper(*args, **kwargs):
        if is_poisoned(args, kwargs):
            raise Planted(f"planted in {name}")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapper)


def holds(ids, wanted):
    return any(ids[i : i + len(wanted)] == wanted for i in range(len(ids)))


@pytest.mark.parametrize("model", MODELS)
def test_embedding_that_raises(make_server, monkeypatch, model):
    server = make_server(model)
    bad = poison_ids(server)
    plant(
        monkeypatch,
        type(server.generator.model),
        "get_input_embeddings",
        lambda args, kwargs: holds(args[1].reshape(-1).tolist(), bad),
    )
    good, failed = server.settled_staggered(
        [
            (0, {"messages": ask("fox"), "max_tokens": 30, "script": "fox " * 28}),
            (4, {"messages": ask(POISON), "max_tokens": 4}),
        ]
    )
    assert isinstance(failed, RequestFailed) and failed.status == 500
    assert isinstance(good, Reply) and len(good.ids) == 30


@pytest.mark.parametrize("model", MODELS)
def test_prefill_that_raises_fails_its_row_alone(make_server, monkeypatch, model):
    server = make_server(model)
    bad = poison_ids(server)
    plant(
        monkeypatch,
        type(server.language_model),
        "__call__",
        lambda args, kwargs: args[1].shape[1] > 1
        and any(holds(row, bad) for row in args[1].tolist()),
    )
    requests = [
        {"messages": ask(text), "max_tokens": 12}
        for text in ("fox yak", POISON, "sun sun sun sun elk", "owl")
    ]
    outcomes = server.settled(requests)
    assert isinstance(outcomes.pop(1), RequestFailed)
    monkeypatch.undo()
    for reply in outcomes:
        assert isinstance(reply, Reply)
        server.assert_cold(reply)


@pytest.mark.parametrize("model", MODELS)
def test_prefill_that_raises_beside_a_running_row(make_server, monkeypatch, model):
    server = make_server(model, apc_checkpoint_entries=8)
    bad = poison_ids(server)
    plant(
        monkeypatch,
        type(server.language_model),
        "__call__",
        lambda args, kwargs: args[1].shape[1] > 1
        and any(holds(row, bad) for row in args[1].tolist()),
    )
    good, failed = server.settled_staggered(
        [
            (0, {"messages": ask("fox"), "max_tokens": 30, "script": "fox " * 29}),
            (4, {"messages": ask(POISON), "max_tokens": 4}),
        ]
    )
    assert isinstance(failed, RequestFailed)
    assert isinstance(good, Reply)
    monkeypatch.undo()
    assert len(good.ids) == 30
    two = server.chat([*ask("fox"), good.message(), user("on")], max_tokens=4)
    assert_reads_only_new(two, [good], model)


@pytest.mark.parametrize("model", MODELS)
def test_logits_processor_that_raises(make_server, monkeypatch, model):
    server = make_server(model)
    make = generation.make_logits_processors

    def raise_late(tokens, logits):
        if len(tokens) > server.first_length + 1:
            raise Planted("planted in a logits processor")
        server.first_length = min(server.first_length, len(tokens))
        return logits

    server.first_length = 10_000
    monkeypatch.setattr(
        generation,
        "make_logits_processors",
        lambda bias, *more: [*make(None, *more), *([raise_late] if bias else [])],
    )
    good, failed = server.settled(
        [
            {"messages": ask("fox"), "max_tokens": 30},
            {"messages": ask("yak"), "max_tokens": 30, "logit_bias": {"5": 0.5}},
        ]
    )
    assert isinstance(failed, RequestFailed)
    assert isinstance(good, Reply)
    server.assert_cold(good)


@pytest.mark.parametrize("model", MODELS)
def test_detokenizer_that_raises(make_server, monkeypatch, model):
    server = make_server(model)
    bad = poison_ids(server)
    plant(
        monkeypatch,
        generation._ServerTokenStreamer,
        "advance",
        lambda args, kwargs: args[1] in bad,
    )
    good, failed = server.settled(
        [
            {"messages": ask("fox"), "max_tokens": 30, "script": "fox " * 28},
            {"messages": ask("yak"), "max_tokens": 30, "script": "fox zebra fox fox"},
        ]
    )
    assert isinstance(failed, RequestFailed)
    assert isinstance(good, Reply) and len(good.ids) == 30


@pytest.mark.parametrize("model", MODELS)
def test_decode_that_raises_spares_those_who_are_prefilled(
    make_server, monkeypatch, model
):
    server = make_server(model, env={"PREFILL_STEP_SIZE": "16"})
    calls = {"n": 0}

    def fifth_decode(args, kwargs):
        is_decode = args[1].shape[1] == 1
        calls["n"] += is_decode
        return is_decode and calls["n"] == 5

    plant(monkeypatch, type(server.language_model), "__call__", fifth_decode)
    first, second = server.settled_staggered(
        [
            (0, {"messages": ask("fox"), "max_tokens": 20, "script": "fox " * 18}),
            (1, {"messages": ask("yak " * 150), "max_tokens": 6}),
        ]
    )
    monkeypatch.undo()
    assert isinstance(first, RequestFailed)
    assert isinstance(second, Reply)
    server.assert_cold(second)


def test_late_hang_up_does_not_cancel_a_stranger(make_server):
    """Uids start again with each batch generator; the second row has the first's."""
    server = make_server("dense")
    args = generation.GenerationArguments(max_tokens=1, temperature=0.0)
    _, unread = server.generator.generate("fox yak sun", args=args)
    server.wait_idle()
    record = server.expect_held(
        "fox " * 29, at=4, until=lambda: bool(server.generator._cancelled)
    )
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.chat, ask("fox"), record=record, max_tokens=30)
        assert record.held.wait(20)
        unread.close()
        assert len(running.result(60).ids) == 30
