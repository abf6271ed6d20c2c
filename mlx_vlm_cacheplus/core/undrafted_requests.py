"""Requests that speculative decoding cannot serve are decoded without it.

A verified draft shows the target's choice and nothing else: no logits processor runs
between its tokens, no thinking budget counts them, and no log-probability is kept.  A
request that needs one of these (penalties, ``logit_bias``, ``response_format``, a
thinking budget, ``logprobs``) is *undrafted*: it gets the prompt batch and the decode
batch that it would have without a draft model, which stays loaded for the others.

Invariants:

1. A prompt batch is drafted as a whole or not at all.  A drafted batch has one sampler:
   where the generator's tells rows apart, rows that it samples differently are of
   different kinds.
2. Decoding batches never mix.  Where one batch decodes at a time, a drafted prompt batch
   is built only while no plain batch decodes, and rows that could be drafted join a
   plain batch undrafted, rather than wait.  Where batches take turns they are drafted.
3. Of the kinds that wait, the one with the oldest request goes first, and that request
   is in the batch.  So no kind starves another, however many requests arrive.
4. Without a draft model nothing here does anything.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

logger = logging.getLogger(__name__)

# The kind of the rows that are decoded without the drafter; others have their sampling.
PLAIN = "plain"

# What one step of a generator may find changed, and gets back when it ends.
SETTINGS = (
    "draft_model",
    "draft_kind",
    "prefill_batch_size",
    "compute_logprobs",
    "top_logprobs_k",
)


def drop_neutral_penalty(args: Any) -> None:
    """Forget a repetition penalty of 1, which changes no logit, so as to draft."""
    if args.repetition_penalty == 1:
        args.repetition_penalty = None


def note_rows(server: Any, batch_gen: Any, active: dict[int, dict]) -> None:
    """Tell a batch generator whose log-probabilities are asked for.

    Call before each step of the server, so that every row is known before it is
    admitted.  Rows that were admitted undrafted lose their draft statistics: what a
    drafter did meanwhile, it did for others.

    Args:
        server: the response generator; its ``top_logprobs_k`` is read.
        active: requests in flight by uid, with ``logprobs`` where they ask for them.
    """
    if getattr(batch_gen, "draft_model", None) is None or not (
        batch_gen.has_pending_prompts or _undrafted(batch_gen)
    ):
        return
    batch_gen.logprob_rows = {
        uid: server.top_logprobs_k
        for uid, info in active.items()
        if info.get("logprobs")
    }
    batch_gen.undrafted_rows = _undrafted(batch_gen) & active.keys()
    for uid in batch_gen.undrafted_rows:
        active[uid]["spec_snapshot"] = None


@contextlib.contextmanager
def rows_of_one_kind(generator: Any) -> Iterator[None]:
    """Let one step of a batch generator admit rows of one kind, and restore it.

    Args:
        generator: a batch generator about to take a step.  Its queue is put in another
            order where rows of both kinds wait.
    """
    if getattr(generator, "draft_model", None) is None or not (
        generator.has_pending_prompts
    ):
        # Nothing is admitted, so nothing is decided: rows decode as they are.
        yield
        return
    kept = {name: getattr(generator, name) for name in SETTINGS}
    if generator._prompt_batch is not None:
        _keep_logprobs(generator, generator._prompt_batch.uids)
    else:
        _line_up(generator)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(generator, name, value)
        _use_plain_caches(generator, False)


def _line_up(generator: Any) -> None:
    """Put rows of the oldest one's kind in front, and admit no others with them."""
    queued = generator._unprocessed_sequences
    if len(queued) < 2 or _all_are_plain(generator):
        return
    oldest = min(queued, key=lambda row: row[0])
    kind = _kind(generator, oldest)
    alike: list[tuple] = [oldest]
    others: list[tuple] = []
    for row in queued:
        if row is not oldest:
            same = _kind(generator, row) == kind
            (alike if same else others).append(row)
    if others:
        generator._unprocessed_sequences = alike + others
        generator.prefill_batch_size = min(generator.prefill_batch_size, len(alike))


