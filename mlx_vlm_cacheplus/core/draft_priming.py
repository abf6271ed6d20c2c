"""The drafter reads the whole prompt, chunk by chunk.

A drafter that has not read the prompt proposes little that the target accepts.  Chunked
prefill leaves one last column, and that column was all that the drafter was given: an
MTP drafter read one token, an EAGLE3 drafter that token beside the hidden state of
position 0.  Here each chunk's features go through the drafter's own forward pass when
the target has computed them, and only the drafter's keys and values are kept.

Two families:

- *look-ahead* drafters (MTP, EAGLE3): entry i of their cache has consumed the target's
  hidden state i and token i + 1.  After n tokens of a prompt they hold n - 1 entries;
  the hidden state of the last token waits for the token that follows.
- *context* drafters (DFlash, DSpark): entry i has consumed the hidden state i alone.
  Their first round takes the last column itself.

Invariants:

1. Every row is primed by itself, from its own first token to its last: padding is
   never read, whatever its side, and chunks may have any size.
2. The drafter that is loaded is one object for all requests.  A prompt batch primes a
   shallow copy, which shares the weights and owns all state; its ``reset`` and
   ``make_cache`` hand out what was primed.
3. Features of one chunk at most are alive.
4. A drafter of an unknown kind, or a batch that it cannot hold, is served as before,
   and ``reason`` says why.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import BatchKVCache, KVCache
from mlx_vlm.speculative.cache_state import iter_leaf_caches
from mlx_vlm.speculative.utils import speculative_prefill_kwargs

from .batch_drafter import own_copy


@dataclass
class PrimedRow:
    """What the drafter holds of one row of a prompt batch.

    Attributes:
        cache: the drafter's cache of this row alone; owned.
        entries: how many tokens or pairs it has consumed.
        read: how many of the row's tokens the target has read.
        whole: whether the entries start at the row's first token.
        pending: a restored hidden state that waits for the row's first token,
            [1, 1, features], or None.
        last: the hidden state of the newest token that was read, [1, 1, features].
    """

    cache: list[Any]
    entries: int = 0
    read: int = 0
    whole: bool = True
    pending: mx.array | None = None
    last: mx.array | None = None


class LookaheadDrafter:
    """MTP and EAGLE3 drafters: pairs of a hidden state and the token behind it."""

    lookahead = True

    def __init__(self, drafter: Any, kind: str):
        self.drafter = drafter
        self.first_position = 1 if kind == "eagle3" else 0

    def feed(self, row: PrimedRow, tokens: mx.array, hidden: mx.array) -> None:
        """Consume pairs of one row: [1, pairs] and [1, pairs, features]."""
        drafter = self.drafter
        drafter._cache = row.cache
        drafter._next_position = self.first_position + row.entries
        drafter._forward_tokens(tokens, hidden, tokens.dtype)
        row.entries += tokens.shape[1]

    def install(self, rows: Sequence[PrimedRow]) -> None:
        """Let ``reset`` and ``prefill_from_target_hidden`` hand out the primed state."""
        drafter = self.drafter
        positions = [self.first_position + row.entries for row in rows]

        def reset(target_model: Any, left_padding: Any = None) -> Any:
            type(drafter).reset(drafter, target_model)
            drafter._cache = _merged([row.cache for row in rows])
            for row in rows:
                row.cache = []  # what was merged is not kept twice
            drafter._next_position = (
                positions[0] if len(rows) == 1 else mx.array(positions, mx.int32)
            )
            return drafter._cache

        def prefill(
            input_ids: mx.array,
            hidden: mx.array,
            bonus_token: Any,
            sampler: Any,
            token_dtype: Any = mx.int32,
            greedy: bool = False,
            **kwargs: Any,
        ) -> None:
            bonus = mx.array(bonus_token).reshape(-1, 1).astype(token_dtype)
            self._seed(bonus, hidden[:, -1:], sampler, token_dtype, greedy)

        drafter.reset = reset
        drafter.prefill_from_target_hidden = prefill
        _replay_with_verified_states(drafter)

    def _seed(
        self, bonus: mx.array, hidden: mx.array, sampler: Any, dtype: Any, greedy: bool
    ) -> None:
        """Consume the first token of the reply and draft the next one from it."""
        drafter = self.drafter
        out = drafter._forward_tokens(bonus, hidden, dtype)
        logits_hidden, carried = out if isinstance(out, tuple) else (out, None)
        rest = (dtype, greedy) if self.first_position else (greedy,)
        drafter._set_seed_from_hidden(logits_hidden[:, -1:], sampler, *rest)
        if carried is not None:
            drafter._seed_hidden = carried[:, -1:]


class ContextDrafter:
    """DFlash and DSpark drafters: hidden states alone, projected into their caches."""

    lookahead = False

    def __init__(self, drafter: Any, kind: str):
        self.drafter = drafter

    def feed(self, row: PrimedRow, hidden: mx.array) -> None:
        """Consume hidden states of one row, [1, tokens, features].

        The proposal that comes with it is never evaluated; only the projected
        context is.
        """
        self.drafter._hidden(mx.zeros((1, 1), mx.int32), hidden, row.cache)
        row.entries += hidden.shape[1]

    def install(self, rows: Sequence[PrimedRow]) -> None:
        """Let ``reset`` and ``make_cache`` hand out the primed caches, row by row."""
        drafter, kind = self.drafter, type(self.drafter)
        waiting = [row.cache for row in rows]

        def make_cache() -> Any:
            return waiting.pop(0) if waiting else kind.make_cache(drafter)

        def reset(target_model: Any) -> Any:
            drafter.make_cache = functools.partial(kind.make_cache, drafter)
            fresh = kind.reset(drafter, target_model)
            drafter.make_cache = make_cache
            # One row takes the cache from here, several ask for one each.
            return make_cache() if len(rows) == 1 else fresh

        drafter.reset = reset
        length = max(row.entries for row in rows) + 1
        for name in ("choose_block_ceiling", "choose_initial_block_size"):
            choose = getattr(drafter, name, None)
            if callable(choose):
                setattr(drafter, name, _of_length(choose, length))


class DraftPrimer:
    """Primes the drafter of one prompt batch; has the interface of the collector of
    prompt features that it stands for.

    Attributes:
        kwargs: what a prefill chunk must return.
        chunks: features kept across chunks: none.
        rows: one for each row of the prompt batch, in its order.
    """

    chunks: tuple[mx.array, ...] = ()

    def __init__(self, prompt_batch: Any, family: Any, rows: list[PrimedRow]):
        # Not owned: a batch and its primer that hold each other keep the prompt's
        # embeddings until the next collection of cycles.
        self._batch = weakref.ref(prompt_batch)
        self.kind: str = prompt_batch.draft_kind
        self.family = family
        self.rows = rows
        self.kwargs = speculative_prefill_kwargs(self.kind, family.drafter)
        self.kwargs.pop("return_shared_kv", None)

    def append(self, output: Any) -> None:
        """Consume the chunk that the target has just computed."""
        self._consume(output)
        mx.async_eval(
            [row.last for row in self.rows if row.last is not None],
            [c.state for row in self.rows for c in _holding(row.cache)],
        )

    def filter(self, keep: Sequence[int]) -> None:
        """Keep these rows; the others have left the prompt batch."""
        self.rows = [self.rows[index] for index in keep]

    def finish(self, output: Any) -> Any:
        """Consume the last chunk and hand the drafter over to the decoding batch.

        Returns:
            ``output`` with the hidden state of each row's own last token.
        """
        self._consume(output)
        self.family.install(self.rows)
        newest = [row.last for row in self.rows if row.last is not None]
        output.hidden_states = [mx.concatenate(newest)]
        return output

    def _consume(self, output: Any) -> None:
        batch: Any = self._batch()
        states = output.hidden_states
        hidden = states[-1] if self.kind == "mtp" else mx.concatenate(states, axis=-1)
        start = batch._processed_prompt_columns
        padding = batch._left_padding_per_row
        for index, row in enumerate(self.rows):
            begin = padding[index]
            end = begin + batch._suffix_lens[index]
            first, stop = max(start, begin), min(start + hidden.shape[1], end)
            if first < stop:
                ids = batch._input_ids[index : index + 1, first - start :]
                part = hidden[index : index + 1, first - start : stop - start]
                self._consume_row(row, ids, part, at_end=stop == end)

    def _consume_row(
        self, row: PrimedRow, ids: mx.array, hidden: mx.array, at_end: bool
    ) -> None:
        """Consume tokens of one row.

        Args:
            ids: [1, tokens or more], from the first of these tokens on.
            hidden: [1, tokens, features].
            at_end: whether the prompt ends here.
        """
        row.last = mx.contiguous(hidden[:, -1:])
        row.read += hidden.shape[1]
        if not self.family.lookahead:
            # The last column is what the first round takes.
            if (known := hidden[:, :-1] if at_end else hidden).shape[1]:
                self.family.feed(row, known)
            return
        if row.pending is not None:
            hidden = mx.concatenate([row.pending, hidden], axis=1)
            row.pending = None
        else:
            ids = ids[:, 1:]
        pairs = hidden.shape[1] - at_end
        if pairs:
            self.family.feed(row, ids[:, :pairs], hidden[:, :pairs])


def prime(prompt_batch: Any) -> None:
    """Give a prompt batch a drafter of its own that reads what the target reads.

    Args:
        prompt_batch: as its constructor leaves it; its ``draft_model`` becomes the
            copy, its collector of features the primer.
    """
    shared, kind = prompt_batch.draft_model, prompt_batch.draft_kind
    if shared is None or kind is None:
        return
    family, reason = _family_of(shared, kind)
    count = len(prompt_batch.uids)
    if family is not None and count > 1 and not takes_ragged_rows(shared, kind):
        reason = f"{type(shared).__name__} cannot hold rows of different lengths"
    prompt_batch.draft_reason = reason
    if reason is not None:
        return
    own = own_copy(shared)
    # Bound once here: the copy's embeddings are the target's.
    own.bind(prompt_batch.model)
    restored = prompt_batch._cached_tokens_per_row
    rows = [
        PrimedRow(own.make_cache(), read=prefix, whole=prefix == 0)
        for prefix in restored
    ]
    prompt_batch.draft_model = own
    prompt_batch.shared_drafter = shared
    prompt_batch._speculative_prefill = DraftPrimer(
        prompt_batch, family(own, kind), rows
    )


def _family_of(drafter: Any, kind: str) -> tuple[Any, str | None]:
    if kind == "dflash":
        if callable(getattr(drafter, "_hidden", None)):
            return ContextDrafter, None
    elif callable(getattr(drafter, "prefill_from_target_hidden", None)):
        if callable(getattr(drafter, "_forward_tokens", None)):
            return LookaheadDrafter, None
    else:
        name = type(drafter).__name__
        return None, f"{name} reads the target's own cache and has no state"
    return None, f"{type(drafter).__name__} has no forward pass of a known kind"


def takes_ragged_rows(drafter: Any, kind: str) -> bool:
    """Whether one batch of the drafter can hold rows of different lengths."""
    # A DFlash batch has a cache for each row, an EAGLE3 one is ragged by design.
    ragged = getattr(drafter, "supports_ragged_batch_acceptance", False)
    return kind in ("dflash", "eagle3") or bool(ragged)


def _merged(caches: Sequence[list[Any]]) -> list[Any]:
    """One cache for all rows: a single row's own, or batch caches."""
    if len(caches) == 1:
        return caches[0]
    return [
        type(entries[0]).merge(list(entries)) for entries in zip(*caches, strict=True)
    ]


