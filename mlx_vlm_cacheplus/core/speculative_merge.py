"""Rows join a running speculative batch between two rounds, and leave it when they end.

Speculative batches that take turns verify apart: four batches of one row cost four
verify steps.  Two of them can become one where a round has ended: everything that it
accepted is committed to the caches, everything that it decided is emitted.  Then the
round loops of both are closed, the rows that go on are put side by side in the caches
of target and drafter, and a new loop starts from there.

Invariants:

1. Batches join at round boundaries alone, after each had a round of its own.  So no
   token is computed twice, and none is lost.
2. What a row emits is what it emits alone: it keeps its length in the caches, its
   position deltas, and the positions of its seeded draws.  Where drafter or caches keep
   one length for a batch, a round accepts what all its rows accept (see
   ``row_acceptance``); rows then need other numbers of rounds, and say the same.
3. What is joined is built beside what is there; a fault on the way leaves both batches
   as they were, and they take turns.
4. Batches that were slower together, by what their rounds took, take turns.
5. Every request knows which it was, and of turns why.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from . import batch_drafter
from .draft_priming import takes_ragged_rows
from .draft_state import offer_rows
from .drafted_replies import DraftedRows
from .joined_drafters import (
    JOINABLE,
    LiveRows,
    join_drafters,
    joined_entries,
    reason_apart,
    reason_padded,
    shown_of_target,
)
from .merge_pace import MODE, Pace, mode
from .row_acceptance import hold_holes, rows_keep_their_own, without_holes
from .row_samplers import sampling_of

logger = logging.getLogger(__name__)

# How a request shared the device with other drafted rows: not at all, verify steps of
# its own in turns with theirs, or the same verify steps.
ALONE, TURNS, MERGED = "alone", "turns", "merged"
NOT_YET = "one of the batches had no round of its own yet"
# Families of targets on which what joined rows say was compared with what each says
# alone. Others join where that is asked for, not by themselves.
TRIED = ("gemma4", "qwen3_5", "lfm2", "nemotron_h")
# Families whose rows join nobody, also where that is asked for, and why.
APART = {"laguna": "its target commits no rows that accept unequally"}


def join_batches(generator: Any) -> None:
    """Put speculative batches together that are better so.

    Call before a step's rounds, on the generation thread.

    Args:
        generator: a batch generator; its ``speculative_batches`` may become fewer.
    """
    batches = getattr(generator, "speculative_batches", ())
    if len(batches) < 2:
        return
    if mode() == "never":
        for batch in batches:
            _note_turns(batch, f"{MODE} is never")
        return
    # Of each batch once: a step has many pairs.
    reasons = {id(batch): _reason_alone(batch) for batch in batches}
    kept: list[Any] = []
    with mx.stream(generator._stream):
        for batch in batches:
            if not any(_joined(taker, batch, reasons) for taker in kept):
                kept.append(batch)
    generator.speculative_batches = kept


def _joined(taker: Any, batch: Any, reasons: dict[int, str | None]) -> bool:
    """Whether ``taker`` has taken the rows of ``batch``; where not, the rows know why.

    Args:
        reasons: why a batch joins no other, by its id.
    """
    reason = reasons[id(taker)] or reasons[id(batch)] or _reason_apart(taker, batch)
    if reason is None:
        try:
            _take_rows(taker, batch)
            reasons[id(taker)] = NOT_YET
            return True
        except Exception as error:
            logger.warning("Batches take turns: %s", error, exc_info=True)
            batch.stays_apart = reason = f"joining failed: {error}"
            reasons[id(batch)] = reason
    for one in (taker, batch):
        _note_turns(one, reason)
    return False


def _note_turns(batch: Any, reason: str) -> None:
    for figures in batch.draft_figures.values():
        if figures.batching != MERGED:
            figures.batching, figures.batching_reason = TURNS, reason


def _reason_apart(taker: Any, batch: Any) -> str | None:
    """Why two batches that could join others take turns; None where they are to join."""
    apart = _reason_sampled_apart(taker, batch)
    if apart is not None or mode() == "always":
        return apart
    if not _tried(taker):
        return f"joining was not tried on {type(taker.model).__module__}"
    padded = reason_padded(taker.prompt_cache, batch.prompt_cache)
    return padded or pace_of(taker).slower_together(len(taker), len(batch))


def _tried(batch: Any) -> bool:
    """Whether the target is of a family in ``TRIED``."""
    return not _families(batch).isdisjoint(TRIED)


def _reason_of_family(batch: Any) -> str | None:
    """Why no batch of this target joins another; None if it can."""
    families = _families(batch)
    return next((APART[name] for name in APART if name in families), None)


def _families(batch: Any) -> set[str]:
    """The families of a target: its own, and those that it is derived from."""
    target = getattr(batch.model, "language_model", batch.model)
    return {name for kind in type(target).__mro__ for name in _parts(kind)}


def _parts(kind: type) -> list[str]:
    return kind.__module__.split(".")


def _reason_alone(batch: Any) -> str | None:
    """Why a batch joins no other in this step; None if it can."""
    if getattr(batch, "stays_apart", None) is not None:
        return str(batch.stays_apart)
    if getattr(batch, "drafted", None) is None:
        return "its rounds are not known"
    if batch._rounds_iter is None or not batch.drafted.accepted:
        return NOT_YET
    family = _reason_of_family(batch)
    if family is not None:
        return family
    for entry in batch.prompt_cache:
        if type(entry) not in JOINABLE:
            return f"{type(entry).__name__} takes no rows"
        if entry.batch_size != len(batch.drafted.active):
            return "its caches hold other rows than expected"
    return reason_apart(batch)


def _reason_sampled_apart(taker: Any, batch: Any) -> str | None:
    """Why one sampler cannot serve the rows of both."""
    if taker.greedy_sampling and batch.greedy_sampling:
        return None
    if taker.greedy_sampling != batch.greedy_sampling:
        return "the other rows are sampled differently"
    if taker.draft_kind == "eagle3" or not hasattr(taker.sampler, "sample_target"):
        return "its rows draw from one stream of random numbers"
    known = [sampling_of(one).get(uid) for one in (taker, batch) for uid in one.uids]
    if None in known or len({sampling.key for sampling in known if sampling}) > 1:
        return "the other rows are sampled differently"
    return None


def _take_rows(taker: Any, batch: Any) -> None:
    """Let ``taker`` go on with the rows of both; ``batch`` is empty afterwards."""
    own, other = LiveRows.of(taker), LiveRows.of(batch)
    features, install = join_drafters(own, other)
    bonus = [one.batch.drafted.bonus[row] for one in (own, other) for row in one.rows]
    uids = [one.batch._all_uids[row] for one in (own, other) for row in one.rows]
    entries = joined_entries(taker.prompt_cache, batch.prompt_cache, own, other)
    primer = copy.copy(getattr(taker, "primer", None))
    if primer is not None:
        primer.rows = [*own.primed(), *other.primed()]
    fields = {
        **{name: _of_both(own, other, name) for name in ("max_tokens", "_num_tokens")},
        "uids": uids,
        "_all_uids": list(uids),
        "_finished": [False] * len(uids),
        "first_tokens": mx.array(bonus, dtype=taker.token_dtype),
        "hidden": features,
        "prompt_cache": entries,
        "drafted": _joined_ledgers(taker, batch, uids, bonus),
        "_rope_deltas": _joined_deltas(own, other),
        "row_sampling": {**sampling_of(taker), **sampling_of(batch)},
        "draft_figures": {**taker.draft_figures, **batch.draft_figures},
        "prompt_tokens": None,
        "shared_kv_states": shown_of_target(taker, entries),
        "verified_features": None,
        "_rounds_iter": None,
    }
    for one in (taker, batch):
        batch_drafter.report_back(one)
    # From here on nothing fails half-way.
    for one in (taker, batch):
        one._rounds_iter.close()
    install()
    taker.__dict__.pop("rope_deltas_of_all", None)
    taker.__dict__.update(fields)
    # The round loop counts from one again: the newest token of each row.
    taker.drawn_before = [count - 1 for count in taker._num_tokens]
    if primer is not None:
        offer_rows(taker, primer, taker.coordinator)
    _empty(batch)


def _of_both(own: LiveRows, other: LiveRows, name: str) -> list[Any]:
    """A list that has one item a row of a batch, of the rows that go on."""
    return [getattr(one.batch, name)[row] for one in (own, other) for row in one.rows]


def _joined_ledgers(
    taker: Any, batch: Any, uids: Sequence[int], bonus: Sequence[int]
) -> DraftedRows:
    """Ledgers of the rows of both, numbered anew, as between two rounds."""
    drafted = DraftedRows(uids, {**taker.drafted.rows, **batch.drafted.rows})
    drafted.bonus = dict(enumerate(bonus))
    return drafted


def _joined_deltas(own: LiveRows, other: LiveRows) -> mx.array | None:
    """Position deltas, [rows, 1]; None for models that keep none."""
    mine, theirs = _deltas(own), _deltas(other)
    if mine is None or theirs is None:
        return None
    return mx.concatenate([mine, theirs])


def _deltas(rows: LiveRows) -> mx.array | None:
    batch = rows.batch
    deltas = getattr(batch, "rope_deltas_of_all", getattr(batch, "_rope_deltas", None))
    return None if deltas is None else deltas[mx.array(rows.rows)]


def _empty(batch: Any) -> None:
    """Let go of a batch whose rows have left."""
    batch.uids, batch._all_uids, batch._finished = [], [], []
    batch.drafted, batch.primer, batch._rounds_iter = None, None, None
    batch.prompt_cache, batch.hidden, batch.draft_figures = [], None, {}
    batch_drafter.let_go(batch)


def keep_rows_apart(batch: Any) -> None:
    """Let the rounds of a batch leave its rows at unequal lengths, where all can hold them.

    Call before its round loop starts; its cache entries may become others.
    """
    if getattr(batch, "drafted", None) is None:
        return  # built by hand: nobody knows its rounds
    asked = mode() == "always" or mode() == "auto" and _tried(batch)
    joins = asked and _reason_of_family(batch) is None
    if joins and takes_ragged_rows(batch.draft_model, batch.draft_kind):
        batch.drafted.apart = rows_keep_their_own
        batch.drafted.shown = without_holes
        hold_holes(batch.prompt_cache)


def tokens_left(batch: Any) -> int:
    """Tokens that a round loop may emit, the one that it starts from included."""
    before = getattr(batch, "drawn_before", None) or [0] * len(batch.max_tokens)
    left = [most - drawn for most, drawn in zip(batch.max_tokens, before, strict=True)]
    return max(left, default=0)


def row_numbers(batch: Any) -> list[int]:
    """What the rows of a round loop are called where they draw.

    Alone, and in a batch of rows that were prefilled together, each is the first.
    """
    joined = getattr(batch, "drawn_before", None) is not None
    return list(range(len(batch._all_uids))) if joined else [0] * len(batch._all_uids)


def sampler_of(batch: Any) -> Any:
    """The sampler of a round loop, which counts each row's draws from its own start."""
    before = getattr(batch, "drawn_before", None)
    if before is None or not hasattr(batch.sampler, "sample_target"):
        return batch.sampler
    return DrawnBefore(batch.sampler, before)


