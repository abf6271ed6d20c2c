"""Entries on disk: found again, private, and one writer's, within a number of bytes."""

from __future__ import annotations

import os
import sqlite3
import stat

import pytest

from mlx_vlm_cacheplus.core.disk_folder import ENTRIES, TEMPORARY, Refused
from mlx_vlm_cacheplus.core.disk_index import COMPANION, SPAN, STATE, pack
from mlx_vlm_cacheplus.core.disk_store import DiskStore
from tests.contract.disk_entries import body_of, content, folder, put, store

__all__ = ["folder", "store"]


def test_a_path_is_found_through_its_spans(store):
    root = store.root("weights", 0, "layout")
    first = put(store, root, [1, 2, 3, 4])
    reply = put(store, root, [5, 6], first.number, 4)
    aside = put(store, root, [9, 9], first.number, 2)  # parts inside the first
    assert [(e.number, n) for e, n in store.walk(root, [1, 2, 3, 4, 5, 7])] == [
        (first.number, 4),
        (reply.number, 5),
    ]
    assert [(e.number, n) for e, n in store.walk(root, [1, 2, 9, 9, 9])] == [
        (first.number, 2),
        (aside.number, 4),
    ]
    assert store.walk(root, [2]) == []
    assert store.ids_of(aside) == [9, 9]
    assert body_of(store, reply) == content([5, 6])


def test_roots_have_nothing_in_common(store):
    mine = store.root("weights", 7, "layout")
    put(store, mine, [1, 2])
    for other in (("weights", 8), ("others", 7)):
        assert store.roots(*other) == []
    assert store.roots("weights", 7) == [(mine, "layout")]
    assert store.walk(mine + 1, [1, 2]) == []


def test_supplements_belong_to_their_span(store):
    root = store.root("weights", 0, "layout")
    span = put(store, root, [1, 2, 3])
    state = put(store, root, [], span.number, 2, STATE, has_state=True)
    of_all = {"companion": "drafter", "stop": 3}
    part = put(store, root, [], span.number, 0, COMPANION, **of_all)
    assert store.supplements([span]) == [state, part]
    assert store.supplements([]) == []
    # An index that was damaged may give a span what is another one's.
    put(store, root, [], span.number, 4, STATE, has_state=True)
    for start, stop in ((0, 2), (0, 4), (1, 3)):
        of_some = {"companion": "drafter", "stop": stop}
        put(store, root, [], span.number, start, COMPANION, **of_some)
    assert store.supplements([span]) == [state, part]


def test_all_is_there_after_a_restart(folder):
    store = DiskStore(folder)
    store.open()
    root = store.root("weights", 0, "layout", "a model")
    entry = put(store, root, [1, 2, 3], turns="2", session="agent")
    clock = store.clock
    store.note({"a": "b"})
    store.close()
    store.open()
    assert (store.entries, store.nbytes, store.clock) == (1, entry.nbytes, clock)
    assert store.walk(root, [1, 2, 3]) == [(entry, 3)]
    assert store.all_roots() == [(root, "weights", 0, "layout", "a model")]
    assert store.recall("a") == "b"
    store.close()


def test_private_from_creation_whatever_the_umask(folder):
    before = os.umask(0)
    try:
        store = DiskStore(folder)
        store.open()
        put(store, store.root("weights", 0, "layout"), [1])
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.lstat().st_mode) for p in folder.rglob("*")}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.rglob("*"):
        assert modes[path.name] == (0o700 if path.is_dir() else 0o600), path
    store.close()


@pytest.mark.parametrize("what", ["writable", "foreign", "file", "other files"])
def test_a_folder_that_is_not_ours_is_refused_with_a_remedy(folder, monkeypatch, what):
    folder.parent.mkdir()
    if what == "file":
        folder.write_text("x")
    else:
        folder.mkdir()
    if what == "writable":
        folder.chmod(0o777)
    if what == "foreign":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    if what == "other files":
        (folder / "thesis.txt").write_text("x")
    with pytest.raises(Refused, match="name a|chmod 700"):
        DiskStore(folder).open()


def test_a_loose_folder_of_ours_is_tightened(folder):
    folder.mkdir(parents=True, mode=0o755)
    DiskStore(folder).open()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_links(folder, store, tmp_path):
    """The folder may be reached through a link; an entry may not be one."""
    root = store.root("weights", 0, "layout")
    entry = put(store, root, [1, 2])
    secret = tmp_path / "secret"
    secret.write_bytes(content([1, 2]))
    place = folder / ENTRIES / entry.name
    place.unlink()
    place.symlink_to(secret)
    with pytest.raises(OSError):
        store.read(entry)
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert DiskStore(link).folder.path == folder


