"""The cache survives: restarts, other weights, slow and failing disks, and is nobody else's."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
import threading
from pathlib import Path

import pytest

from tests.behaviour.sessions import new_tokens
from tests.fakes.models import model_dir, record_prompt
from tests.fakes.proposals import Proposals
from tests.fakes.server import user, wait_for

pytestmark = pytest.mark.change("durable-disk")

# The models, and the draft models that are served with them.
PAIRS = [
    ("dense", None),
    ("hybrid", None),
    ("hybrid", "hybrid-mtp"),
    ("dense", "dense-eagle3"),
]
SECONDS = 60.0
SESSIONS = "/v1/cache/sessions"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "apc"


def files(folder: Path) -> list[Path]:
    """Stored files that hold arrays."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and "sqlite" not in path.name and path.name != "lock"
    ]


def statistics(server) -> dict:
    return server.get("/v1/cache/stats")


def written(server) -> None:
    """Wait until nothing waits to be written."""
    server.wait_idle()
    wait_for(
        lambda: not statistics(server).get("disk_pending_bytes"), "it is not written"
    )


def talk(server, turns, between=lambda: None, seed=3):
    """A conversation; ``between`` is called after each turn."""
    chat, replies = record_prompt(seed=seed, n_records=12), []
    for _ in range(turns):
        replies.append(server.chat(chat.messages, max_tokens=40))
        between()
        chat.messages.append({"role": "assistant", "content": replies[-1].text})
        chat.messages.append(chat.ask("get", 3))
    return replies


def restart(server):
    """End it as SIGTERM does, and begin with a fresh model and an empty cache in RAM."""
    written(server)
    server.reload()


@pytest.mark.parametrize(("model", "drafter"), PAIRS)
def test_c18_a_restart_between_all_turns(make_server, folder, model, drafter):
    server = make_server(model, disk=folder, draft_model=drafter)
    replies = talk(server, 3, between=lambda: restart(server))
    for turn, reply in enumerate(replies):
        new = new_tokens(reply, replies[:turn])
        assert reply.prefilled <= new + (2 if drafter else 1)
        server.assert_cold(reply)
    new = sum(new_tokens(reply, replies[:i]) for i, reply in enumerate(replies))
    assert sum(reply.prefilled for reply in replies) <= 1.03 * new


def said(server, turns, between=lambda: None):
    """Tokens of each reply of a talk, and what a drafter proposed for it, in rounds.

    The same tokens and proposals are as many accepted ones.
    """
    replies, drafts = talk_and_drafts(server, turns, between)
    return [(r.ids, d) for r, d in zip(replies, drafts, strict=True)]


def talk_and_drafts(server, turns, between=lambda: None):
    """A talk's replies, and what a drafter proposed for each, in rounds."""
    drafts = []

    def note():
        model = server.generator.draft_model
        return None if model is None else Proposals(model)

    proposals = note()

    def after():
        nonlocal proposals
        drafts.append(proposals and proposals.take())
        between()
        proposals = note()

    replies = talk(server, turns, between=after)
    assert all(drafts) or server.generator.draft_model is None
    return replies, drafts


@pytest.mark.parametrize(("model", "drafter"), PAIRS[2:])
def test_drafts_are_accepted_as_without_a_restart(make_server, folder, model, drafter):
    server = make_server(model, disk=folder, draft_model=drafter)
    warm = said(server, 3)
    written(server)
    assert files(folder), "else nothing could come back from there"
    server.post(SESSIONS + "/reset", {"scope": "all"})
    assert said(server, 3, between=lambda: restart(server)) == warm


def test_drafters_that_take_turns_restore_their_own_part(make_server, folder):
    """A prompt is read once by each of them, in whatever order they come."""
    prompt = record_prompt(seed=3, n_records=12).messages
    read = []
    for drafter in ("dense-eagle3", "dense-dflash") * 2:
        server = make_server("dense", disk=folder, draft_model=drafter)
        reply = server.chat(prompt, max_tokens=8)
        read.append(reply.prefilled)
        written(server)
    whole = len(reply.prompt_ids)
    assert read[:2] == [whole, whole] and max(read[2:]) <= 2


