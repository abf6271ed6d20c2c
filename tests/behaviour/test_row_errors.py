"""An error in one row fails that row; everybody else gets a cold run's tokens."""

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.responses import StreamingResponse

from tests.behaviour.sessions import assert_reads_only_new
from tests.fakes.recorder import KEY
from tests.fakes.replies import Reply, RequestFailed
from tests.fakes.server import system, user, wait_for

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


PATHS = ["/v1/chat/completions", "/v1/messages"]


def failed_requests(server):
    return server.get("/metrics")["summary"]["requests_failed"]


@pytest.fixture
def kept_streams(monkeypatch):
    """What a traceback keeps of a stream, until a collection finds it, is kept here."""
    kept, make = [], StreamingResponse.__init__

    def init(self, *args, **kwargs):
        kept.append(self)
        make(self, *args, **kwargs)

    monkeypatch.setattr(StreamingResponse, "__init__", init)
    return kept


@pytest.mark.guard
@pytest.mark.parametrize("path", PATHS)
def test_hang_up_before_the_row_is_admitted(make_server, kept_streams, path):
    """The thread that waits for the row returns a reply that nobody takes."""
    server = make_server("dense")
    failed = failed_requests(server)
    gone = threading.Event()
    first = server.expect_held("fox " * 39, at=3, until=gone.is_set)
    second = server.expect_held("yak " * 9, at=0, until=None)
    body = {"model": server.settings.model, "messages": [user("yak")], "max_tokens": 16}
    body |= {"temperature": 0, "stream": True, KEY: second.key}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.chat, ask("fox"), record=first, max_tokens=40)
        assert first.held.wait(20)
        with server.host.client.stream("POST", path, json=body):
            queue = server.generator.requests
            wait_for(lambda: queue.qsize() > 0, "the second request is not queued")
        wait_for(lambda: failed_requests(server) > failed, "the hang-up is not seen")
        gone.set()
        assert len(running.result(60).ids) == 40
    server.wait_idle()
    assert second.prompt_ids, "the row was never admitted: this shows nothing"
    assert second.finish_reason is None and len(second.ids) <= 2


class Connection:
    """A client of the ASGI application that reads two pieces, then no more, then goes."""

    def __init__(self, path, body):
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.request = {"type": "http.request", "body": json.dumps(body).encode()}
        self.pieces = 0
        self.full, self.gone = asyncio.Event(), asyncio.Event()

    async def receive(self):
        if self.request is None:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        message, self.request = self.request, None
        return message

    async def send(self, message):
        self.pieces += message["type"] == "http.response.body"
        if self.pieces > 2:
            self.full.set()
            await self.gone.wait()
            # The write ends after the server has been told that the client is gone.
            await asyncio.sleep(0.2)


async def hang_up_in_a_write(server, path, body, record, gone):
    """Go while the handler stands in a write; return when the row has ended."""
    client = Connection(path, body)
    app = server.host.app_module.app
    answer = asyncio.create_task(app(client.scope, client.receive, client.send))
    await asyncio.wait_for(client.full.wait(), 20)
    asked = -1
    while asked != record.asked or not record.held.is_set():
        asked = record.asked
        await asyncio.sleep(0.2)
    client.gone.set()
    await answer
    gone.set()
    # On stock the end of the event loop would find the stream: wait for the row here.
    await asyncio.to_thread(server.wait_idle)


@pytest.mark.parametrize("path", PATHS)
def test_hang_up_while_the_server_writes(make_server, kept_streams, path):
    """The client has stopped reading before it goes."""
    server = make_server("dense")
    gone = threading.Event()
    record = server.expect_held("yak " * 39, at=20, until=gone.is_set)
    body = {"model": server.settings.model, "messages": [user("yak")]}
    body |= {"max_tokens": 40, "temperature": 0, "stream": True, KEY: record.key}
    asyncio.run(hang_up_in_a_write(server, path, body, record, gone))
    assert 20 <= len(record.ids) < 30 and record.finish_reason is None


@pytest.mark.parametrize("path", PATHS)
def test_hang_up_before_a_whole_reply(make_server, path):
    """Nothing is sent before the reply is there; the client gives up waiting for it."""
    server = make_server("dense")
    generator = server.generator
    record = server.expect_held(
        "yak " * 39, at=20, until=lambda: bool(generator._cancelled)
    )
    body = {"model": server.settings.model, "messages": [user("yak")]}
    body |= {"max_tokens": 40, "temperature": 0, KEY: record.key}
    url = server.host.client.base_url
    client = http.client.HTTPConnection(url.host, url.port)
    client.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    assert record.held.wait(20)
    client.close()
    server.wait_idle()
    assert 20 <= len(record.ids) < 30 and record.finish_reason is None