def _holding(cache: Sequence[Any]) -> list[Any]:
    """The entries that hold something, so that their state can be asked for."""
    return [c for c in iter_leaf_caches(cache) if not c.empty()]


def _of_length(choose: Callable[[int, int], Any], length: int) -> Callable[..., Any]:
    return lambda context_length, *args: choose(length, *args)


def _replay_with_verified_states(drafter: Any) -> None:
    """Let a round's accepted tokens be read with the target's hidden states.

    A drafter extends its proposals from its own hidden states.  Where it would keep
    those of accepted proposals, its cache after a reply would differ from the cache
    that reads the same tokens in a prompt; here they are read again, in the one
    forward pass that a round makes anyway.
    """
    if not all(type(c) in (KVCache, BatchKVCache) for c in drafter.make_cache()):
        return  # what cannot be trimmed at any place keeps the drafter's own way
    for name in ("accept_verified_tokens", "accept_verified_tokens_batch"):
        method = getattr(type(drafter), name, None)
        if method is not None:
            setattr(drafter, name, _replaying(drafter, method))


def _replaying(drafter: Any, method: Callable[..., None]) -> Callable[..., None]:
    def accept(
        verify_hidden: mx.array, draft: Any, accepted: Any, *args: Any, **kw: Any
    ):
        drafter.verified_hidden = verify_hidden
        appended = drafter._round_appended
        if appended:
            for entry in drafter._cache:
                entry.trim(appended)
            drafter._next_position = drafter._next_position - appended
            drafter._round_appended = 0
        method(drafter, verify_hidden, draft, accepted, *args, **kw)

    return accept
