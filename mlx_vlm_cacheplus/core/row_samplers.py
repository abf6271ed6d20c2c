"""Each row of a batch is sampled as its own request asks.

A batch had one sampler, one greedy flag and one setting for log-probabilities: those of
the request that came when the server was idle.  Whoever joined it was sampled as that
one had asked.  Here each row brings its own ``Sampling``.

Invariants:

1. What a row draws depends on its logits, its settings, its seed and how many tokens it
   has drawn; never on its neighbours, nor on when it joined.  (EAGLE-3 rounds draw
   without a key; requests with a seed of their own do without them.)
2. A batch whose rows agree is sampled by the very sampler that one of them has alone:
   not one array operation more.
3. Where rows differ, those that agree are sampled together, once for each group.
   Nothing waits for the device.
4. A batch computes log-probabilities while one of its rows asks for them, and delivers
   them to the rows that ask.
5. Groups are formed when rows join or leave, not while they decode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class Sampling:
    """How one request is sampled, and what it is told about it.

    Attributes:
        sampler: log-probabilities [rows, vocabulary] -> tokens [rows].
        key: equal for requests that one sampler serves; None for greedy ones.
        seeded: whether the request brings a seed of its own.
        logprobs: whether it asks for log-probabilities.
        depth: of how many of the best tokens; 0 for none.
    """

    sampler: Callable[[mx.array], mx.array]
    key: tuple | None = None
    seeded: bool = False
    logprobs: bool = False
    depth: int = 0


def sample_best(logprobs: mx.array) -> mx.array:
    """The likeliest token of each row."""
    return mx.argmax(logprobs, axis=-1)


class GroupedSampler:
    """Samples the rows of one batch, each as it asks; rows that agree go together."""

    def __init__(self, rows: Sequence[Sampling]):
        groups: dict[tuple | None, list[int]] = {}
        for place, row in enumerate(rows):
            groups.setdefault(row.key, []).append(place)
        self._groups = [
            (rows[places[0]].sampler, places, mx.array(places))
            for places in groups.values()
        ]
        grouped = [place for places in groups.values() for place in places]
        self._back = mx.array(sorted(range(len(rows)), key=grouped.__getitem__))

    def sample_target(
        self, logprobs: mx.array, *, row_ids: Sequence[int], positions: Sequence[int]
    ) -> mx.array:
        """Log-probabilities [rows, vocabulary], and what keys each draw -> tokens [rows]."""
        drawn = []
        for sampler, places, index in self._groups:
            rows = logprobs[index]
            if hasattr(sampler, "sample_target"):
                tokens = sampler.sample_target(
                    rows,
                    row_ids=[row_ids[place] for place in places],
                    positions=[positions[place] for place in places],
                )
            else:
                tokens = sampler(rows)
            drawn.append(tokens)
        return mx.concatenate(drawn)[self._back]


class RowSamplers:
    """Stands for a batch generator's one sampler, and knows the rows apart.

    Attributes:
        rows: how each request in flight is sampled, by uid.
    """

    def __init__(self, fallback: Callable[[mx.array], mx.array]):
        self.rows: dict[int, Sampling] = {}
        self._fallback = fallback

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Sample rows that nobody described."""
        return self._fallback(logprobs)


def note_sampling(batch_gen: Any, active: dict[int, dict]) -> None:
    """Tell a batch generator how its rows are sampled.

    Call before each step of the server, so that every row is known before it is
    admitted.

    Args:
        active: requests in flight by uid, each with its ``sampling``.
    """
    if not getattr(batch_gen, "has_pending_prompts", False):
        return
    if not isinstance(batch_gen.sampler, RowSamplers):
        batch_gen.sampler = RowSamplers(batch_gen.sampler)
    batch_gen.sampler.rows = {
        uid: info["sampling"] for uid, info in active.items() if "sampling" in info
    }


def sample_prompt_rows(
    prompt_batch: Any, sampler: Any, compute_logprobs: bool, top_logprobs_k: int
) -> tuple[Any, bool, int]:
    """Settle how a prompt batch draws its first tokens, and the batch behind it the rest.

    Args:
        prompt_batch: about to hand its rows over; its ``greedy_sampling`` is set.
        sampler: the generator's.
        compute_logprobs, top_logprobs_k: the generator's, for rows that nobody described.

    Returns:
        The three, as the rows of this batch ask.
    """
    known = sampler.rows if isinstance(sampler, RowSamplers) else {}
    if not known.keys() >= set(prompt_batch.uids):
        return sampler, compute_logprobs, top_logprobs_k
    prompt_batch.row_sampling = {uid: known[uid] for uid in prompt_batch.uids}
    rows = list(prompt_batch.row_sampling.values())
    prompt_batch.greedy_sampling = _all_greedy(rows)
    return _one_sampler(rows), *_logprobs(rows)


def hand_over_sampling(prompt_batch: Any, batch: Any) -> None:
    """Give the batch that decodes the rows what the prompt batch knew of them."""
    batch.row_sampling = sampling_of(prompt_batch)


def sampling_of(batch: Any) -> dict[int, Sampling]:
    """How each row of a batch is sampled, by uid; empty where nobody described them."""
    return getattr(batch, "row_sampling", None) or {}


def join_sampling(batch: Any, other: Any) -> None:
    """Take over the rows of ``other``, which have just joined ``batch``."""
    batch.row_sampling = {**sampling_of(batch), **sampling_of(other)}
    settle_sampling(batch)


def settle_sampling(batch: Any) -> None:
    """Sample a decode batch by the rows that it has now; call when rows joined or left."""
    known = sampling_of(batch)
    if not batch.uids or not known.keys() >= set(batch.uids):
        return
    batch.row_sampling = {uid: known[uid] for uid in batch.uids}
    rows = list(batch.row_sampling.values())
    batch.sampler, batch.greedy_sampling = _one_sampler(rows), _all_greedy(rows)
    batch.compute_logprobs, batch.top_logprobs_k = _logprobs(rows)
    if not batch.compute_logprobs:
        # What the pending tokens have is for nobody, and rows that join have none.
        batch._next_lps = batch._next_top_idx = batch._next_top_lp = None


def hide_unasked(rows: dict[int, Sampling], responses: Iterable[Any]) -> None:
    """Take log-probabilities from the responses of rows that did not ask.

    Call where a step has delivered some.

    Args:
        rows: ``sampling_of`` the batch, from before its ended rows left.
        responses: what the step returns; changed in place.
    """
    for response in responses:
        if response.uid in rows and not rows[response.uid].logprobs:
            response.token_logprob, response.top_logprobs = 0.0, None


def _one_sampler(rows: Sequence[Sampling]) -> Any:
    agree = all(row.key == rows[0].key for row in rows)
    return rows[0].sampler if agree else GroupedSampler(rows)


def _all_greedy(rows: Sequence[Sampling]) -> bool:
    return all(row.key is None for row in rows)


def _logprobs(rows: Sequence[Sampling]) -> tuple[bool, int]:
    return any(row.logprobs for row in rows), max(row.depth for row in rows)
