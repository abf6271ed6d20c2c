"""What a disk store holds, for lists."""

from __future__ import annotations

from typing import Any

from .disk_index import SPAN
from .disk_store import DiskStore


def summary(store: DiskStore) -> list[dict[str, Any]]:
    """What is stored, one row a root."""
    totals: dict[int, list[int]] = {}
    for entry in store.all_entries():
        total = totals.setdefault(entry.root, [0, 0, 0, 0])
        total[0] += 1
        total[1] += entry.nbytes
        total[2] += entry.stop - entry.start if entry.kind == SPAN else 0
        total[3] = max(total[3], entry.last_use)
    return [
        {
            "root": number,
            "model": note,
            "identity": identity,
            "salt": salt,
            "entries": totals[number][0],
            "bytes": totals[number][1],
            "tokens": totals[number][2],
            "last_use": totals[number][3],
        }
        for number, identity, salt, _, note in store.all_roots()
        if number in totals
    ]
