"""One byte of what is stored is another one: it is found out, or it changes nothing."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.behaviour.test_durable_disk import folder, restart, statistics, talk

pytestmark = pytest.mark.change("durable-disk")
__all__ = ["folder"]


def change_one(rng: random.Random, files: list[Path]) -> str:
    """Change a byte anywhere in these files; says where.  Each file is as likely as it is long."""
    (path,) = rng.choices(files, [file.stat().st_size for file in files])
    content = bytearray(path.read_bytes())
    place = rng.randrange(len(content))
    before = content[place]
    content[place] ^= rng.randrange(1, 256)
    path.write_bytes(content)
    return f"{path.name}, byte {place}: {before} to {content[place]}"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("model", "drafter", "changes"),
    [
        ("hybrid", None, 13),
        ("dense", None, 12),
        *(
            pytest.param(model, drafter, 250, marks=pytest.mark.slow)
            for model, drafter in [
                ("hybrid", None),
                ("dense", None),
                ("hybrid", "hybrid-mtp"),
                ("dense", "dense-eagle3"),
            ]
        ),
    ],
)
def test_a_changed_byte_changes_no_token(
    make_server, folder, tmp_path, model, drafter, changes
):
    """The index and the entries in turn; a server that starts with it serves as without."""
    server = make_server(model, disk=folder, draft_model=drafter)
    want = [reply.ids for reply in talk(server, 2)]
    restart(server)
    server.host.app_module.unload_model_sync()
    whole, rng = shutil.copytree(folder, tmp_path / "whole"), random.Random(changes)
    found_out, used = 0, 0
    for number in range(changes):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        every = [p for p in folder.rglob("*") if p.is_file() and p.stat().st_size]
        index = [path for path in every if "sqlite" in path.name]
        entries = [path for path in every if path.parent.name == "entries"]
        assert index and entries
        where = change_one(rng, index if number % 2 else entries)
        server.host.use(server.settings)
        replies = talk(server, 2)
        assert [reply.ids for reply in replies] == want, where
        found_out += statistics(server).get("disk_spoiled_entries", 0)
        used += any(reply.cached_tokens for reply in replies[:1])
        server.host.app_module.unload_model_sync()
    # What was not changed is used, and what is read and was changed is found out.
    assert used and found_out
