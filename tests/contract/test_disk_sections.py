"""A file's sections: each one is read and checked alone, and what is not wanted is not read."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace

import pytest

from mlx_vlm_cacheplus import cli
from mlx_vlm_cacheplus.core import disk_ahead, disk_folder, disk_sections
from mlx_vlm_cacheplus.core.disk_folder import ENTRIES, TEMPORARY
from mlx_vlm_cacheplus.core.disk_format import from_sections
from mlx_vlm_cacheplus.core.disk_index import COMPANION, STATE, Entry
from mlx_vlm_cacheplus.core.disk_plan import wanted_of
from mlx_vlm_cacheplus.core.disk_safetensors import head_of
from mlx_vlm_cacheplus.core.disk_sections import ORDER, Changed, check, digest
from mlx_vlm_cacheplus.core.disk_store import DiskStore, Spoiled
from tests.contract.disk_entries import folder, put, store
from tests.contract.disk_server import quick, server_entries, session, start
from tests.contract.test_disk_format import WRITTEN

__all__ = ["folder", "quick", "start", "store"]

CHECKSUM = digest([head_of(WRITTEN)])


BLANK = Entry(*(1, 1, 0, 0, 0, 1, "", 0, b"", False, "", 0, "", "", 0))


def write(folder, content):
    """A file in a folder, and what stands for it in the index."""
    name = CHECKSUM.hex()
    (folder.path / ENTRIES / name).write_bytes(content)
    return entry(name=name, checksum=CHECKSUM, nbytes=len(content))


def entry(number=1, start=0, stop=1, kind=0, **more):
    return replace(BLANK, number=number, start=start, stop=stop, kind=kind, **more)


WAYS = [set(w) for n in range(4) for w in itertools.combinations(ORDER, n)]


@pytest.mark.parametrize("wanted", WAYS, ids="+".join)
def test_sections_are_read_alone(store, wanted):
    found = from_sections(*store.read_sections(write(store.folder, WRITTEN), wanted))
    assert found.metadata["path"] == "the path" and found.stop == 5
    assert found.start == (2 if "kv" in wanted else 5)
    keys = [a.data.ravel().tolist() for sides in found.spans for a in sides]
    assert keys == ([[0, 1, 8, 2, 3, 9]] if "kv" in wanted else [])
    states = None if found.states is None else found.states[0].arrays[0].data.tolist()
    assert states == ([[7.0]] if "state" in wanted else None)
    assert (found.part is not None) == ("part" in wanted)
    if found.part is not None:
        assert found.part.spans[0][0].data.ravel().tolist() == [1, 2, 3]
        assert found.part.pending.data.item() == 5


@pytest.mark.parametrize("wanted", WAYS, ids="+".join)
def test_a_changed_byte_of_what_is_read_is_found(store, wanted):
    """Each byte of the head and of these sections; no other one is of interest."""
    sections = check(WRITTEN, CHECKSUM).sections
    read = set(range(len(head_of(WRITTEN))))
    for name in wanted:
        read |= set(range(sections[name].start, sections[name].stop))
    for place in range(len(WRITTEN)):
        content = bytearray(WRITTEN)
        content[place] ^= 4
        spoiled = write(store.folder, content)
        with pytest.raises(Spoiled):
            store.read(spoiled)
        if place in read:
            with pytest.raises(Spoiled):
                store.read_sections(spoiled, wanted)
        else:
            store.read_sections(spoiled, wanted)
    for content in (b"", WRITTEN[:-1], WRITTEN + b"x", WRITTEN[: len(WRITTEN) - 20]):
        with pytest.raises(Spoiled):
            store.read_sections(write(store.folder, content), wanted)


def test_a_head_may_not_give_an_array_to_another_section():
    for old, new in [
        (b'[[\\"kv\\", 12', b'[[\\"kv\\", 10'),
        (b'"data_offsets":[12,16]', b'"data_offsets":[11,15]'),
        (b'[\\"part\\", 4', b'[\\"port\\", 4'),
        (b'[\\"part\\", 4', b'[\\"part\\", 3'),
        (b'"sections":', b'"sectiens":'),
    ]:
        assert old in WRITTEN
        content = WRITTEN.replace(old, new)
        with pytest.raises(Changed):
            check(content, digest([head_of(content)]))


def test_a_section_is_hashed_in_blocks(store, monkeypatch):
    monkeypatch.setattr(disk_sections, "BLOCK", 5)
    found = store.read_sections(write(store.folder, WRITTEN), {"kv"})[1]
    assert bytes(found["kv"]) == WRITTEN[-20:-8]


def test_the_index_knows_how_large_sections_are(store):
    """So that what a read costs is known before any file is opened; a stray's row too."""
    root = store.root("weights", 0, "layout")
    others = {"state": bytes(5_000), "part": bytes(70)}
    kept = put(store, root, [1, 2], body=bytes(300), others=others)
    assert (kept.kv_nbytes, kept.state_nbytes, kept.part_nbytes) == (300, 5_000, 70)
    assert store.all_entries() == [kept]
    (wanted,) = wanted_of([(kept, 2)], [], 0, 2, lambda name: False)
    assert wanted.nbytes == kept.nbytes - 5_070


