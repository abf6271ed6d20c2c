"""A store in a folder of its own, and entries to put into it."""

from __future__ import annotations

import pytest

from mlx_vlm_cacheplus.core.disk_index import SPAN, New
from mlx_vlm_cacheplus.core.disk_safetensors import Array, head_of
from mlx_vlm_cacheplus.core.disk_sections import digest, pack_head
from mlx_vlm_cacheplus.core.disk_store import DiskStore


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "segments"


@pytest.fixture
def store(folder):
    with_writer = DiskStore(folder)
    with_writer.open()
    yield with_writer
    with_writer.close()


def content(ids, size=64):
    return bytes(i % 251 for i in ids) * (1 + size // max(1, len(ids)))


def file_of(body, **others):
    """A file's content: keys and values that are these bytes, and other sections."""
    bodies = {"kv": body, **others}
    arrays = {f"{name}.0": Array("U8", (len(b),), len(b)) for name, b in bodies.items()}
    digests = {name: digest([b]) for name, b in bodies.items()}
    return [pack_head(arrays, digests, {}), *bodies.values()]


def body_of(store, entry):
    """All sections of an entry."""
    found = store.read(entry)
    return bytes(found[len(head_of(found)) :])


def put(store, root, ids, parent=0, start=0, kind=SPAN, **more):
    chunks = file_of(more.pop("body", content(ids or [1])), **more.pop("others", {}))
    new = New(
        store.reserve(),
        root,
        parent,
        kind,
        start,
        more.pop("stop", start + len(ids)),
        ids,
        chunks,
        sum(map(len, chunks)),
        **more,
    )
    (entry,) = store.add([new])
    return entry
