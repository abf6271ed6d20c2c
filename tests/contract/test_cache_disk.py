"""`mlx-vlm-cacheplus cache ls|show|verify|rm|gc|export|import` on a folder without a server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
from types import SimpleNamespace

import pytest

from mlx_vlm_cacheplus import cli
from mlx_vlm_cacheplus.changes import durable_disk
from mlx_vlm_cacheplus.changes.durable_disk import FOLDER, LIMIT
from mlx_vlm_cacheplus.commands.cache_file import ROOT
from mlx_vlm_cacheplus.core import disk_coordination
from mlx_vlm_cacheplus.core.disk_folder import ENTRIES
from mlx_vlm_cacheplus.core.disk_settings import size_text
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


@pytest.fixture
def refused(capsys):
    """refused(words...) -> the one line that a mistake gets."""

    def run(*words):
        assert cli.main(["cache", *map(str, words)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1
        return err

    return run


def test_a_table_is_whole_in_a_pipe_and_its_figures_have_units(folder, capsys):
    model = "/" + "a-folder/" * 20 + "model"
    with contextlib.closing(DiskStore(folder, 20 << 30)) as store:
        store.open()
        root = store.root("weights", 0, "[]", model)
        put(store, root, [1, 2])
        nbytes = put(store, root, [3, 4]).nbytes + store.nbytes // 2
    assert cli.main(["cache", "ls", "--disk", str(folder)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{folder}: {nbytes} B of 20 GB\n") and model in text
    assert "last_use" not in text and "last use" in text and "0 steps ago" in text
    assert "a step is" in text
    assert cli.main(["cache", "show", "1", "--disk", str(folder)]) == 0
    assert "1 step ago" in capsys.readouterr().out


def test_a_limit_that_is_none_is_refused_as_the_server_refuses_it(
    filled, refused, monkeypatch, tmp_path
):
    at = ("--disk", filled)
    words = "a number of GB of at least 0; 0 is no limit"
    for text in ("x", "-1", "nan", "inf", "1e308", ""):
        for command in (["gc"], ["ls"], ["import", tmp_path / "none.tar"]):
            error = refused(*command, "--gb", text, *at)
            assert error == f"error: --gb={text!r}: {words}\n"
    monkeypatch.setenv(LIMIT, "x")
    assert refused("ls", *at) == f"error: {LIMIT}='x': {words}\n"
    monkeypatch.delenv(LIMIT)
    monkeypatch.setenv("APC_DISK_MAX_GB", "x")
    assert "APC_DISK_MAX_GB='x' is not a number" in refused("gc", *at)


def test_what_only_a_server_needs_is_not_read(filled, cache, monkeypatch):
    monkeypatch.setenv("APC_DISK_QUEUE_MAX_GB", "x")
    monkeypatch.setenv("APC_DISK_SYNC", "x")
    assert cache("ls")[0] == 0


def test_a_setting_that_keeps_nothing_is_named(refused, monkeypatch):
    assert "--disk='off' keeps nothing on disk" in refused("ls", "--disk", "off")
    assert refused("ls", "--disk", "").endswith("name a folder, or off\n")
    assert "~nobody-9" in refused("ls", "--disk", "~nobody-9/there")
    for name, value in (
        (FOLDER, "off"),
        ("APC_DISK_ENABLED", "0"),
        ("APC_DISK_PATH", ""),
    ):
        monkeypatch.setenv(name, value)
        error = refused("ls")
        assert f"{name}={value!r} keeps nothing" in error and "--disk DIR" in error
        monkeypatch.delenv(name)


def test_a_folder_that_is_no_cache_is_left_as_it_is(refused, tmp_path, monkeypatch):
    folder, file = tmp_path / "other", tmp_path / "file"
    folder.mkdir(mode=0o755)
    file.touch()
    for command in (["ls"], ["show", "1"], ["verify"], ["rm", "all"], ["gc"]):
        error = refused(*command, "--disk", folder)
        assert f"no disk cache at {folder}" in error and "--disk DIR" in error
        assert "not a folder" in refused(*command, "--disk", file)
    assert not os.listdir(folder) and folder.stat().st_mode & 0o777 == 0o755
    (folder / "notes").touch()
    assert "no disk cache" in refused("ls", "--disk", folder)

    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", forbidden)
        assert "(Permission denied)" in refused("ls", "--disk", folder)


def test_words_that_are_missing_or_have_no_meaning(filled, refused):
    at = ("--disk", filled)
    for words in (["ls", "x"], ["show", "1", "x"], ["import", "file", "x"]):
        assert f"error: {words[0]} takes no 'x'" in refused(*words, *at)
    for words in (["sessions", "x"], ["pin", "a", "x"], ["reset", "x"]):
        error = refused(*words, "--url", "http://127.0.0.1:9")
        assert f"error: {words[0]} takes no 'x'" in error
    assert "needs a session or the number of an entry and a" in refused("export", *at)
    assert "needs a file to write" in refused("export", "agent", *at)
    assert "needs a file that" in refused("import", *at)
    assert "the number of a root, not 'x'" in refused("show", "x", *at)
    assert "or all, not '\u00b2'" in refused("rm", "\u00b2", *at)
    assert "cache sessions" in refused("forget")


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
    kept = file.read_bytes()
    status, _, error = cache("export", what, file)
    assert status == 2 and f"{file} is there already" in error
    assert file.read_bytes() == kept
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


def archive(path, **files):
    """A tar file of these, each name with what is in it."""
    with tarfile.open(path, "w") as out:
        for name, content in files.items():
            info = tarfile.TarInfo(name.replace("_", "."))
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return path


def test_something_else_is_not_imported(folder, refused, tmp_path):
    (tmp_path / "notes.txt").write_text("no archive")
    (tmp_path / "empty").touch()
    rows = json.dumps({"root": dict.fromkeys(ROOT, ""), "entries": [[]]}).encode()
    for file in (
        tmp_path / "notes.txt",
        tmp_path / "empty",
        archive(tmp_path / "a.tar", notes=b"x"),
        archive(tmp_path / "b.tar", manifest_json=b"{"),
        archive(tmp_path / "c.tar", manifest_json=b"[]"),
        archive(tmp_path / "d.tar", manifest_json=b'{"root": {}}'),
        archive(tmp_path / "e.tar", manifest_json=rows),
    ):
        error = refused("import", file, "--disk", folder)
        assert f"{file} is not a whole file of `cache export` (" in error
    for file in (tmp_path / "nowhere", tmp_path):
        error = refused("import", file, "--disk", folder)
        assert f"{file} cannot be read (" in error and "Errno" not in error
    assert not folder.exists()


def test_a_file_that_is_damaged_is_named(filled, cache, refused, tmp_path):
    file, other = tmp_path / "agent.tar", tmp_path / "other"
    cache("export", "agent", file)
    content = file.read_bytes()
    with tarfile.open(file) as source:
        manifest, *_, last = source.getmembers()
    file.write_bytes(content[: last.offset_data + 1])
    assert "unexpected end" in refused("import", file, "--disk", other)
    file.write_bytes(content[: last.offset])
    error = refused("import", file, "--disk", other)
    assert f"entry {last.name} is not in it" in error and not other.exists()
    place = content.index(b'"parent": 0', manifest.offset_data)
    file.write_bytes(content[:place] + b'"parent": 9' + content[place + 11 :])
    status, _, error = cache("import", file, disk=other)
    assert status == 1 and f"{file} is damaged (9 is not in it)" in error


def test_where_an_export_cannot_be_written_is_said_first(filled, refused, tmp_path):
    at = ("--disk", filled)
    error = refused("export", "nobody", tmp_path / "no" / "x.tar", *at)
    assert f"there is no folder {tmp_path / 'no'}: make it" in error
    assert f"{tmp_path} is a folder" in refused("export", "nobody", tmp_path, *at)


def test_a_folder_with_other_files_takes_nothing_in(filled, cache, refused, tmp_path):
    file, other = tmp_path / "agent.tar", tmp_path / "other"
    cache("export", "agent", file)
    other.mkdir(mode=0o700)
    (other / "notes").touch()
    assert "name an empty folder" in refused("import", file, "--disk", other)


def test_while_a_server_writes(filled, cache):
    server = DiskStore(filled)
    server.open()
    assert cache("ls")[1]["in_use_by_a_server"] is True
    assert cache("verify")[0] == 0
    for words in (["rm", "all"], ["gc"]):
        status, _, error = cache(*words)
        assert status == 1 and "a server uses" in error
    server.close()


def test_a_folder_that_no_server_has_made_yet_is_no_mistake(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("MLX_VLM_CACHE_HOME", str(tmp_path / "home"))
    assert cli.main(["cache", "ls"]) == 1
    assert "a server with --cacheplus makes one" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_no_folder(cache, tmp_path):
    status, _, error = cache("ls", disk=tmp_path / "nowhere")
    assert status == 2 and "no disk cache" in error
    assert not (tmp_path / "nowhere").exists()


def test_server_and_command_say_one_size_in_one_unit(
    filled, capsys, caplog, monkeypatch
):
    """A GB is of 2**30 bytes, as in stock's APC_DISK_MAX_GB; a tier's own line says the same."""
    monkeypatch.setenv(LIMIT, "20")
    assert durable_disk.describe_disk(None).endswith(", 20 GB")
    caplog.set_level("INFO", disk_coordination.logger.name)
    assert cli.main(["cache", "ls", "--disk", str(filled)]) == 0
    listed = capsys.readouterr().out.split("\n")[0].removeprefix(f"{filled}: ")
    with contextlib.closing(DiskStore(filled, 20 << 30)) as store:
        store.open()
        disk_coordination._say_found(SimpleNamespace(store=store, identity="others"))
        (mine,) = [e.nbytes for e in store.all_entries() if e.stop == 30]
    assert listed.endswith(" of 20 GB")
    assert f"1 entries, {mine} B for this model; {listed} in use" in caplog.text


@pytest.mark.parametrize(
    "nbytes, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KB"),
        (3 << 20, "3 MB"),
        (1500 << 30, "1500 GB"),
    ],
)
def test_sizes_for_people(nbytes, text):
    assert size_text(nbytes) == text
