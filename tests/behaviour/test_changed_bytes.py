"""One byte of what is stored is another one: it is found out, or it changes nothing.

With a drafter its part is stored too: what it proposes is what it proposed when no part
of it was on disk, round by round, so that as much is accepted.
"""

from __future__ import annotations

import collections
import itertools
import json
import random
import shutil
from pathlib import Path

import pytest

from tests.behaviour.test_durable_disk import (
    folder,
    restart,
    said,
    statistics,
    talk,
    written,
)

pytestmark = pytest.mark.change("durable-disk")
__all__ = ["folder"]

TURNS = 2
# A file, and bytes of it.
Bytes = tuple[Path, range]


def drafters_arrays(path: Path) -> list[Bytes]:
    """Where a stored entry holds what is a drafter's."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    places = [
        array["data_offsets"]
        for name, array in header.items()
        if name.startswith("part.")
    ]
    return [(path, range(8 + size + a, 8 + size + b)) for a, b in places]


def regions(folder: Path) -> dict[str, list[Bytes]]:
    """What is stored, by what it is: entries, the index, and a drafter's part of entries."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.stat().st_size]
    entries = [path for path in files if path.parent.name == "entries"]
    index = [path for path in files if "sqlite" in path.name]
    assert index and entries
    return {
        "entries": [(path, range(path.stat().st_size)) for path in entries],
        "index": [(path, range(path.stat().st_size)) for path in index],
        "part": [place for path in entries for place in drafters_arrays(path)],
    }


def change_one(rng: random.Random, places: list[Bytes]) -> tuple[Path, int]:
    """Change a byte, each as likely as any other of these; says where."""
    ((path, among),) = rng.choices(places, [len(among) for _, among in places])
    place = rng.choice(among)
    content = bytearray(path.read_bytes())
    content[place] ^= rng.randrange(1, 256)
    path.write_bytes(content)
    return path, place


def store(make_server, folder, model, drafter):
    """A server, and what it said and drafted while it stored all of a talk.

    The first turn's prompt was stored without the drafter, so that there are both forms
    of its part: beside the target's, and what was added later.
    """
    if drafter:
        server = make_server(model, disk=folder)
        talk(server, 1)
        written(server)
    server = make_server(model, disk=folder, draft_model=drafter)
    want = said(server, TURNS)
    restart(server)
    server.host.app_module.unload_model_sync()
    return server, want


CASES = [
    ("hybrid", None, 13),
    ("dense", None, 12),
    ("hybrid", "hybrid-mtp", 12),
    ("dense", "dense-eagle3", 12),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("model", "drafter", "changes"),
    [
        *CASES,
        *(
            pytest.param(model, drafter, 250, marks=pytest.mark.slow)
            for model, drafter, _ in CASES
        ),
    ],
)
def test_a_changed_byte_changes_no_token(
    make_server, folder, tmp_path, record_property, model, drafter, changes
):
    """A server that starts with it serves as without, and drafts as without."""
    server, want = store(make_server, folder, model, drafter)
    whole, rng = shutil.copytree(folder, tmp_path / "whole"), random.Random(changes)
    kinds = [kind for kind, places in regions(folder).items() if places]
    assert ("part" in kinds) == bool(drafter)
    counts = collections.Counter()
    for kind in itertools.islice(itertools.cycle(kinds), changes):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        where = change_one(rng, regions(folder)[kind])
        server.host.use(server.settings)
        assert said(server, TURNS) == want, where
        stats = statistics(server)
        counts[f"{kind} changed"] += 1
        counts[f"{kind} found out"] += bool(stats.get("disk_spoiled_entries"))
        counts["used"] += bool(stats.get("disk_restores"))
        server.host.app_module.unload_model_sync()
    record_property("counts", dict(counts))
    # What was not changed is used, and what is read and was changed is found out.
    assert counts["used"]
    assert all(counts[f"{kind} found out"] for kind in kinds if kind != "index")
