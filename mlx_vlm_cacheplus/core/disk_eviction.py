"""Which entries of a disk store go: for room, for good, or with what they stand on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from .disk_index import SPAN, Entry

Order = Callable[[list[Entry]], Iterable[int]]


def least_recently_used(entries: list[Entry]) -> Iterator[int]:
    """Leaves, the least recently used first; parents follow as they become leaves."""
    by_number = {entry.number: entry for entry in entries}
    children = count_children(entries)
    tie = itertools.count()
    queue = [(e.last_use, next(tie), e) for e in entries if not children.get(e.number)]
    heapify(queue)
    while queue:
        _, _, entry = heappop(queue)
        yield entry.number
        parent = by_number.get(entry.parent)
        if parent is not None:
            children[parent.number] -= 1
            if not children[parent.number]:
                heappush(queue, (parent.last_use, next(tie), parent))


def foreign_first(entries: list[Entry], mine: Collection[int]) -> Iterator[int]:
    """Other models' paths, then prompts that nobody extended, then the rest.

    Args:
        mine: numbers of the roots that are served.
    """
    yield from least_recently_used([e for e in entries if e.root not in mine])
    own = [entry for entry in entries if entry.root in mine]
    parents = {entry.parent for entry in own}
    once = {e.number for e in own if not e.parent and e.number not in parents}
    late = []
    for number in least_recently_used(own):
        if number in once:
            yield number
        else:
            late.append(number)
    yield from late


def standing_on(entry: Entry, entries: list[Entry]) -> list[Entry]:
    """All that has this entry below it."""
    children: dict[int, list[Entry]] = {}
    for each in entries:
        children.setdefault(each.parent, []).append(each)
    found, open_ = [], [entry]
    while open_:
        above = children.get(open_.pop().number, [])
        found.extend(above)
        open_.extend(above)
    return found


def count_children(entries: Iterable[Entry]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for entry in entries:
        counts[entry.parent] = counts.get(entry.parent, 0) + 1
    return counts


def losses(
    entries: Sequence[Entry], nbytes: int, order: Order, keep: Collection[int]
) -> Iterator[Entry]:
    """What goes until ``nbytes`` are free; what has children stays.

    Args:
        order: numbers of what goes first, children before their parents.
        keep: numbers of what stays.
    """
    left = {entry.number: entry for entry in entries}
    children = count_children(entries)
    for number in order(list(entries)):
        if nbytes <= 0:
            return
        if children.get(number) or number not in left or number in keep:
            continue
        entry = left.pop(number)
        children[entry.parent] = children.get(entry.parent, 1) - 1
        nbytes -= entry.nbytes
        yield entry


def with_what_stands_inside(chosen: set[int], entries: list[Entry]) -> list[Entry]:
    """These entries, and what stands inside them.

    One that others go on from at its end is theirs too, and stays.
    """
    by_number = {entry.number: entry for entry in entries}
    theirs = {
        entry.parent
        for entry in entries
        if entry.number not in chosen
        and entry.parent in by_number
        and entry.kind == SPAN
        and entry.start == by_number[entry.parent].stop
    }
    gone: dict[int, Entry] = {}
    for entry in entries:
        if entry.number in chosen - theirs:
            gone[entry.number] = entry
            gone |= {e.number: e for e in standing_on(entry, entries)}
    return list(gone.values())
