"""A newer state of a conversation takes the place of its older ones.

Models whose layers cannot be sliced (recurrent, windowed, composite) are stored as
whole states, in a table with few places.  Each turn adds a state for its prompt and
one for its reply.  Taking the least recently used place for them would push out
other conversations, although the turn has just made its own older states useless:
every state that is a proper prefix of the new one covers less of the same text.

They are dropped only while room is needed, the shortest first, so that with room to
spare a rewritten reply still finds the state at the end of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# The final state of a prompt and one on the stride below it.
CAPTURES_PER_PROMPT = 2


def bounded_captures(lengths: list[int]) -> list[int]:
    """Keep the deepest captures that one prompt plans, in tokens.

    The table's size is also the number of captures that stock plans for one prompt,
    so that a long cold prompt alone would fill a table of any size.
    """
    return lengths[-CAPTURES_PER_PROMPT:]


def make_room_for_successor(
    manager: Any, token_ids: Sequence[int], extra_hash: int, nbytes: int
) -> int:
    """Drop states that a new one supersedes until it fits beside all others.

    Args:
        manager: the cache's storage manager; its table is changed under its lock.
        token_ids: key of the state about to be stored.
        extra_hash: its salt; states under another salt are never touched.
        nbytes: its size, in bytes.

    Returns:
        How many states were dropped.
    """
    table = manager._exact_cache
    ids = tuple(token_ids)
    dropped = 0
    with manager.lock:
        if any(
            e.token_ids == ids and e.extra_hash == extra_hash for e in table.values()
        ):
            return 0  # it takes its own place again
        for key in _superseded(table, ids, int(extra_hash)):
            has_place = len(table) < manager._exact_cache_max
            has_bytes = (
                manager._resident_bytes_locked() + nbytes <= manager.memory_max_bytes
            )
            if has_place and has_bytes:
                break
            del table[key]
            dropped += 1
    return dropped


def _superseded(table: Any, ids: tuple[int, ...], extra_hash: int) -> list[Any]:
    """Keys of the states that are a proper prefix of ``ids``, the shortest first."""
    prefixes = [
        (len(entry.token_ids), key)
        for key, entry in table.items()
        if entry.extra_hash == extra_hash
        and len(entry.token_ids) < len(ids)
        and tuple(entry.token_ids) == ids[: len(entry.token_ids)]
    ]
    return [key for _, key in sorted(prefixes)]
