"""What prompts share that is not cached yet, and where a leader's prefill stops for it.

A *leader* is a prompt that is being read, or will be; its *followers* begin as it does
and could restore what it has read.  See ``shared_prefill`` for who waits for whom.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from .boundaries import NEAREST
from .segment_tree import common_prefix

# Tokens.  A follower has a prefill of its own where it would have been a row of another,
# and reading the weights takes as long as computing some tokens: arithmetic in a second
# over bytes in a second, which is 20 to 70 on Apple's chips and about 200 on a data
# centre's.  Sharing fewer than that saves nothing.
WORTH_WAITING = 256
# Leaders whose stops are remembered between admission and prefill.
PLANS = 64


class Prompt:
    """A prompt as far as sharing is concerned.

    Args:
        ids: gives the token ids; called when they are first needed.
        salt: None where nothing may be shared.
        request: what the server has queued; None for a row of the generator.
    """

    def __init__(
        self,
        ids: Callable[[], Sequence[int]],
        salt: int | None,
        request: Any = None,
    ):
        self._read = ids
        self.salt = salt
        self.request = request
        self.leader: str | None = None
        self._restorable_from: int | None = None

    @functools.cached_property
    def ids(self) -> tuple[int, ...]:
        """The token ids."""
        return tuple(self._read())

    def restorable_from(self, media: Collection[int]) -> int:
        """Tokens of the shortest prefix that leaves no picture behind it.

        Found once: it looks at every token, and the generation thread waits.
        """
        from mlx_vlm.apc import media_safe_prefix_min

        if self._restorable_from is None:
            self._restorable_from = media_safe_prefix_min(self.ids, media)
        return self._restorable_from


@dataclass
class Row:
    """A prompt that is being read, or is about to be.

    Attributes:
        done: tokens that have been read; None before the first chunk.
        stops: where its prefill keeps an end state, in tokens; None before it is
            planned.  Stops may be added.
    """

    prompt: Prompt
    done: int | None = None
    stops: list[int] | None = None


def best_leader(
    manager: Any, prompt: Prompt, rows: dict[Any, Row], media: Collection[int]
) -> tuple[Any, int] | None:
    """The row that a prompt should wait for and the tokens it saves it, or None.

    The row's prefill is told to keep an end state there.

    Args:
        manager: the storage manager; its ``segments`` say what is known.
        rows: by name, those that could lead.
        media: token ids of pictures and videos.
    """
    lengths = {
        name: length
        for name, row in rows.items()
        if row.prompt is not prompt and (length := _shared(prompt, row, media))
    }
    if not lengths:
        return None
    name = max(lengths, key=lambda name: lengths[name])
    known = manager.segments.peek(prompt.ids, prompt.salt)
    if lengths[name] - known < WORTH_WAITING:
        return None
    _plan_stop(manager, rows[name], lengths[name])
    return name, lengths[name] - known


def _shared(prompt: Prompt, row: Row, media: Collection[int]) -> int:
    """Tokens that a prompt could restore once a row has been read; 0 if too few."""
    leader = row.prompt
    if prompt.salt is None or leader.salt != prompt.salt:
        return 0
    if row.done is None and len(leader.ids) > len(prompt.ids):
        return 0
    length = min(common_prefix(prompt.ids, leader.ids), len(prompt.ids) - 1)
    if length < WORTH_WAITING:
        return 0
    if row.stops is not None and length <= (row.done or 0):
        return 0  # it has passed there, and keeps nothing there any more
    return length if length >= prompt.restorable_from(media) else 0


def _plan_stop(manager: Any, row: Row, length: int) -> None:
    if row.stops is not None:
        row.stops[:] = _with_stop(row.stops, length)
    if row.done is not None:
        return
    plans = manager.__dict__.setdefault("shared_stops", {})
    key = _key(row.prompt.ids)
    if len(plans) >= PLANS and key not in plans:
        plans.clear()
    plans.setdefault(key, set()).add(length)


def _with_stop(stops: Sequence[int], length: int) -> list[int]:
    """Stops with one more; one shortly before it will do, as all must end in order."""
    if any(length - NEAREST < stop <= length for stop in stops):
        return list(stops)
    if length >= max(stops, default=0):
        return list(stops)
    return sorted({*stops, length})


def _key(ids: Sequence[int]) -> tuple[int, int]:
    return len(ids), hash(tuple(ids))


def add_shared_stops(
    coordinator: Any, token_ids: Sequence[int], stops: Sequence[int]
) -> list[int]:
    """Where a prefill stops, with the places where its followers leave it."""
    plans = getattr(coordinator.manager, "shared_stops", None)
    planned = plans.get(_key(token_ids), ()) if plans and stops else ()
    for length in sorted(planned):
        stops = _with_stop(stops, length)
    return list(stops)
