"""`mlx-vlm-cacheplus cache ls|show|verify|rm|gc|export|import` on a folder without a server."""

from __future__ import annotations

import json
import os

import pytest

from mlx_vlm_cacheplus import cli
from mlx_vlm_cacheplus.core.disk_folder import ENTRIES
from mlx_vlm_cacheplus.core.disk_store import DiskStore
from tests.contract.disk_entries import put


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "disk"


@pytest.fixture
def filled(folder):
    """Two roots: a conversation with a state kept later, and another model's prompt."""
    store = DiskStore(folder)
    store.open()
    root = store.root("weights", 0, '[["state"]]', "a model")
    first = put(store, root, [1, 2, 3], session="agent")
    put(store, root, [4, 5], first.number, 3, session="agent", has_state=True)
    put(store, root, [], first.number, 2, 1, has_state=True)
    put(store, store.root("others", 0, "[]", "another"), [7] * 30)
    store.close()
    return folder


@pytest.fixture
def cache(folder, capsys):
    """cache(words...) -> (exit status, the JSON that was printed, errors)."""

    def run(*words, disk=None):
        status = cli.main(
            ["cache", *map(str, words), "--disk", str(disk or folder), "--json"]
        )
        out, err = capsys.readouterr()
        return status, json.loads(out) if out else None, err

    return run


def test_ls_and_show(filled, cache):
    status, found, _ = cache("ls")
    assert status == 0 and found["folder"] == str(filled)
    assert [(r["model"], r["entries"], r["tokens"]) for r in found["roots"]] == [
        ("a model", 3, 5),
        ("another", 1, 30),
    ]
    status, found, _ = cache("show", found["roots"][0]["root"])
    assert status == 0
    assert [e["tokens"] for e in found["entries"]] == ["0-3", "3-5", "2-2"]
    assert cache("show", 99)[0] == 1 and cache("show")[0] == 2


def test_tables_are_printed_without_json(filled, capsys):
    for words in (["ls"], ["show", "1"], ["verify"], ["gc"]):
        assert cli.main(["cache", *words, "--disk", str(filled)]) == 0
        assert capsys.readouterr().out.strip()


def test_verify_and_gc(filled, cache):
    assert cache("verify")[:2] == (0, {**cache("verify")[1], "spoiled": []})
    name = sorted(os.listdir(filled / ENTRIES))[0]
    (filled / ENTRIES / name).write_bytes(b"x")
    (filled / ENTRIES / "stray").write_bytes(b"x")
    status, found, _ = cache("verify")
    assert status == 1 and len(found["spoiled"]) == 1
    status, found, _ = cache("gc")
    assert status == 0 and found["swept_files"] == 1 and found["spoiled_entries"] >= 1
    assert cache("verify")[0] == 0


def test_gc_keeps_the_limit(filled, cache):
    status, found, _ = cache("gc", "--gb", 1e-7)
    assert status == 0 and found["evicted_entries"] > 0
    assert cache("ls")[1]["bytes"] <= 107


def test_rm(filled, cache):
    root = cache("ls")[1]["roots"][0]["root"]
    assert cache("rm", root)[1]["removed_entries"] == 3
    assert [r["model"] for r in cache("ls")[1]["roots"]] == ["another"]
    assert cache("rm", "all")[1]["removed_entries"] == 1
    assert os.listdir(filled / ENTRIES) == []
    assert cache("rm", 5)[0] == 1 and cache("rm")[0] == 2


@pytest.mark.parametrize("what", ["agent", "2"])
def test_a_conversation_travels_as_one_file(filled, cache, tmp_path, what):
    file, other = tmp_path / "agent.tar", tmp_path / "other"
    status, found, _ = cache("export", what, file)
    assert (status, found["entries"], found["tokens"]) == (0, 3, 5)
    assert cache("import", file, disk=other)[1]["added_entries"] == 3
    assert cache("import", file, disk=other)[1]["added_entries"] == 0
    assert cache("verify", disk=other)[0] == 0
    assert cache("ls", disk=other)[1]["roots"][0]["tokens"] == 5
    assert cache("export", what, file)[0] == 1, "a file that is there stays"
    assert cache("export", "nobody", tmp_path / "x.tar")[0] == 1


def test_a_file_that_is_spoiled_is_not_imported(filled, cache, tmp_path):
    file, other = tmp_path / "agent.tar", tmp_path / "other"
    cache("export", "agent", file)
    content = bytearray(file.read_bytes())
    place = content.rindex(bytes([4, 5, 4, 5]))
    content[place] ^= 1
    file.write_bytes(content)
    status, _, error = cache("import", file, disk=other)
    assert status == 1 and "spoiled" in error


def test_a_conversation_that_does_not_fit_does_not_take_its_own_room(
    filled, cache, tmp_path
):
    file, other = tmp_path / "agent.tar", tmp_path / "other"
    cache("export", "agent", file)
    status, _, error = cache("import", file, "--gb", 300 / 2**30, disk=other)
    assert status == 1 and "does not fit" in error
    found = cache("verify", disk=other)[1]
    assert found["entries"] == 1 and found["without_parent"] == []


def test_something_else_is_not_imported(cache, tmp_path):
    (tmp_path / "notes.txt").write_text("no archive")
    status, _, error = cache("import", tmp_path / "notes.txt")
    assert status == 1 and error.startswith("error:")


def test_while_a_server_writes(filled, cache):
    server = DiskStore(filled)
    server.open()
    assert cache("ls")[1]["in_use_by_a_server"] is True
    assert cache("verify")[0] == 0
    for words in (["rm", "all"], ["gc"]):
        status, _, error = cache(*words)
        assert status == 1 and "a server uses" in error
    server.close()


def test_no_folder(cache, tmp_path):
    status, _, error = cache("ls", disk=tmp_path / "nowhere")
    assert status == 1 and "no disk cache" in error
    assert not (tmp_path / "nowhere").exists()
