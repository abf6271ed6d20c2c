"""An error in one row fails that row.

The server's generation thread answers any exception by failing every request in
flight.  Most exceptions have an owner: the row that is embedded, the rows that are
prefilled, the row whose logits processor or detokenizer raised.  Here the owner
fails, and everybody else goes on:

- an embedding that raises is reported to its own request;
- rows prefilled together are tried again one by one, so that only the faulty row
  fails; rows that decode meanwhile get the tokens of that step;
- a logits processor or detokenizer that raises takes its own row out;
- a decode step that raises has no owner and leaves caches of unequal age: the rows
  of that batch fail, those that wait or are being prefilled do not.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

logger = logging.getLogger(__name__)


class GuardedProcessor:
    """A logits processor that reports what it raises and passes the logits on.

    Outside a server nobody takes the report, and the error is raised as before.
    """

    def __init__(self, processor: Any, batch_gen: Any, uid: int):
        self._processor = processor
        self._batch_gen = batch_gen
        self._uid = uid
        if hasattr(processor, "process_last_token"):
            self.process_last_token = functools.partial(
                self._guard, processor.process_last_token
            )

    def __call__(self, tokens: Any, logits: mx.array) -> mx.array:
        return self._guard(self._processor, tokens, logits)

    def __getattr__(self, name: str) -> Any:
        if name == "_processor":  # of a copy that is still empty
            raise AttributeError(name)
        return getattr(self._processor, name)

    def _guard(self, call: Callable, tokens: Any, logits: mx.array) -> mx.array:
        try:
            return call(tokens, logits)
        except Exception as error:
            faults = getattr(self._batch_gen, "row_faults", None)
            if faults is None:
                raise
            faults.append((self._uid, error))
            return logits


def faults_of(server: Any) -> list[tuple[Any, Exception]]:
    """Faults met since the last step: (uid or the row's info, error)."""
    faults = server.__dict__.get("row_faults")
    if faults is None:
        faults = server.row_faults = []
    return faults


def guard_queued(batch_gen: Any, uids: Sequence[int]) -> None:
    """Guard the logits processors of the rows just queued."""
    wanted = set(uids)
    batch_gen._unprocessed_sequences = [
        (
            (*s[:4], [GuardedProcessor(p, batch_gen, s[0]) for p in s[4]], *s[5:])
            if s[0] in wanted and s[4]
            else s
        )
        for s in batch_gen._unprocessed_sequences
    ]


def stream_text(server: Any, info: dict[str, Any], advance: Callable[[], str]) -> str:
    """Turn one token into text; a detokenizer's error stays with its row."""
    try:
        return advance()
    except Exception as error:
        faults_of(server).append((info, error))
        return ""


def step_and_fail_rows(
    server: Any, batch_gen: Any, active: dict[int, dict], step: Callable[[], Any]
) -> None:
    """Run one server step, then fail the rows that met an error of their own.

    Args:
        server: the response generator.
        batch_gen: its batch generator; from here on it reports rows instead of
            raising.
        active: requests in flight by uid; failed ones are removed.
        step: stock's step.
    """
    faults = faults_of(server)
    batch_gen.row_faults = faults
    server.rows_in_flight = active
    step()
    while faults:
        owner, error = faults.pop(0)
        uid = _uid_of(owner, active)
        info = active.pop(uid, None) if uid is not None else None
        if info is None:
            continue
        logger.error("Request %s failed", info.get("request_id", uid), exc_info=error)
        batch_gen.remove(uid)
        for item in (error, None):
            info["rqueue"].put(item)


def decode_recorded(batch: Any, advance: Callable[[], list]) -> list:
    """Run a batch's decode step; keep its responses until they are delivered."""
    batch.undelivered = []
    try:
        batch.undelivered = advance()
    except Exception:
        batch.decode_failed = True
        raise
    return batch.undelivered


def extend_recorded(batch: Any, extend: Callable[[], None]) -> None:
    """Let rows join; half a join leaves a batch that cannot decode any more."""
    try:
        extend()
    except Exception:
        batch.decode_failed = batch.join_failed = True
        raise


def next_isolated(batch_gen: Any, advance: Callable[[], tuple]) -> tuple:
    """Advance a batch generator; on an error settle whose it is.

    Without a server that collects row faults the error is raised as before.

    Returns:
        ``(prompt_responses, generation_responses)``.
    """
    faults = getattr(batch_gen, "row_faults", None)
    if faults is None:
        return advance()
    queued = batch_gen._unprocessed_sequences
    decoding = batch_gen._generation_batch
    decoding.undelivered = []
    try:
        return _advance_alone(batch_gen, advance, queued)
    except Exception as error:
        if getattr(decoding, "decode_failed", False):
            _fail_decoding(batch_gen, faults, error)
            return [], []
        _settle_prefill(batch_gen, queued, faults, error)
        mx.clear_cache()
        return [], decoding.undelivered


def _advance_alone(batch_gen: Any, advance: Callable, queued: list[tuple]) -> tuple:
    """Admit a row that is tried again by itself; remember the rows that go together."""
    alone = getattr(batch_gen, "rows_alone", None)
    together = batch_gen.prefill_batch_size
    if alone and queued and queued[0][0] in alone:
        batch_gen.prefill_batch_size = 1
    before = batch_gen._prompt_batch
    try:
        result = advance()
    finally:
        admitted = queued[: batch_gen.prefill_batch_size]
        batch_gen.prefill_batch_size = together
        prompt_batch = batch_gen._prompt_batch
        is_new = prompt_batch is not None and prompt_batch is not before
        if is_new and len(admitted) > 1:
            prompt_batch.admitted_sequences = admitted
    if alone:
        waiting = {s[0] for s in batch_gen._unprocessed_sequences}
        batch_gen.rows_alone = alone & waiting
    return result


def _settle_prefill(
    batch_gen: Any, queued: list[tuple], faults: list, error: Exception
) -> None:
    """Try rows that were prefilled together one by one; fail a row that was alone."""
    sequences = _take_prefilled(batch_gen, queued)
    if len(sequences) > 1:
        logger.warning(
            "%d rows are prefilled again one by one: %s", len(sequences), error
        )
        alone: set[int] = getattr(batch_gen, "rows_alone", set())
        batch_gen.rows_alone = alone | {s[0] for s in sequences}
        batch_gen._unprocessed_sequences = sequences + batch_gen._unprocessed_sequences
    else:
        faults.extend((s[0], error) for s in sequences)


def _take_prefilled(batch_gen: Any, queued: list[tuple]) -> list[tuple]:
    """Remove the rows whose prefill raised; a row known by uid alone is ``(uid,)``."""
    prompt_batch = batch_gen._prompt_batch
    if prompt_batch is None:
        alone = getattr(batch_gen, "rows_alone", ())
        count = 1 if queued and queued[0][0] in alone else batch_gen.prefill_batch_size
        batch_gen._unprocessed_sequences = queued[count:]
        return queued[:count]
    batch_gen._prompt_batch = None
    prompt_batch._release_apc_meta_blocks()
    uids = prompt_batch._prompt_uids
    sequences: list[tuple] | None = getattr(prompt_batch, "admitted_sequences", None)
    if sequences is None:
        return [(uid,) for uid in uids]
    return [s for s in sequences if s[0] in uids]


def _fail_decoding(batch_gen: Any, faults: list, error: Exception) -> None:
    """Fail the rows of a decode batch whose step raised, and start an empty one."""
    from mlx_vlm.generate.ar import GenerationBatch

    broken = batch_gen._generation_batch
    uids = list(broken.uids)
    if getattr(broken, "join_failed", False) and batch_gen._prompt_batch is not None:
        # Prefilled to the end: another step would read the last token twice.
        uids += [u for u in batch_gen._prompt_batch._prompt_uids if u not in uids]
        batch_gen._prompt_batch = None
    faults.extend((uid, error) for uid in uids)
    batch_gen._generation_batch = GenerationBatch.empty(
        batch_gen.model,
        batch_gen.sampler,
        batch_gen.tokenizer.stopping_criteria,
        compute_logprobs=batch_gen.compute_logprobs,
        top_logprobs_k=batch_gen.top_logprobs_k,
        greedy_sampling=batch_gen.greedy_sampling,
    )
    mx.clear_cache()


def _uid_of(owner: Any, active: dict[int, dict]) -> int | None:
    if isinstance(owner, int):
        return owner
    return next((uid for uid, info in active.items() if info is owner), None)
