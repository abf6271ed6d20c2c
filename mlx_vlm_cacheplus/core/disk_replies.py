"""Replies whose tokens are remembered, in the index of a disk store."""

from __future__ import annotations

import sqlite3

import xxhash

DIGEST = 16
MOST_REPLIES = 256


def keep(
    writer: sqlite3.Connection, owner: str, key: bytes, content: bytes, clock: int
) -> None:
    """Remember a reply; the oldest of many go."""
    checked = xxhash.xxh3_128_digest(content) + content
    writer.execute(
        "INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?)",
        (key, owner, checked, clock),
    )
    writer.execute(
        "DELETE FROM replies WHERE key IN (SELECT key FROM replies "
        "ORDER BY last_use DESC LIMIT -1 OFFSET ?)",
        (MOST_REPLIES,),
    )


def of(reader: sqlite3.Connection, owner: str) -> list[bytes]:
    """What was remembered of an owner's replies, the newest last.

    One that is not what was written would have a prompt read in other tokens: it is none.
    """
    rows = reader.execute(
        "SELECT content FROM replies WHERE owner = ? ORDER BY last_use", (owner,)
    )
    return [
        checked[DIGEST:]
        for (checked,) in rows
        if isinstance(checked, bytes)
        and xxhash.xxh3_128_digest(checked[DIGEST:]) == checked[:DIGEST]
    ]


def forget(writer: sqlite3.Connection) -> None:
    """Remember none."""
    writer.execute("DELETE FROM replies")
