"""A long prompt is not overtaken for ever.

Waiting prompts are sorted by length, and the first ones are admitted.  That is good for
the many that are short, but a long one is admitted only when nothing shorter waits: with
enough agents, never.  Here each prompt has a budget: later prompts may go before it as
long as they have, together, at most as many tokens as it has itself.  So overtaking at most
doubles what a prompt waits for, and a short prompt still waits for no long one that has
come behind it.

Invariants:

1. Prompts that have come later and are admitted earlier than a prompt have together at most
   as many tokens as that prompt.  Prompts that are admitted with it do not overtake it.
2. But for that, the queue keeps the order in which it is found.
3. Nothing is decided in a step that admits nobody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


@contextlib.contextmanager
def in_fair_order(generator: Any) -> Iterator[None]:
    """Let one step of a batch generator admit no prompt that must let another go first.

    Args:
        generator: a batch generator about to take a step; its queue is put in order, and
            what each waiting prompt was overtaken by is kept on it.
    """
    queued = generator._unprocessed_sequences
    if len(queued) < 2 or generator._prompt_batch is not None:
        yield
        return
    overtaken = {
        uid: tokens
        for uid, tokens in getattr(generator, "overtaken", {}).items()
        if any(row[0] == uid for row in queued)
    }
    generator.overtaken = overtaken
    generator._unprocessed_sequences = line_up(
        queued, overtaken, generator.prefill_batch_size
    )
    try:
        yield
    finally:
        _note_overtaken(queued, generator._unprocessed_sequences, overtaken)


def line_up(
    queued: Sequence[tuple], overtaken: Mapping[int, int], places: int
) -> list[tuple]:
    """The queue, with so many of its first places given fairly.

    Args:
        queued: entries that begin with a uid and the token ids; uids rise with arrival.
        overtaken: tokens that have gone before a prompt so far, by uid.
        places: how many may be admitted at once.
    """
    waiting = list(queued)
    spent = dict(overtaken)
    first: list[tuple] = []
    while waiting and len(first) < places:
        row = waiting[0]
        while blocking := [
            other for other in waiting if _must_go_before(other, row, spent)
        ]:
            row = min(blocking, key=lambda other: other[0])
        waiting = [other for other in waiting if other is not row]
        first.append(row)
        for other in waiting:
            _spend(other, row, spent)
    return first + waiting


def _must_go_before(other: tuple, row: tuple, spent: Mapping[int, int]) -> bool:
    """Whether a row would overtake another by more than that one's budget."""
    uid, ids = other[0], other[1]
    return uid < row[0] and spent.get(uid, 0) + len(row[1]) > len(ids)


def _spend(other: tuple, row: tuple, spent: dict[int, int]) -> None:
    if other[0] < row[0]:
        spent[other[0]] = spent.get(other[0], 0) + len(row[1])


def _note_overtaken(
    before: Sequence[tuple], after: Sequence[tuple], overtaken: dict[int, int]
) -> None:
    """Enter what was admitted into the budgets of those that still wait."""
    waiting = {row[0] for row in after}
    for other in after:
        for row in before:
            if row[0] not in waiting:
                _spend(other, row, overtaken)
