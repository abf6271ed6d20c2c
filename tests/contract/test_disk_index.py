"""An index that is not what was written: read as far as it can be right, or made anew."""

from __future__ import annotations

import sqlite3

import pytest
import xxhash

from mlx_vlm_cacheplus.core.disk_folder import ENTRIES
from mlx_vlm_cacheplus.core.disk_index import INDEX, SCHEMA
from mlx_vlm_cacheplus.core.disk_store import DiskStore
from tests.contract.disk_entries import file_of, folder, put, store

__all__ = ["folder", "store"]


def damage(text):
    """Carry out a statement behind the store's back; the schema may be written to."""

    def change(folder):
        with sqlite3.connect(folder / INDEX) as index:
            index.execute("PRAGMA writable_schema = ON")
            index.execute(text)
            index.commit()
        index.close()

    return change


def overwrite(old, new):
    """Change bytes of the index file."""

    def change(folder):
        content = (folder / INDEX).read_bytes()
        assert old in content
        (folder / INDEX).write_bytes(content.replace(old, new))

    return change


@pytest.mark.parametrize(
    "change",
    [
        overwrite(b"CREATE TABLE facts", b"CREATE T\xa6BLE facts"),
        overwrite(b"companion TEXT", b"companiom TEXT"),
        damage("UPDATE facts SET value = 'x1' WHERE name = 'clock'"),
        damage("UPDATE roots SET salt = 'no number'"),
        damage("UPDATE roots SET layout = x'a6a6'"),
        damage("UPDATE entries SET turns = CAST(x'a6' AS TEXT)"),
        damage("UPDATE entries SET start = 'text'"),
        damage("UPDATE entries SET name = NULL"),
        damage("UPDATE entries SET parent = number"),
        damage("UPDATE entries SET parent = number + 1"),
        damage("UPDATE entries SET nbytes = 1.5"),
        damage("UPDATE entries SET kv_nbytes = nbytes + 1"),
        damage("UPDATE entries SET state_nbytes = -1"),
        damage("UPDATE entries SET ids = x'01'"),
        damage("UPDATE entries SET number = -number"),
    ],
)
def test_an_index_with_a_lie_is_opened_and_written(folder, change):
    """What can be read of it may be less; nothing is raised, and nothing is wrong."""
    store = DiskStore(folder, max_bytes=2000)
    store.open()
    root = store.root("weights", 0, "layout")
    first = put(store, root, [1, 2])
    put(store, root, [3], first.number, 2)
    store.close()
    change(folder)
    store.open()
    store.sweep()
    for entry, _ in store.walk(store.root("weights", 0, "layout"), [1, 2, 3]):
        store.drop_spoiled(entry)
    store.all_roots()
    for token in range(10, 60):
        store.make_room(250)
        put(store, store.root("weights", 0, "layout"), [token])
    store.close()


def test_an_index_that_breaks_is_made_anew_from_its_files(folder):
    store = DiskStore(folder)
    store.open()
    root = store.root("weights", 0, "layout")
    for token in range(200):
        put(store, root, [token])
    store.close()
    content = bytearray((folder / INDEX).read_bytes())
    middle = len(content) // 2 // 4096 * 4096
    content[middle : middle + 4096] = bytes(4096)
    (folder / INDEX).write_bytes(content)
    store.open()
    store.check()
    assert store.entries == 0 and store.is_writer
    store.close()


def test_a_reply_that_was_changed_is_none(store):
    store.keep_reply("owner", b"key", b"what it was")
    store.keep_reply("owner", b"other", b"tokens")
    with store._writing as writer:
        (content,) = writer.execute(
            "SELECT content FROM replies WHERE key = ?", (b"key",)
        ).fetchone()
        changed = bytes(content[:-1]) + b"!"
        writer.execute(
            "UPDATE replies SET content = ? WHERE key = ?", (changed, b"key")
        )
    assert store.replies("owner") == [b"tokens"]


def test_a_folder_of_an_older_version_is_begun_anew(folder):
    """Its index has other columns, and the checksum of its files was of all of them."""
    store = DiskStore(folder)
    store.open()
    store.close()
    damage("DROP TABLE entries")(folder)
    damage(f"PRAGMA user_version = {SCHEMA - 1}")(folder)
    content = b"".join(file_of(b"keys and values"))
    name = xxhash.xxh3_128_hexdigest(content)
    (folder / ENTRIES / name).write_bytes(content)
    store.open()
    assert store.is_writer and store.entries == 0
    assert store.sweep() == 1 and list(store.folder.names()) == []
    put(store, store.root("weights", 0, "layout"), [1])
    store.close()
