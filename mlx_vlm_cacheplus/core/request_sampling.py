"""How a request asks to be sampled, read once when it arrives.

Every draw is keyed by the request's seed and by how many tokens it has drawn.  Samplers
that filter by min-p, top-n-sigma, p-less or typical-p do so too; the server drew those
from one stream of random numbers for all, or (min-p) did not filter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm.generate.dispatch import DEFAULT_SEED
from mlx_vlm.sample_utils import (
    apply_min_p,
    apply_p_less,
    apply_top_k,
    apply_top_n_sigma,
    apply_top_p,
    apply_typical_p,
)

from .row_samplers import Sampling, sample_best

# What decides a draw, beside the logits and the seed.
SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "top_n_sigma",
    "p_less",
    "typical_p",
)


def make_sampling(server: Any, args: Any) -> Sampling:
    """Read from a request's arguments how it is sampled.

    Args:
        server: the response generator; makes the sampler.
        args: the request's ``GenerationArguments``; borrowed.

    Raises:
        ValueError, TypeError: for settings that no sampler can be made of.
    """
    asks = bool(args.logprobs)
    depth = server.top_logprobs_k if asks else 0
    if args.temperature == 0:
        return Sampling(sample_best, logprobs=asks, depth=depth)
    seed = DEFAULT_SEED if args.seed is None else int(args.seed)
    return Sampling(
        _make_sampler(server, args),
        key=(seed, *(getattr(args, name) for name in SETTINGS)),
        seeded=seed != DEFAULT_SEED,
        logprobs=asks,
        depth=depth,
    )


def _make_sampler(server: Any, args: Any) -> Callable[[mx.array], mx.array]:
    """A sampler whose draws are keyed by seed and position, whatever it filters by."""
    own = _filter_of_its_own(args)
    filters = [] if own is None else [own]
    if own is not None and 0 < args.top_p < 1:
        filters.append(functools.partial(apply_top_p, top_p=args.top_p))
    if 0 < args.min_p <= 1:
        filters.append(functools.partial(apply_min_p, min_p=args.min_p))
    if own is not None and args.top_k > 0:
        filters.append(functools.partial(apply_top_k, top_k=args.top_k))
    if own is not None:
        neutral = {"top_p": 1.0, "top_k": 0, "p_less": False, "typical_p": 1.0}
        args = dataclasses.replace(args, top_n_sigma=0.0, **neutral)
    sampler: Callable[[mx.array], mx.array] = server._make_sampler(args)
    return FilteredSampler(sampler, filters) if filters else sampler


def _filter_of_its_own(args: Any) -> Callable[[mx.array], mx.array] | None:
    """The filter for which the server draws without a seed, or None."""
    if args.top_n_sigma > 0:
        return functools.partial(apply_top_n_sigma, n_sigma=args.top_n_sigma)
    if args.p_less:
        return functools.partial(apply_p_less, temp=args.temperature)
    if 0 < args.typical_p < 1:
        return functools.partial(apply_typical_p, typical_p=args.typical_p)
    return None


class FilteredSampler:
    """A sampler that is shown the tokens that filters leave."""

    def __init__(self, sampler: Any, filters: Sequence[Callable[[mx.array], mx.array]]):
        self._sampler = sampler
        self._filters = filters

    def __call__(self, logprobs: mx.array) -> mx.array:
        return self._sampler(self._left(logprobs))

    def sample_target(self, logprobs: mx.array, **where: Any) -> mx.array:
        return self._sampler.sample_target(self._left(logprobs), **where)

    def sample_proposal(self, logprobs: mx.array, **where: Any) -> mx.array:
        return self._sampler.sample_proposal(self._left(logprobs), **where)

    def _left(self, logprobs: mx.array) -> mx.array:
        for keep in self._filters:
            logprobs = keep(logprobs)
        return logprobs