def choose_drafting(generator: Any, rows: Sequence[tuple]) -> None:
    """Decide whether the prompt batch about to be built is drafted.

    Call within ``rows_of_one_kind``, which takes back what is set here.

    Args:
        generator: a batch generator; the batch that it decodes has taken its step.
        rows: the queue entries that make the batch.
    """
    if getattr(generator, "draft_model", None) is None:
        return
    uids = [row[0] for row in rows]
    _keep_logprobs(generator, uids)
    kinds = [_kind(generator, row) for row in rows]
    # Of several kinds are rows that were to join plain ones, which have just ended.
    if PLAIN not in kinds and len(set(kinds)) == 1 and not _all_are_plain(generator):
        return
    generator.draft_model = generator.draft_kind = None
    generator.undrafted_rows = _undrafted(generator) | set(uids)
    _use_plain_caches(generator, True)
    logger.info(
        "Without the draft model: %d of %d rows need it, %d are decoded so already",
        kinds.count(PLAIN),
        len(uids),
        len(generator._generation_batch) if _decodes_plainly(generator) else 0,
    )


def give_whole_context(prompt_batch: Any) -> None:
    """Show logits processors the whole prompt, also what the cache restored of it.

    Penalties look at the last tokens of the prompt.  A warm row's were those behind the
    restored prefix alone, so that its tokens depended on what was cached.

    Args:
        prompt_batch: a batch with warm rows, or None.
    """
    if prompt_batch is not None and prompt_batch._token_context:
        prompt_batch._token_context = [
            list(meta["full_input_ids"]) for meta in prompt_batch._apc_meta
        ]


def even_out_logprobs(batch: Any, other: Any) -> None:
    """Let two plain batches join of which one keeps log-probabilities.

    The pending token of a row that did not ask for any gets zeros; nobody reads them.

    Args:
        batch: the decode batch about to take the rows of ``other``.
    """
    if not len(batch) or not len(other):
        return
    keep = batch.compute_logprobs or other.compute_logprobs
    k = max(batch.top_logprobs_k, other.top_logprobs_k)
    for one in (batch, other):
        rows = len(one)
        if keep and one._next_lps is None:
            one._next_lps = mx.zeros((rows,))
        if k and one._next_top_idx is None:
            one._next_top_idx = mx.zeros((rows, k), dtype=mx.int32)
            one._next_top_lp = mx.zeros((rows, k))
        one.compute_logprobs, one.top_logprobs_k = keep, k


def _kind(generator: Any, row: tuple) -> Any:
    """What rows have in common that are admitted together."""
    if _needs_plain(generator, row):
        return PLAIN
    sampling = _sampling(generator, row)
    return None if sampling is None else sampling.key


def _sampling(generator: Any, row: tuple) -> Any:
    """How a queued row is sampled; None where the generator has one sampler for all."""
    return getattr(generator.sampler, "rows", {}).get(row[0])


def _needs_plain(generator: Any, row: tuple) -> bool:
    """Whether a queued row cannot be drafted."""
    uid, _, _, _, processors, budget = row
    block = getattr(generator, "draft_block_size", None)
    if block is not None and block < 2:
        return True  # a block holds the token that is fed first, and no draft
    if generator.draft_kind == "eagle3" and getattr(
        _sampling(generator, row), "seeded", False
    ):
        return True  # rounds of this kind draw without the request's seed
    # Where the request does not think, its budget does nothing.
    counts = budget is not None and getattr(budget, "enable_thinking", True)
    return bool(processors) or counts or uid in getattr(generator, "logprob_rows", ())


def _all_are_plain(generator: Any) -> bool:
    """Whether rows that could be drafted join a plain batch instead."""
    takes_turns = hasattr(generator, "speculative_batches")
    return _decodes_plainly(generator) and not takes_turns


def _decodes_plainly(generator: Any) -> bool:
    batch = generator._generation_batch
    return len(batch) > 0 and not getattr(batch, "is_speculative", False)


def _keep_logprobs(generator: Any, uids: Sequence[int]) -> None:
    """Have log-probabilities kept if one of these rows, or of those it joins, asks."""
    asked = getattr(generator, "logprob_rows", {})
    depths = [asked[uid] for uid in uids if uid in asked]
    batch = generator._generation_batch
    if _decodes_plainly(generator) and batch.compute_logprobs:
        depths.append(batch.top_logprobs_k)
    if depths:
        generator.compute_logprobs = True
        generator.top_logprobs_k = max(depths)


def _undrafted(generator: Any) -> set[int]:
    """Uids of the rows in flight that were admitted without the drafter."""
    rows: set[int] = getattr(generator, "undrafted_rows", set())
    return rows


def _use_plain_caches(generator: Any, plain: bool) -> None:
    """Have a warm batch of one restored as a cold one would be made."""
    if hasattr(generator.apc, "plain_rows"):
        generator.apc.plain_rows = plain