def test_one_writer(folder, store):
    root = store.root("weights", 0, "layout")
    entry = put(store, root, [1, 2])
    part = folder / ENTRIES / ("theirs" + TEMPORARY)
    part.write_bytes(b"in flight")
    second = DiskStore(folder)
    second.open()
    assert not second.is_writer
    assert body_of(second, second.walk(root, [1, 2])[0][0]) == content([1, 2])
    for write in (
        lambda: put(second, root, [3]),
        lambda: second.touch([entry.number]),
        lambda: second.drop([entry]),
        lambda: second.sweep(),
    ):
        with pytest.raises(OSError):
            write()
    assert part.exists() and not second.try_to_write()
    store.close()
    assert second.try_to_write()
    put(second, root, [3])
    second.close()


def test_the_cap(folder):
    store = DiskStore(folder, max_bytes=100_000)
    store.open()
    root = store.root("weights", 0, "layout")
    first = put(store, root, [1], body=bytes(28_000))
    leaf = put(store, root, [2], first.number, 1, body=bytes(28_000))
    other = put(store, root, [7], body=bytes(28_000))
    store.touch([first.number, leaf.number])
    assert store.make_room(5_000) == []
    assert store.make_room(100_001) is None, "it would never fit"
    assert store.entries == 3, "and nobody goes for it"
    assert store.make_room(30_000) == [other]
    assert [e.number for e, _ in store.walk(root, [1, 2])] == [
        first.number,
        leaf.number,
    ]
    assert [e.number for e in store.make_room(90_000)] == [leaf.number, first.number]
    assert list(store.folder.names()) == [] and store.nbytes == 0
    store.close()


def test_a_root_outlives_the_room_that_is_made_for_it(folder):
    """Nothing of it is there yet, and what goes takes the roots that have nothing left."""
    store = DiskStore(folder, max_bytes=100_000)
    store.open()
    put(store, store.root("others", 0, "layout"), [1], body=bytes(90_000))
    mine = store.root("weights", 0, "layout")
    assert len(store.make_room(50_000, root=mine)) == 1
    entry = put(store, mine, [1, 2], body=bytes(50_000))
    assert store.roots("weights", 0) == [(mine, "layout")]
    assert store.roots("others", 0) == []
    assert store.walk(store.root("weights", 0, "layout"), [1, 2]) == [(entry, 2)]
    assert store.walk(store.root("others", 0, "layout"), [1, 2]) == []
    store.close()


def test_whoever_evicts_says_the_order(folder):
    store = DiskStore(folder, max_bytes=100_000)
    store.open()
    root = store.root("weights", 0, "layout")
    entries = [put(store, root, [token], body=bytes(28_000)) for token in (1, 2, 3)]
    child = put(store, root, [4], entries[2].number, 1, body=bytes(5_000))

    def order(found):
        # A parent that is named before its child stays.
        return [entries[2].number, entries[1].number, entries[0].number]

    assert store.make_room(30_000, order) == [entries[1]]
    assert set(store.folder.names()) == {
        entries[0].name,
        entries[2].name,
        child.name,
    }
    store.close()


def test_a_large_folder_is_opened_without_reading_it(folder, store, monkeypatch):
    """100,000 entries: the files are not even there."""
    root = store.root("weights", 0, "layout")
    rows = [
        (root, 0, SPAN, 0, 1, n, pack([n]), f"{n:032x}", 10, b"", 0, "", n, "", "", n)
        + (5, 0, 0)
        for n in range(100_000)
    ]
    with store._writing as writer:
        writer.executemany(
            "INSERT INTO entries (root, parent, kind, start, stop, first, ids, name, "
            "nbytes, checksum, has_state, companion, last_use, turns, session, born, "
            f"kv_nbytes, state_nbytes, part_nbytes) VALUES ({', '.join('?' * 19)})",
            rows,
        )
    store.close()
    steps = []
    real = sqlite3.connect

    def watched(*args, **kwargs):
        connection = real(*args, **kwargs)
        connection.set_progress_handler(lambda: steps.append(1), 100_000)
        return connection

    monkeypatch.setattr(sqlite3, "connect", watched)
    store.open()
    assert (store.entries, store.nbytes) == (100_000, 1_000_000)
    # A count and a sum: a few instructions a row, whatever the entries hold.
    assert len(steps) <= 20
    assert store.walk(root, [5])[0][0].name == f"{5:032x}"
