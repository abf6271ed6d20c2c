"""Speculative batches take turns, so that nobody waits for somebody else's reply.

While a speculative batch ran, nobody was admitted: its round loop cannot take another
row.  Here each drafted prompt batch becomes a speculative batch of its own, and they
stand side by side.  One step of a batch generator is

    one round of each speculative batch, one step of the plain batch, one prefill chunk

Invariants:

1. A batch owns what its rounds change: the caches of target and drafter, the drafter's
   seeds, positions and counters, for it drafts with a copy of the loaded drafter.  What
   the model itself keeps of positions is seated before each of its turns.
2. A turn is a whole round: all that the round decided is emitted before another batch
   has its turn.
3. Between two turns of a row there are at most one round of each other batch, one plain
   step and one prefill chunk.  A newcomer's first token is emitted in the step in which
   its prefill ends.
4. Rows of speculative batches take places as other rows do, can be removed, and an
   error in a round fails the rows of its own batch.
5. Drafting figures of a request count its own rounds alone.
6. Without a draft model nothing here does anything.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_vlm.generate.common import _chunked_prefill_enabled
from mlx_vlm.speculative.common import speculative_stats_since

from .batch_drafter import own_copy
from .draft_priming import DraftPrimer
from .prefill_pace import CHUNK_BESIDE_ROWS, PrefillPace, pace_of


@dataclass
class DraftFigures:
    """What was drafted for one request; stands where a snapshot of the drafter's
    counters did.

    Attributes:
        rounds: verify steps that the row was in.
        accepted, drafted: tokens.
        batching: how it shared the device with other drafted rows; None if nobody says.
        batching_reason: why so, where there is one.
    """

    rounds: int = 0
    accepted: int = 0
    drafted: int = 0
    batching: str | None = None
    batching_reason: str | None = None


def open_turns(generator: Any) -> None:
    """Give a new batch generator its list of speculative batches."""
    generator.speculative_batches = []


def take_turns(generator: Any, advance: Callable[[], tuple]) -> tuple:
    """Take one step: a round of each speculative batch, then what others do.

    Args:
        generator: a batch generator.
        advance: its step without speculative batches.

    Returns:
        ``(prompt_responses, generation_responses)``.
    """
    if generator.draft_model is None:
        return advance()
    responses = _turns_of(generator, list(generator.speculative_batches))
    running = list(generator.speculative_batches)
    pace = pace_of(generator.draft_model)
    pace.rounds_ended(time.perf_counter(), sum(map(len, running)))
    before = _read(generator)
    with _beside_running_rows(generator, pace):
        prompt_responses, plain = advance()
    batch, columns = _read(generator)
    pace.chunk_read(columns - (before[1] if before[0] is batch else 0))
    new = [batch for batch in generator.speculative_batches if batch not in running]
    # A new batch's first turn emits what its prefill has sampled.
    return prompt_responses, [*responses, *plain, *_turns_of(generator, new)]


def _turns_of(generator: Any, batches: list[Any]) -> list[Any]:
    """One turn of each of these batches; those that have ended are let go."""
    responses: list[Any] = []
    with mx.stream(generator._stream):
        for batch in batches:
            try:
                responses += batch.next()
                _settle_caches(generator, batch)
            except Exception as error:
                generator.speculative_batches.remove(batch)
                faults = getattr(generator, "row_faults", None)
                if faults is None:
                    raise  # nobody collects what single rows meet
                faults.extend((uid, error) for uid in batch.uids)
                batch.filter([])  # its caches and its drafter go now
    generator._gen_tokens_counter += len(responses)
    _drop_ended(generator)
    return responses


def _settle_caches(generator: Any, batch: Any) -> None:
    """Materialize a batch's caches as often as the generator does for the one it decodes."""
    batch.turns += 1
    interval = generator._cache_eval_interval
    if len(batch) and interval > 0 and batch.turns % interval == 0:
        mx.eval(batch.cache_states())
        mx.clear_cache()


def _drop_ended(generator: Any) -> None:
    generator.speculative_batches = [
        batch for batch in generator.speculative_batches if len(batch)
    ]


def _read(generator: Any) -> tuple[Any, int]:
    """The prompt batch that is being read, and how far; one that has just ended is none."""
    batch = generator._prompt_batch
    return batch, getattr(batch, "_processed_prompt_columns", 0)


@contextlib.contextmanager
def _beside_running_rows(generator: Any, pace: PrefillPace) -> Iterator[None]:
    """Admit no more rows than there are places, and in smaller chunks while rows decode.

    A prompt keeps the chunks that it was admitted with.
    """
    kept = generator.completion_batch_size, generator.prefill_step_size
    rows = sum(len(batch) for batch in generator.speculative_batches)
    generator.completion_batch_size -= rows
    step = generator.prefill_step_size
    if step and (rows or len(generator._generation_batch)):
        generator.prefill_step_size = pace.chunk(min(step, CHUNK_BESIDE_ROWS), step)
    try:
        yield
    finally:
        generator.completion_batch_size, generator.prefill_step_size = kept


