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
3. The order is settled when a prompt comes, leaves or is admitted, and in no other step:
   a queue behind a full batch costs a decode step next to nothing.
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
    by_uid = {row[0]: row for row in queued}
    state = set(by_uid), generator.prefill_batch_size
    settled = getattr(generator, "settled_order", None)
    if settled is None or settled[0] != state:
        spent = getattr(generator, "overtaken", {})
        generator.overtaken = {uid: n for uid, n in spent.items() if uid in by_uid}
        order = line_up(queued, generator.overtaken, generator.prefill_batch_size)
        # By uid: the queue's entries hold embeddings.
        uids = tuple(row[0] for row in order)
        settled = generator.settled_order = state, uids
    generator._unprocessed_sequences = [by_uid[uid] for uid in settled[1]]
    try:
        yield
    finally:
        waiting = generator._unprocessed_sequences
        if len(waiting) < len(queued):
            generator.settled_order = None
            _note_overtaken(queued, waiting, generator.overtaken)


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
    admitted = [row for row in before if row[0] not in waiting]
    for other in after:
        for row in admitted:
            _spend(other, row, overtaken)
