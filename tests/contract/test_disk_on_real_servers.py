"""A session on servers that end between all of its turns, by SIGTERM and by SIGKILL."""

from __future__ import annotations

import signal
import time

import httpx
import pytest

from mlx_vlm_cacheplus.replay import session as sessions
from mlx_vlm_cacheplus.replay.history import History, Reply
from mlx_vlm_cacheplus.replay.serving import Server
from mlx_vlm_cacheplus.replay.widen import widened_copy
from tests.fakes.models import drafter_dir, model_dir

KINDS = {"hybrid": "hybrid-mtp", "dense": "dense-eagle3"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """models(name) -> a float32 copy, so that how a prompt was split changes no token."""
    made = {}

    def make(name):
        if name not in made:
            source = drafter_dir(name) if "-" in name else model_dir(name)
            made[name] = widened_copy(source, tmp_path_factory.mktemp("m") / name)
        return str(made[name])

    return make


class Conversation:
    """One session, turn by turn, against whatever server there is."""

    def __init__(self, session):
        self.session, self.history = session, History(session)
        self.rows = []

    def turn(self, server, turn):
        self.history.add_turn(turn)
        body = {
            "model": server.model,
            "messages": self.history.messages,
            "temperature": 0,
            "max_tokens": self.session.reply_limit(turn),
        }
        if self.session.tools:
            body["tools"] = self.session.tools
        answer = httpx.post(
            f"{server.base}/v1/chat/completions", json=body, timeout=120
        )
        answer.raise_for_status()
        message = answer.json()["choices"][0]["message"]
        usage = answer.json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.rows.append((usage["prompt_tokens"], cached, message.get("content")))
        self.history.add_reply(
            Reply(
                message.get("content") or "",
                message.get("reasoning_content") or "",
                message.get("tool_calls") or [],
            )
        )

    @property
    def read(self):
        return sum(prompt - cached for prompt, cached, _ in self.rows)

    @property
    def texts(self):
        return [text for _, _, text in self.rows]


def is_written(server):
    """Wait until the server says that nothing waits to be written."""
    with httpx.Client(timeout=60) as http:
        while True:
            stats = http.get(f"{server.base}/v1/cache/stats").json()
            if not stats["disk_pending_bytes"] and stats["disk_written_entries"]:
                return
            time.sleep(0.2)


def play(session, model, home, arguments, endings, at_once=False):
    """The session, with a new server behind each turn that ``endings`` has a signal for.

    at_once: SIGKILL comes right behind the reply, written or not.
    """
    conversation, server = Conversation(session), None
    for number, turn in enumerate(session.turns):
        if server is None:
            server = Server(model, home, plus=True, arguments=arguments).__enter__()
        conversation.turn(server, turn)
        ending = endings[number % len(endings)]
        if ending is signal.SIGKILL and not at_once:
            is_written(server)
        if ending is signal.SIGKILL:
            server._process.kill()
            server._process.wait()
        if ending is not None or turn is session.turns[-1]:
            server.stop()
            server = None
    return conversation


def check(session, models, home, model, drafter, endings, at_once=False):
    arguments = ("--log-level", "WARNING")
    if drafter:
        arguments += ("--draft-model", models(KINDS[model]))
    args = (session, models(model))
    whole = play(*args, home / "whole", (*arguments, "--cacheplus-disk", "off"), [None])
    ended = play(*args, home / "ended", arguments, endings, at_once)
    assert ended.texts == whole.texts
    return ended.read / whole.read


@pytest.mark.timeout(600)
def test_a_few_turns(models, tmp_path):
    session = sessions.load("short").first(2)
    endings = [signal.SIGKILL, signal.SIGTERM]
    ratio = check(session, models, tmp_path, "hybrid", False, endings)
    assert ratio <= 1.03


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("drafter", [False, True])
@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_the_bundled_session(models, tmp_path, model, drafter, ending):
    session = sessions.load("coding-agent-18")
    ratio = check(session, models, tmp_path, model, drafter, [ending])
    print(f"{model} drafter={drafter} {ending.name}: re-read {ratio:.4f}")
    assert ratio <= 1.03


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", KINDS)
def test_killed_right_behind_each_reply(models, tmp_path, model):
    """What was not written yet is read again, and no token differs."""
    session = sessions.load("coding-agent-18").first(8)
    kill = [signal.SIGKILL]
    ratio = check(session, models, tmp_path, model, False, kill, at_once=True)
    print(f"{model} SIGKILL at once: re-read {ratio:.4f}")
    assert ratio < 2