class DrawnBefore:
    """A sampler for rows that had drawn tokens before their round loop started.

    Args:
        sampler: keys a draw by row and position.
        before: tokens that each row has drawn, by its number in the loop.
    """

    def __init__(self, sampler: Any, before: Sequence[int]):
        self._sampler = sampler
        self._before = before

    def __call__(self, logprobs: mx.array) -> mx.array:
        return self._sampler(logprobs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)

    def sample_target(self, logprobs: mx.array, **where: Any) -> mx.array:
        return self._sampler.sample_target(logprobs, **self._as_alone(**where))

    def sample_proposal(self, logprobs: mx.array, **where: Any) -> mx.array:
        return self._sampler.sample_proposal(logprobs, **self._as_alone(**where))

    def _as_alone(
        self, row_ids: Sequence[int], positions: Sequence[int]
    ) -> dict[str, list[int]]:
        drawn = [self._before[row] for row in row_ids]
        return {
            "row_ids": [0] * len(drawn),
            "positions": [a + b for a, b in zip(positions, drawn, strict=True)],
        }


def pace_of(batch: Any) -> Pace:
    """What rounds of this drafter and its target have taken; kept on the loaded drafter."""
    shared = getattr(batch, "shared_drafter", None) or batch.draft_model
    pace: Pace | None = shared.__dict__.get("merge_pace")
    if pace is None:
        pace = Pace()
        object.__setattr__(shared, "merge_pace", pace)
    return pace


def timed_round(batch: Any, advance: Callable[[], list]) -> list:
    """Take one turn of a speculative batch, and enter what its round took.

    The first round of a loop is not entered: it starts the drafter, and computes what
    joining has only asked for.
    """
    running = batch._rounds_iter is not None
    start = time.perf_counter()
    responses = advance()
    newest = batch.drafted.newest if getattr(batch, "drafted", None) else ()
    if running and newest and mode() == "auto":
        pace_of(batch).add(
            rows=len(newest),
            width=batch.draft_model.draft_lens[-1] + 1,
            seconds=time.perf_counter() - start,
            tokens=sum(len(new) for _, _, new in newest),
        )
    for row, *_ in newest:
        _note_shared(batch.draft_figures[batch._all_uids[row]], len(newest) > 1)
    return responses


def _note_shared(figures: Any, shared: bool) -> None:
    if shared:
        figures.batching, figures.batching_reason = MERGED, None
    elif figures.batching is None:
        figures.batching = ALONE
