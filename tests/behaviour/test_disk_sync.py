"""A reply whose end a client has seen is never read again, where that is asked for, however early the server is killed."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.behaviour.test_durable_disk import PAIRS, files, statistics, talk, written
from tests.fakes.models import record_prompt
from tests.fakes.server import user

pytestmark = pytest.mark.change("durable-disk")

SECONDS = 60.0
SYNC = {"APC_DISK_SYNC": "reply"}
ENDPOINTS = ["chat", "responses", "messages"]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "apc"


@pytest.fixture
def slow(monkeypatch):
    """A disk that takes much longer for a reply than its client for a look at it."""
    real = os.fsync

    def fsync(handle):
        time.sleep(0.03)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)


def ends(server) -> tuple:
    """How many replies were on disk when their end left, and how many were not."""
    found = statistics(server)
    return found.get("disk_synced_replies"), found.get("disk_unsynced_replies")


def killed(folder: Path, number: object) -> Path:
    """What a server that was killed at this moment leaves behind."""
    copy = folder.parent / f"killed-{number}"
    shutil.copytree(folder, copy)
    return copy


@pytest.mark.parametrize(("model", "drafter"), PAIRS)
def test_killed_right_behind_each_reply(make_server, folder, slow, model, drafter):
    """Each turn's server is killed behind it; the next one reads what is new alone."""
    more = {"draft_model": drafter, "env": SYNC}
    want = talk(make_server(model, disk=folder.parent / "whole", **more), 4)
    chat, known = record_prompt(seed=3, n_records=12), []
    for number in range(4):
        server = make_server(model, disk=folder, **more)
        reply = server.chat(chat.messages, max_tokens=40, stream=number % 2 == 0)
        folder = killed(folder, number)
        assert reply.ids == want[number].ids
        # The last token of a drafted reply is not kept.
        assert reply.cached_tokens >= len(known) - (drafter is not None)
        known = reply.prompt_ids + reply.ids
        chat.messages.append({"role": "assistant", "content": reply.text})
        chat.messages.append(chat.ask("get", 3))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_on_every_endpoint(make_server, folder, endpoint, stream):
    server = make_server("hybrid", disk=folder, env=SYNC)
    prompt, more = record_prompt(seed=3, n_records=8).messages, {"max_tokens": 12}
    reply = getattr(server, endpoint)(prompt, stream=stream, **more)
    left = killed(folder, 1)
    assert ends(server) == (1, 0)
    found = statistics(server)
    assert found["disk_sync_most_ms"] >= found["disk_sync_median_ms"] > 0
    server = make_server("hybrid", disk=left, env=SYNC)
    next_turn = [*prompt, {"role": "assistant", "content": reply.text}, user("again")]
    again = getattr(server, endpoint)(next_turn, stream=stream, **more)
    whole = len(reply.prompt_ids + reply.ids)
    assert again.prompt_ids[:whole] == reply.prompt_ids + reply.ids
    assert again.cached_tokens >= whole


def test_many_at_once(make_server, folder):
    """Replies of a batch that end in one step, and some that go on meanwhile."""
    server = make_server("hybrid", disk=folder, env=SYNC)
    budgets = [6, 6, 20, 30]
    chats = [record_prompt(seed=seed, n_records=4).messages for seed in range(4)]
    asked = [
        {"messages": chat, "max_tokens": n}
        for chat, n in zip(chats, budgets, strict=True)
    ]
    replies = server.together(asked)
    left = killed(folder, 1)
    assert ends(server) == (4, 0)
    for reply in replies:
        server.assert_cold(reply)
    server = make_server("hybrid", disk=left, env=SYNC)
    for chat, reply in zip(chats, replies, strict=True):
        said = {"role": "assistant", "content": reply.text}
        again = server.chat([*chat, said, user("again")], max_tokens=4)
        assert again.cached_tokens >= len(reply.prompt_ids + reply.ids)


def test_nobody_else_waits(make_server, folder, monkeypatch):
    """While an end waits for a disk that stands still, others are read and written in as many steps."""
    chats = [record_prompt(seed=seed, n_records=8).messages for seed in (3, 4)]
    server = make_server("hybrid")
    want = [server.chat(chat, max_tokens=24) for chat in chats]
    server = make_server("hybrid", disk=folder, env=SYNC)
    written(server)
    answer, real = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda f: answer.wait(SECONDS) and real(f))
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(server.chat, chat, max_tokens=24) for chat in chats]
        got = [job.result(SECONDS) for job in jobs]
    assert [reply.ids for reply in got] == [reply.ids for reply in want]
    one_by_one = talk(server, 3)
    server.wait_idle()
    # All of them left when their time was up, and nothing was lost.
    assert ends(server) == (0, 5)
    answer.set()
    written(server)
    plain = talk(make_server("hybrid"), 3)
    rounds = [(reply.ids, len(reply.forwards)) for reply in plain]
    assert [(reply.ids, len(reply.forwards)) for reply in one_by_one] == rounds


def test_a_disk_that_fails_costs_no_request(make_server, folder, monkeypatch, caplog):
    server = make_server("hybrid", disk=folder, env=SYNC)
    written(server)

    def refuse(*args):
        raise OSError(errno.ENOSPC, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        patch.setattr(os, "replace", refuse)
        replies = talk(server, 3)
    for reply in replies:
        server.assert_cold(reply)
    assert ends(server) == (0, 3)
    server.reload()
    assert len([r for r in caplog.records if "injected" in r.getMessage()]) == 1
    talk(server, 1, seed=5)
    assert ends(server) == (1, 0)


@pytest.mark.parametrize("drafter", [None, "hybrid-mtp"])
def test_who_hangs_up_waits_for_nothing(make_server, folder, drafter):
    server = make_server("hybrid", disk=folder, draft_model=drafter, env=SYNC)
    chat = record_prompt(seed=3, n_records=8).messages
    server.cancel(chat, after=4)
    assert ends(server) == (0, 0)
    reply = server.chat(chat, max_tokens=24)
    server.assert_cold(reply)
    assert ends(server) == (1, 0)


def test_never_unless_it_is_asked_for(make_server, folder):
    server = make_server("hybrid", disk=folder)
    talk(server, 2)
    written(server)
    assert files(folder)
    found = statistics(server)
    assert found.get("disk_written_entries")
    assert not [name for name in found if "sync" in name]
