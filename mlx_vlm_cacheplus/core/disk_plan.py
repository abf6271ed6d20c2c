"""What is read of a path's entries: of each one the sections that are of use."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .disk_index import COMPANION, STATE, Entry
from .disk_sections import KV, PART
from .disk_sections import STATE as STATES

# Entries that a path goes through, each with how many of its tokens they share.
Spans = Sequence[tuple[Entry, int]]


@dataclass(frozen=True)
class Wanted:
    """An entry to be read.

    Attributes:
        stop: tokens of the path that are of use.
        sections: see ``disk_sections``.
    """

    entry: Entry
    stop: int
    sections: frozenset[str]

    @property
    def nbytes(self) -> int:
        """What is read of its file, as the index has it: its head, and these sections."""
        entry = self.entry
        sizes = {
            KV: entry.kv_nbytes,
            STATES: entry.state_nbytes,
            PART: entry.part_nbytes,
        }
        return entry.nbytes - sum(
            size for name, size in sizes.items() if name not in self.sections
        )


@dataclass(frozen=True)
class Plan:
    """What to read of one root.

    Attributes:
        length: tokens that can be restored then.
        numbers: of the spans of the path, those that are not read too.
        root: identity, salt and layout, as the store keeps them.
    """

    layout: tuple
    length: int
    wanted: list[Wanted]
    numbers: frozenset[int]
    root: tuple[str, int, str]

    @property
    def nbytes(self) -> int:
        """What is read."""
        return sum(wanted.nbytes for wanted in self.wanted)


def state_ends(spans: Spans, extra: Iterable[Entry]) -> list[int]:
    """Places on the path at which an end state is stored."""
    followed = {span.number: stop for span, stop in spans}
    ends = [span.stop for span, _ in _with_states(spans)]
    ends += [e.stop for e in extra if e.kind == STATE and e.stop <= followed[e.parent]]
    return ends


def wanted_of(
    spans: Spans,
    extra: Sequence[Entry],
    held: int,
    length: int,
    knows: Callable[[str], bool],
) -> list[Wanted]:
    """What to read: spans that RAM lacks, the states and the other model's parts of use.

    Args:
        extra: supplements of these spans; parts are of models that are known.
        held: tokens of the path that are in RAM.
        length: tokens that are to be restored.
        knows: whether a model's part is of use.
    """
    taken = [
        (span, min(followed, length)) for span, followed in spans if span.start < length
    ]
    lacking = [(span, stop) for span, stop in taken if stop > held]
    later = {e.parent: e for e in extra if e.kind == COMPANION}
    drafted = itertools.takewhile(
        lambda pair: pair[0].number in later or knows(pair[0].companion), lacking
    )
    resumed = _resumed(taken, list(drafted), length)
    wanted: list[Wanted] = []
    for span, stop in taken:
        sections = {STATES} if span.number in resumed else set()
        if stop <= held:
            if span.stop == length and sections:
                wanted.append(Wanted(span, stop, frozenset(sections)))
            continue
        sections.add(KV)
        if span.number not in later and knows(span.companion):
            sections.add(PART)
        wanted.append(Wanted(span, stop, frozenset(sections)))
        wanted += [
            Wanted(e, stop, frozenset({PART}))
            for e in extra
            if e.kind == COMPANION and e.parent == span.number
        ]
    wanted += [
        Wanted(e, e.stop, frozenset({STATES}))
        for e in extra
        if e.kind == STATE and e.stop == length
    ]
    return wanted


def _resumed(taken: Spans, drafted: Spans, length: int) -> set[int]:
    """Numbers of the spans whose states are of use: the one at the end, the first one of
    the path, and the last one that another model has read from the first one on."""
    there = [span for span, _ in _with_states(taken)]
    read_by_it = [span for span, _ in _with_states(drafted)]
    ends = [span for span in there if span.stop == length]
    return {span.number for span in [*there[:1], *read_by_it[-1:], *ends]}


def _with_states(spans: Spans) -> Iterator[tuple[Entry, int]]:
    """Those that are followed to their end, where they have an end state."""
    for span, stop in spans:
        if span.has_state and stop == span.stop:
            yield span, stop
