"""Sessions at once, with hang-ups and errors among them: a cold run's tokens, and nothing left behind."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import pytest

from tests.behaviour.stored import leases
from tests.fakes.replies import RequestFailed
from tests.fakes.server import system, user
from tests.fakes.stuck import Watchdog

SESSIONS, TURNS = 6, 6
# The long run: more sessions than the cache has room for.
MANY, LONGER, REQUESTS = 16, 30, 2000
MOST_MESSAGES = 14
SEED = int(os.environ.get("CACHEPLUS_SOAK_SEED", "5"))
# How long a client waits for something: a step takes more than a second where many share
# a processor, and a reply dozens of steps.
PATIENCE = 600.0
# Steps of the generation thread from a request to its last token.
MOST_STEPS = 400
# Stock's loop keeps the embeddings of the prompt that it has read last.
ONE_ROW = 2**18
GB = 2**30
KEYS = ("amber", "briar", "cedar", "dune")
VALUES = ("fox", "yak", "sun", "owl", "elk", "ant")
# About a quarter of what the long run would keep.
ROOM = {"dense": 3 << 20, "hybrid": 6 << 20}
PLANTED = "planted in a logits processor"


class Session:
    """One agent: its conversation, and what came of each request."""

    def __init__(self, server, number: int, seed: int):
        self.server = server
        self.sent = 0
        self.random = random.Random(f"{seed} {number}")
        lines = [
            f"{self.random.choice(KEYS)} = "
            + " ".join(self.random.choices(VALUES, k=3))
            for _ in range(self.random.randint(4, 24))
        ]
        rules = system("\n".join([f"Agent {number}.", *lines]))
        self.asked = [rules, user("get: amber")]
        self.replies = []
        self.most_steps = 0

    def run(self, turns: int = TURNS):
        for _ in range(turns):
            dice = self.random.random()
            self.sent += 1 + (dice < 0.45)
            if dice < 0.2:
                self.hang_up(self.random.randint(0, 4))
            elif dice < 0.3:
                with pytest.raises(RequestFailed):
                    self.server.chat(self.asked, temperature="hot")
            elif dice < 0.45:
                with pytest.raises(RequestFailed, match=PLANTED):
                    self.server.chat(self.asked, logit_bias={"5": 0.5}, max_tokens=40)
            # What was broken off or failed is asked again.
            self.ask()
        return self

    def compact(self):
        """The conversation so far becomes a line, as agents do when it grows long."""
        if len(self.asked) > MOST_MESSAGES:
            self.asked = [self.asked[0], user(f"so far: {self.replies[-1].text}, on")]

    def ask(self):
        endpoint = self.random.choice(("chat", "responses", "messages"))
        before = self.server.recorder.ticks
        reply = getattr(self.server, endpoint)(
            self.asked,
            max_tokens=self.random.choice((1, 4, 20, 40)),
            stream=self.random.random() < 0.5,
        )
        steps = self.server.recorder.ticks - before
        self.most_steps = max(self.most_steps, steps)
        self.replies.append(reply)
        message = {"role": "assistant", "content": reply.text.strip() or "nothing"}
        self.asked += [message, user(f"get: {self.random.choice(KEYS)}")]

    def hang_up(self, lines: int):
        body = {"model": self.server.settings.model, "messages": self.asked}
        body |= {"stream": True, "max_tokens": 60, "temperature": 0}
        with self.server.host.client.stream(
            "POST", "/v1/chat/completions", json=body
        ) as answer:
            arriving = answer.iter_lines()
            for _ in range(lines):
                next(arriving, None)


@pytest.fixture(autouse=True)
def biased_rows_raise(monkeypatch):
    """At their second token, among those of others.

    Nothing is logged: a record that is captured holds the traceback, and so the rows.
    """
    generation = importlib.import_module("mlx_vlm.server.generation")
    make = generation.make_logits_processors

    def with_bias(bias, *more):
        calls = []

        def raise_late(tokens, logits):
            calls.append(1)
            if len(calls) > 1:
                raise RuntimeError(PLANTED)
            return logits

        return [*make(None, *more), *([raise_late] if bias else [])]

    monkeypatch.setattr(generation, "make_logits_processors", with_bias)
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def patient_client(host, monkeypatch):
    """Who is slow is waited for; who is stuck is told why (tests.fakes.stuck)."""
    monkeypatch.setattr(host, "watchdog", Watchdog(host, after=PATIENCE * 0.75))
    monkeypatch.setattr(host.client, "timeout", PATIENCE)


def rested(server):
    """Bytes of arrays that are alive once nobody asks and nothing is stored."""
    assert_nothing_is_left(server)
    server.clear_cache()
    server.recorder.forget()
    gc.collect()
    return mx.get_active_memory()


def assert_nothing_is_left(server):
    server.wait_idle()
    assert not leases(server.manager)
    assert not getattr(server.generator, "row_faults", ())
    store = getattr(server.manager, "reply_ids", None)
    if store is not None:
        assert max(len(store._prompts), len(store._replies)) <= 256
    gc.collect()
    alive = [o for o in gc.get_objects() if type(o).__name__ == "OutputRow"]
    assert not alive, "ledgers of rows that have ended"
    for batch in (o for o in gc.get_objects() if type(o).__name__ == "BatchGenerator"):
        assert not getattr(batch, "rows_alone", ())
        assert not getattr(batch, "row_faults", ())


@pytest.mark.change("row-errors", "output-tokens")
@pytest.mark.parametrize(
    "model",
    [
        "dense",
        pytest.param(
            "hybrid", marks=pytest.mark.change("row-positions", "recurrent-rows")
        ),
        "window",
    ],
)
@pytest.mark.given_by_others("recurrent-rows", "hybrid")
@pytest.mark.given_by_others("row-positions", "hybrid")
def test_sessions_at_once_with_hang_ups_and_errors(make_server, model):
    seed = 3
    server = make_server(
        model, apc_checkpoint_entries=32, env={"PREFILL_STEP_SIZE": "64"}
    )
    sessions = [Session(server, number, seed) for number in range(SESSIONS)]
    with ThreadPoolExecutor(SESSIONS) as pool:
        list(pool.map(Session.run, sessions))
    assert_nothing_is_left(server)
    replies = [reply for session in sessions for reply in session.replies]
    for reply in random.Random(seed).sample(replies, 12):
        server.assert_cold(reply)
    # The replies so far are any text; what is kept is asked with one that is not.
    for session in sessions[:3]:
        one = server.chat(
            session.asked, script=" ".join(["fox yak sun"] * 11), max_tokens=60
        )
        two = server.chat([*session.asked, one.message(), user("on")], max_tokens=4)
        assert two.cached_tokens > len(one.prompt_ids)
        server.assert_cold(two)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.change("segment-tree")
@pytest.mark.usefixtures("patient_client")
@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_two_thousand_requests_of_sixteen_sessions(make_server, model):
    """Within a budget that is short, with hang-ups, retries, compactions and resets."""
    server = make_server(
        model, apc_memory_max_gb=ROOM[model] / GB, env={"PREFILL_STEP_SIZE": "64"}
    )
    sessions = [Session(server, number, SEED) for number in range(MANY)]
    at_rest, kept, resident = [], [], []
    began = time.monotonic()

    def go_on(session):
        for _ in range(LONGER // TURNS):
            session.run()
            session.compact()
            stats = server.get("/v1/cache/stats")
            resident.append(stats["resident_bytes"])
            assert resident[-1] <= stats["memory_max_bytes"]
        if session is sessions[0]:
            server.post("/v1/cache/reset", {})

    while sum(session.sent for session in sessions) < REQUESTS:
        with ThreadPoolExecutor(MANY) as pool:
            list(pool.map(go_on, sessions))
        for session in sessions:
            # The fixture's record of a request holds its arrays.
            kept.append(replace(session.random.choice(session.replies), record=None))
            session.replies.clear()
        at_rest.append(rested(server))
        print(
            f"{model}, seed {SEED}: {sum(session.sent for session in sessions)} requests"
            f" in {time.monotonic() - began:.0f} s, at most {max(resident)} of "
            f"{ROOM[model]} bytes stored, at rest {at_rest}, a reply in at most "
            f"{max(session.most_steps for session in sessions)} steps",
            flush=True,
        )
    assert max(at_rest[1:]) <= at_rest[0] + ONE_ROW, at_rest
    assert max(session.most_steps for session in sessions) <= MOST_STEPS
    for reply in random.Random(SEED).sample(kept, 24):
        server.assert_cold(reply)