def seat_beside(generator: Any, batch: Any) -> bool:
    """Let a speculative batch decode beside the others.

    Args:
        generator: a batch generator; it takes the batch.
        batch: a batch that is about to decode.

    Returns:
        False for a plain batch, which joins the one that decodes.
    """
    if not getattr(batch, "is_speculative", False):
        return False
    generator.speculative_batches.append(batch)
    batch.turns = 0
    batch.draft_figures = {uid: DraftFigures() for uid in batch.uids}
    requests = getattr(generator, "requests_in_flight", {})
    for uid, figures in batch.draft_figures.items():
        if uid in requests:
            requests[uid]["spec_snapshot"] = figures
    return True


def remove_row(generator: Any, uid: int) -> bool:
    """Take a row out of its speculative batch; False where it is in none."""
    for batch in generator.speculative_batches:
        if uid in batch.uids:
            with mx.stream(generator._stream):
                batch.filter([i for i, own in enumerate(batch.uids) if own != uid])
            _drop_ended(generator)
            return True
    return False


def whole_round(batch: Any, advance: Callable[[], list]) -> list:
    """One turn of a speculative batch: everything that one round emits.

    Args:
        batch: a speculative batch.
        advance: its next emission: of an MTP batch a round, of others one token a row.
    """
    drafted = getattr(batch, "drafted", None)
    if drafted is None:  # built by hand: nobody knows its rounds
        return advance()
    drafted.newest = []
    _seat_rows(batch)
    responses = advance()
    _count_round(batch)
    if batch.draft_kind != "mtp":
        longest = max((len(new) for _, _, new in drafted.newest), default=0)
        for _ in range(longest - 1):
            if batch.uids:
                responses += advance()
    return responses


def _count_round(batch: Any) -> None:
    """Enter the newest round into the figures of its rows."""
    figures = batch.draft_figures
    for row, accepted, _ in batch.drafted.newest:
        own = figures[batch._all_uids[row]]
        own.rounds += 1
        own.accepted += accepted
        own.drafted += batch.draft_model.draft_lens[-1]


def _seat_rows(batch: Any) -> None:
    """Keep the position deltas of the rows that the caches will hold in this round."""
    deltas = getattr(batch, "_rope_deltas", None)
    rows = [r for r in batch.drafted.active if r not in batch.drafted.gone]
    if deltas is not None and 0 < len(rows) < deltas.shape[0]:
        of_all = batch.__dict__.setdefault("rope_deltas_of_all", deltas)
        batch._rope_deltas = of_all[mx.array(rows)]


def own_drafter(prompt_batch: Any) -> None:
    """Draft with a copy also where there is nothing to prime."""
    shared = prompt_batch.draft_model
    if shared is not None and getattr(prompt_batch, "shared_drafter", None) is None:
        prompt_batch.draft_model = own_copy(shared)
        prompt_batch.shared_drafter = shared


def chunk_primed(prompt_batch: Any, step: int | None) -> None:
    """Read a prompt in chunks where only the drafter stood against it.

    Models do without chunks because a drafter needs the features of the whole prompt.
    One that is primed reads those of each chunk.

    Args:
        prompt_batch: as its constructor leaves it.
        step: the chunk that was asked for, in tokens, or None.
    """
    if prompt_batch.prefill_step_size is not None or not step:
        return
    primer = prompt_batch._speculative_prefill
    if isinstance(primer, DraftPrimer) and _chunked_prefill_enabled(
        prompt_batch.model,
        input_ids=prompt_batch._input_ids,
        inputs_embeds=prompt_batch._inputs_embeds,
        prompt_cache=prompt_batch.prompt_cache,
        prefill_kwargs=prompt_batch._prompt_kwargs,
    ):
        prompt_batch.prefill_step_size = step
        if prompt_batch._apc_coordinator is not None:
            prompt_batch._apc_coordinator.prepare_prefill(
                prompt_batch._prompt_tokens_per_row,
                prefix_lengths=prompt_batch._cached_tokens_per_row,
                prefill_step_size=step,
            )


def drafts_since(draft_model: Any, snapshot: Any) -> tuple:
    """(rounds, accepted, drafted) of one request; Nones where nothing was drafted.

    Args:
        snapshot: its own figures, or a snapshot of the drafter's counters.
    """
    if not isinstance(snapshot, DraftFigures):
        return speculative_stats_since(draft_model, snapshot)
    if not snapshot.rounds:
        return None, None, None
    return snapshot.rounds, snapshot.accepted, snapshot.drafted
