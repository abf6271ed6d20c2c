"""What is given to the thread that writes: a path, and what the store is to have of it.

A parcel becomes entries: one span up to each end state that the store lacks, the end
states inside what it has, and another model's part of what was stored without.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .disk_format import path_name, to_file
from .disk_index import COMPANION, SPAN, STATE, Entry, New, split
from .disk_segment import HostSegment
from .disk_sync import Receipt

# Before what stands for the name of a session that has none.
UNNAMED = "~"

# Owner, key and content.
Reply = tuple[str, bytes, bytes]


@dataclass(eq=False)
class Mark:
    """What the store has, or is about to get, of one path.

    Attributes:
        stop: tokens of it.
        states: ends at which an end state is there.
        part: whose part of all these tokens is there too; empty for nobody's.
        numbers: entries that hold it, once they are known.
        alive: whether all that is still so.
    """

    stop: int
    states: frozenset[int] = frozenset()
    part: str = ""
    numbers: frozenset[int] = frozenset()
    alive: bool = True


@dataclass(eq=False)
class Parcel:
    """A path to be written, as far as the store lacks it.

    Attributes:
        root: identity, salt and layout, as the store keeps them.
        ids: the path's token ids, from its beginning.
        parts: consecutive segments up to its end, in host memory; those that are not
            ``whole`` come for their states, or another model's part, alone.
        mark: set to what became of it.
        nbytes: about how much of it goes to disk.
        replies: what ended meanwhile; see ``DiskStore.keep_reply``.
        receipts: told once it is written, or given up.
    """

    root: tuple[str, int, str]
    ids: tuple[int, ...]
    parts: list[HostSegment]
    mark: Mark
    nbytes: int
    turns: tuple[int, ...] = ()
    session: str = ""
    replies: tuple[Reply, ...] = ()
    receipts: list[Receipt] = field(default_factory=list)


@dataclass(frozen=True)
class Stored:
    """What the store has of a parcel's path.

    Attributes:
        spans: those that the path goes through, each with how far it follows it.
        extra: what was kept of them later.
    """

    spans: Sequence[tuple[Entry, int]]
    extra: Sequence[Entry]

    @property
    def covered(self) -> int:
        """Tokens of the path that are there."""
        return self.spans[-1][1] if self.spans else 0

    @property
    def last(self) -> int:
        """The number of the span that the path ends in; 0 for none."""
        return self.spans[-1][0].number if self.spans else 0

    @property
    def session(self) -> str:
        """Whose conversation the path goes on with; a new one's where it does with none.

        A prompt goes on with one if it contains a prompt that was answered there.
        """
        answered = (turn for span, _ in self.spans for turn in split(span.turns))
        if self.spans and any(turn <= self.covered for turn in answered):
            return self.spans[-1][0].session
        return UNNAMED + uuid.uuid4().hex[:12]

    @property
    def numbers(self) -> set[int]:
        """Of all of them."""
        spans = {span.number for span, _ in self.spans}
        return spans | {entry.number for entry in self.extra}


def entries_of(
    parcel: Parcel,
    stored: Stored,
    root: int,
    reserve: Callable[[], int],
    note: str = "",
) -> list[New] | None:
    """What is to be written for a parcel; parents come before what stands on them.

    Args:
        root: its number in the store.
        reserve: gives the number of a new entry.
        note: what the root is called in lists.

    Returns:
        The entries, or None where what the parcel stands on has gone.
    """
    held = [part for part in parcel.parts if part.whole]
    if held and stored.covered < held[0].start:
        return None
    session = parcel.session or stored.session
    packing = _Packing(parcel, stored, root, reserve, note, session)
    packing.add_spans(held)
    packing.add_states()
    packing.add_parts()
    return packing.news


@dataclass
class _Packing:
    """The entries of one parcel; see ``entries_of``."""

    parcel: Parcel
    stored: Stored
    root: int
    reserve: Callable[[], int]
    note: str
    session: str
    news: list[New] = field(default_factory=list)

    def _add(
        self, kind: int, parent: int, parts: Sequence[HostSegment], **more: Any
    ) -> int:
        parcel = self.parcel
        start, stop = parts[0].start, parts[-1].stop
        turns = [turn for turn in parcel.turns if start < turn <= stop]
        row: dict[str, Any] = {
            "number": self.reserve(),
            "parent": parent,
            "kind": kind,
            "start": start,
            "stop": stop,
            "ids": parcel.ids[start:stop] if kind == SPAN else (),
            "turns": ",".join(map(str, turns)),
            "session": self.session,
            **more,
        }
        # Whole files whose row was not written any more are taken in by it.
        text = json.dumps({"root": [*parcel.root, self.note], **row})
        path = path_name(parcel.ids[:stop], repr(parcel.root))
        content, nbytes = to_file(parts, path, text)
        self.news.append(New(root=self.root, chunks=content, nbytes=nbytes, **row))
        return self.news[-1].number

    def add_spans(self, parts: Sequence[HostSegment]) -> None:
        """What the store lacks, one entry up to each end state."""
        covered, parent = self.stored.covered, self.stored.last
        group: list[HostSegment] = []
        for place, part in enumerate(parts):
            if part.stop <= covered:
                continue
            group.append(part.cut(max(part.start, covered), part.stop))
            following = parts[place + 1] if place + 1 < len(parts) else None
            goes_on = following is not None and part.states is None
            if goes_on and _part_name(following) == _part_name(part):
                continue
            parent = self._add(
                SPAN,
                parent,
                group,
                has_state=part.states is not None,
                companion=_part_name(part),
            )
            group = []

    def add_states(self) -> None:
        """End states inside what the store had already."""
        spans, extra = self.stored.spans, self.stored.extra
        there = {span.stop for span, _ in spans if span.has_state}
        there |= {entry.stop for entry in extra if entry.kind == STATE}
        for part in self.parcel.parts:
            beyond = part.stop > self.stored.covered
            if part.states is None or beyond or part.stop in there:
                continue
            below = next(span for span, end in spans if span.start < part.stop <= end)
            only = HostSegment(part.stop, part.stop, [], part.states)
            self._add(STATE, below.number, [only], has_state=True)

    def add_parts(self) -> None:
        """Another model's part of spans that were stored without it."""
        named = {_part_name(part) for part in self.parcel.parts}
        for name in named - {""}:
            there = {e.parent for e in self.stored.extra if e.companion == name}
            for span, end in self.stored.spans:
                if span.companion == name or span.number in there or end < span.stop:
                    continue
                parts = _whole_part(self.parcel.parts, span, name)
                if parts:
                    self._add(COMPANION, span.number, parts, companion=name)


def _part_name(part: HostSegment | None) -> str:
    return "" if part is None or part.part is None else part.part.name


def _whole_part(
    parts: Sequence[HostSegment], span: Entry, name: str
) -> list[HostSegment]:
    """Parts that cover a span with one model's part of it; none if they do not."""
    found: list[HostSegment] = []
    place = span.start
    for part in parts:
        if part.stop <= place or part.start > place or _part_name(part) != name:
            continue
        stop = min(part.stop, span.stop)
        only = HostSegment(part.start, part.stop, [], None, part.part)
        found.append(only.cut(place, stop))
        place = stop
        if place == span.stop:
            return found
    return []