def test_a_drafter_goes_on_from_where_it_was(make_server, folder):
    """What was added without it is read again, and not what it had read before."""
    want = said(make_server("hybrid", draft_model="hybrid-mtp"), 3)
    talk(make_server("hybrid", disk=folder, draft_model="hybrid-mtp"), 2)
    talk(make_server("hybrid", disk=folder), 3)
    server = make_server("hybrid", disk=folder, draft_model="hybrid-mtp")
    replies, drafts = talk_and_drafts(server, 3, lambda: restart(server))
    assert [r.ids for r in replies] == [ids for ids, _ in want]
    assert drafts == [proposed for _, proposed in want]
    assert replies[2].prefilled <= new_tokens(replies[2], replies[:2]) + 2


def test_c77_nobody_else_can_read_it(make_server, folder):
    before = os.umask(0o022)
    try:
        server = make_server("hybrid", disk=folder)
        server.chat([user("get: amber")], max_tokens=4)
        written(server)
    finally:
        os.umask(before)
    assert files(folder)
    for path in files(folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def other_weights(path: Path) -> None:
    """The same arrays in a file of the same size, each with its values turned round."""
    import mlx.core as mx

    weights = mx.load(str(path))
    turned = {
        n: mx.contiguous(w.reshape(-1)[::-1].reshape(w.shape))
        for n, w in weights.items()
    }
    mx.eval(turned)
    mx.save_safetensors(str(path), turned, metadata={"format": "mlx"})


@pytest.mark.parametrize("how", ["replaced", "link", "touched", "copied"])
def test_c26_what_other_weights_made_is_not_used(make_server, folder, tmp_path, how):
    """And what the same weights made is, wherever they are."""
    own = shutil.copytree(model_dir("dense"), tmp_path / "own")
    served = tmp_path / "served"
    served.symlink_to(own)
    server = make_server(served, disk=folder)
    prompt = record_prompt(seed=3, n_records=6).messages
    first = server.chat(prompt, max_tokens=4)
    written(server)
    assert files(folder), "else there is nothing that could be used"
    other = shutil.copytree(model_dir("dense"), tmp_path / "other")
    if how == "replaced":
        other_weights(own / "model.safetensors")
    if how == "link":
        other_weights(other / "model.safetensors")
    if how in ("link", "copied"):
        served.unlink()
        served.symlink_to(other)
    if how == "touched":
        os.utime(own / "model.safetensors")
    server.reload()
    reply = server.chat(prompt, max_tokens=4)
    if how in ("replaced", "link"):
        assert reply.cached_tokens == 0
    else:
        assert reply.prefilled == 1 and reply.ids == first.ids


def test_c25_each_token_is_written_once(make_server, folder):
    """Turns of about as many tokens write about as many bytes, however long the talk is.

    That it is at most 1.2 times what was created is counted in the tests of the tier.
    """
    server, sizes = make_server("hybrid", disk=folder), []

    def measure():
        written(server)
        sizes.append(sum(path.stat().st_size for path in files(folder)))

    talk(server, 7, between=measure)
    turns = [after - before for before, after in itertools.pairwise(sizes)]
    assert min(turns) > 0
    assert max(turns) < 1.3 * turns[0]


def test_no_request_waits_for_a_write(make_server, folder, monkeypatch):
    """The disk answers when all is over: same tokens, same rounds, a bounded queue."""
    want = [(r.ids, len(r.forwards)) for r in talk(make_server("hybrid"), 3)]
    server = make_server("hybrid", disk=folder)
    written(server)
    answer, real = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda f: answer.wait(SECONDS) and real(f))
    replies = talk(server, 3)
    assert [(r.ids, len(r.forwards)) for r in replies] == want
    server.wait_idle()
    stats = statistics(server)
    assert (
        0 < stats.get("disk_pending_bytes", 0) <= stats.get("disk_queue_max_bytes", 0)
    )
    answer.set()
    restart(server)
    assert talk(server, 3)[-1].ids == want[-1][0]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS])