@pytest.mark.parametrize("name", ORDER)
def test_what_is_not_read_is_found_by_verify(store, capsys, name):
    root = store.root("weights", 0, "layout")
    others = {"state": bytes(50), "part": bytes(7)}
    kept = put(store, root, [1, 2], body=bytes(300), others=others)
    path = store.folder.path / ENTRIES / kept.name
    content = bytearray(path.read_bytes())
    content[check(content, kept.checksum).sections[name].start] ^= 1
    path.write_bytes(content)
    store.read_sections(kept, set(ORDER) - {name})
    store.close()
    words = ["cache", "verify", "--json", "--disk", str(store.folder.path)]
    assert cli.main(words) == 1
    (spoiled,) = json.loads(capsys.readouterr().out)["spoiled"]
    assert spoiled["entry"] == kept.number and name in spoiled["why"]


@pytest.mark.parametrize("suffix", ["", TEMPORARY])
def test_a_stray_is_taken_in_if_all_of_its_sections_are_whole(start, tmp_path, suffix):
    server = start("hybrid")
    server.turn([1, 2, 3], [4])
    server.stop()
    for kept in server_entries(server):
        path = tmp_path / "disk" / ENTRIES / kept.name
        whole = path.read_bytes()
        for place in (len(whole) - 1, len(head_of(whole)), len(whole) // 2, None):
            copy = tmp_path / f"copy {kept.number} {place}"
            shutil.copytree(tmp_path / "disk", copy)
            for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
                (copy / name).unlink(missing_ok=True)
            content = bytearray(whole)
            if place is not None:
                content[place] ^= 1
            (copy / ENTRIES / kept.name).unlink()
            (copy / ENTRIES / (kept.name + suffix)).write_bytes(content)
            (copy / "index.sqlite").touch()
            other = DiskStore(copy)
            other.open()
            other.sweep()
            names = {e.name for e in other.all_entries()}
            assert (kept.name in names) == (place is None)
            other.close()


# -- what is wanted of a path ------------------------------------------------------------
def sections_of(wanted):
    return [(w.entry.number, w.stop, "+".join(sorted(w.sections))) for w in wanted]


def turns(count, **more):
    """So many spans of 10 tokens, each with an end state."""
    return [
        entry(n, 10 * (n - 1), 10 * n, has_state=True, **more)
        for n in range(1, count + 1)
    ]


def whole(spans):
    return [(span, span.stop) for span in spans]


def test_states_of_turns_that_were_superseded_are_not_wanted():
    wanted = wanted_of(whole(turns(5)), [], 0, 50, lambda name: False)
    assert sections_of(wanted) == [
        (1, 10, "kv+state"),
        (2, 20, "kv"),
        (3, 30, "kv"),
        (4, 40, "kv"),
        (5, 50, "kv+state"),
    ]


def test_a_state_alone_is_wanted_where_ram_has_the_tokens():
    wanted = wanted_of(whole(turns(3)), [], 30, 30, lambda name: False)
    assert sections_of(wanted) == [(3, 30, "state")]
    wanted = wanted_of(whole(turns(3)), [], 25, 30, lambda name: False)
    assert sections_of(wanted) == [(3, 30, "kv+state")]


def test_a_drafters_part_is_wanted_with_the_state_behind_it():
    """Where it was added later, that one; another drafter's is of no use."""
    spans = turns(4, companion="drafter")
    spans[2:] = [entry(3, 20, 30, has_state=True), entry(4, 30, 40, has_state=True)]
    later = entry(5, 10, 20, COMPANION, parent=2, companion="drafter")
    wanted = wanted_of(whole(spans), [later], 0, 40, lambda name: name == "drafter")
    assert sections_of(wanted) == [
        (1, 10, "kv+part+state"),
        (2, 20, "kv+state"),
        (5, 20, "part"),
        (3, 30, "kv"),
        (4, 40, "kv+state"),
    ]
    wanted = wanted_of(whole(spans), [], 0, 40, lambda name: False)
    assert not any("part" in sections for _, _, sections in sections_of(wanted))


def test_a_path_that_leaves_a_span_has_no_use_for_its_state():
    spans = turns(2)
    aside = entry(3, 5, 12, has_state=True)
    wanted = wanted_of([(spans[0], 5), (aside, 12)], [], 0, 12, lambda name: False)
    assert sections_of(wanted) == [(1, 5, "kv"), (3, 12, "kv+state")]
    kept = entry(4, 5, 5, STATE, parent=1, has_state=True)
    wanted = wanted_of([(spans[0], 7)], [kept], 0, 5, lambda name: False)
    assert sections_of(wanted) == [(1, 5, "kv"), (4, 5, "state")]


# -- what is read ------------------------------------------------------------------------
@pytest.fixture
def read(monkeypatch):
    """Bytes that were read of files, one number a call."""
    counts = []
    real = disk_folder.PlainFile.read_into

    def read_into(file, start, view):
        counts.append(len(view))
        real(file, start, view)

    monkeypatch.setattr(disk_folder.PlainFile, "read_into", read_into)
    return counts


@pytest.fixture(params=[1 << 30, 1], ids=["one thread", "several"])
def threads(request, monkeypatch):
    monkeypatch.setattr(disk_ahead, "BYTES_A_THREAD", request.param)


@pytest.mark.usefixtures("threads")
def test_a_restart_reads_two_states_of_a_long_conversation(start, read):
    """The one at its end and the first one; the bytes that are counted are those read."""
    server = start("hybrid")
    talk = session(9)
    for prompt, reply in talk:
        server.turn(prompt, reply)
        server.flush()
    server.stop()
    entries = server_entries(server)
    states = [e.state_nbytes for e in entries if e.has_state]
    assert len(states) > 5 and min(states) > 0
    unread = sum(sorted(states)[: len(states) - 2])
    prompt, reply = talk[-1]
    server = start("hybrid")
    asked = []
    server.tier.reader._worth = lambda *sizes: asked.append(sizes) or True
    read.clear()
    length = len(prompt) + len(reply)
    assert server.ask([*prompt, *reply, 0])[0] == length
    assert sum(read) == sum(e.nbytes for e in entries) - unread
    assert asked == [(sum(read), length)]
    assert server.tier.reader.rate > 0


@pytest.mark.usefixtures("threads")
def test_a_state_on_the_way_is_read_where_the_end_is_spoiled(start):
    server = start("hybrid")
    talk = session(5)
    for prompt, reply in talk:
        server.turn(prompt, reply)
    server.stop()
    *before, last = sorted(server_entries(server), key=lambda e: e.stop)
    path = server.store.folder.path / ENTRIES / last.name
    path.write_bytes(path.read_bytes()[:-1])
    ids = [*talk[-1][0], *talk[-1][1], 0]
    server = start("hybrid")
    assert server.ask(ids)[0] == max(e.stop for e in before if e.has_state) > 0


def test_what_is_read_is_looked_at_in_place():
    head = check(WRITTEN, CHECKSUM)
    kv = head.sections["kv"]
    view = memoryview(bytearray(WRITTEN[kv.start : kv.stop]))
    found = from_sections(head, {"kv": view})
    view[0] = 99
    assert found.spans[0][0].data.ravel()[0] == 99