def test_c54_a_disk_that_fails_costs_no_request(
    make_server, folder, monkeypatch, caplog, code
):
    server = make_server("hybrid", disk=folder)
    written(server)

    tried = threading.Event()

    def refuse(*args):
        tried.set()
        raise OSError(code, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        patch.setattr(os, "replace", refuse)
        replies = talk(server, 2)
        assert tried.wait(SECONDS)
    for reply in replies:
        server.assert_cold(reply)
    restart(server)
    said = [r.getMessage() for r in caplog.records if "injected" in r.getMessage()]
    assert len(said) == 1, "one line for all of it"
    again = talk(server, 2)
    assert [r.ids for r in again] == [r.ids for r in replies]
    # What waited meanwhile was written when it could be.
    assert again[0].cached_tokens > 0
    assert again[1].cached_tokens >= len(replies[0].prompt_ids + replies[0].ids)


@pytest.mark.parametrize("what", ["all", "index", "entries"])
def test_c54_a_folder_that_is_deleted_comes_back(make_server, folder, what):
    server = make_server("hybrid", disk=folder)
    before = talk(server, 2)
    written(server)
    index = list(folder.rglob("*.sqlite"))
    assert len(index) == 1
    home = index[0].parent
    for path in {
        "all": [folder],
        "index": list(home.glob("*.sqlite*")),
        "entries": [home / "entries"],
    }[what]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    replies = talk(server, 2, seed=4)
    for reply in replies:
        server.assert_cold(reply)
    restart(server)
    again = talk(server, 2, seed=4)
    assert [r.ids for r in again] == [r.ids for r in replies]
    assert again[0].cached_tokens > 0
    assert [r.ids for r in talk(server, 2)] == [r.ids for r in before]


def test_c52_spoiled_files_are_read_anew(make_server, folder):
    server = make_server("dense", disk=folder)
    replies = talk(server, 2)
    restart(server)
    for path in files(folder):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    again = talk(server, 2)
    assert [r.ids for r in again] == [r.ids for r in replies]
    assert again[0].cached_tokens == 0
    assert statistics(server).get("disk_spoiled_entries", 0) >= 1


def test_c78_scopes_of_a_reset(make_server, folder):
    """RAM alone comes back from disk; the disk alone leaves RAM; all leaves nothing."""
    server = make_server("dense", disk=folder)
    prompt = record_prompt(seed=3, n_records=6).messages

    def cached():
        reply = server.chat(prompt, max_tokens=4)
        written(server)
        return reply.cached_tokens

    def reset(scope):
        return server.post(SESSIONS + "/reset", {"scope": scope})

    assert cached() == 0
    reset("ram")
    assert cached() > 0
    assert reset("disk")["removed_entries"] > 0 and files(folder) == []
    assert cached() > 0
    assert reset("all")["removed_entries"] >= 0
    assert cached() == 0


def test_who_fills_the_disk_displaces_nobody_within_his_share(make_server, folder):
    """Two conversations: one that ended long ago, one that goes on beyond the limit."""
    server = make_server("dense", disk=folder)
    talk(server, 2)
    written(server)
    size = statistics(server).get("disk_bytes")
    assert size
    room = 2.5 * size / (1 << 30)
    small = folder.with_name("small")
    server = make_server("dense", disk=small, apc_disk_max_gb=room)
    kept = talk(server, 2)
    large = talk(server, 9, seed=4)
    written(server)
    full = statistics(server)
    assert full["disk_bytes"] <= full["disk_max_bytes"]
    assert full["disk_evictions"] or full["disk_refused_entries"]
    restart(server)
    again = talk(server, 2)
    assert [r.ids for r in again] == [r.ids for r in kept]
    assert all(r.prefilled == 1 for r in again), "all of it was there"
    assert [r.ids for r in talk(server, 9, seed=4)] == [r.ids for r in large]


def test_c58_tenants_meet_nowhere(make_server, folder):
    server = make_server("dense", disk=folder)
    prompt = record_prompt(seed=3, n_records=6).messages

    def cached(tenant):
        headers = {"X-APC-Tenant": tenant}
        reply = server.chat(prompt, max_tokens=4, headers=headers)
        assert reply.prefilled in (1, len(reply.prompt_ids))
        return reply.cached_tokens

    assert cached("a") == 0
    restart(server)
    assert cached("b") == 0
    assert cached("a") > 0
