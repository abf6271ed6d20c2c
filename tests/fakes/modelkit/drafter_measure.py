"""Greedy acceptance of a drafter, with stock's own round loops.

``primed`` is what a drafter can do: it has read the whole prompt, each hidden state
paired with the token after it. ``starved`` is the same drafter that was shown only
the prompt's last token, as after a prefix cache that kept nothing for it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.speculative.utils import (
    run_speculative_server_rounds,
    speculative_hidden_state,
    speculative_prefill_kwargs,
)

from .dialogues import Dialogue, ask, make_records, notes_block, record_lines
from .rendering import encode_text, pieces_of, shared_tokenizer
from .tokenizer import END, STOP

LIMIT = 120
TASKS: tuple[tuple[str, int], ...] = (("dump", 20), ("get", 20), ("loop", 10))


@dataclass
class Acceptance:
    """Drafted tokens that the target took, of those that it was shown."""

    accepted: float = 0.0
    drafted: int = 0
    first: int = 0
    rounds: int = 0

    @property
    def rate(self) -> float:
        """Accepted of drafted."""
        return self.accepted / max(1, self.drafted)

    @property
    def first_rate(self) -> float:
        """Rounds whose first drafted token was accepted."""
        return self.first / max(1, self.rounds)


def held_out_prompt(seed: int, task: str, records: int) -> list[int]:
    """Return the ids of an unseen one-question chat, up to its answer."""
    rng = random.Random(900_000 + seed)
    drawn = make_records(rng, records)
    notes = notes_block(rng, drawn, 6)
    chosen = rng.sample(drawn, min(10, records)) if task == "get" else drawn
    keys = [record[0] for record in chosen] if task == "get" else []
    question = ask("get:" if task == "get" else task, keys)
    chat = Dialogue(
        [
            {"role": "system", "content": notes},
            {"role": "user", "content": question},
            {"role": "assistant", "content": record_lines(chosen)},
        ]
    )
    text = "".join(piece for piece, is_answer in pieces_of(chat)[:-3] if not is_answer)
    return encode_text(text)


def acceptance(
    target: nn.Module,
    drafter: nn.Module,
    kind: str,
    prompt: list[int],
    *,
    primed: bool = True,
    block_size: int | None = None,
) -> tuple[Acceptance, list[int]]:
    """Draft a greedy reply to ``prompt``; returns the acceptance and the reply's ids.

    block_size: None for what stock takes by itself, which is 2 for EAGLE3.
    """
    text = target.language_model
    for name in ("_position_ids", "_rope_deltas"):
        if hasattr(text, name):
            setattr(text, name, None)
    cache = make_prompt_cache(text)
    ids = mx.array([prompt])
    output = text(ids, cache=cache, **speculative_prefill_kwargs(kind, drafter))
    hidden = speculative_hidden_state(kind, output)
    first = mx.argmax(output.logits[:, -1], axis=-1)
    mx.eval(first, hidden)
    seen = ids if primed else ids[:, -1:]
    rounds = run_speculative_server_rounds(
        target,
        drafter,
        cache,
        hidden if primed else hidden[:, -1:],
        draft_kind=kind,
        first_bonus=first,
        max_tokens=LIMIT,
        sampler=lambda logits: mx.argmax(logits, axis=-1),
        draft_block_size=block_size,
        token_dtype=ids.dtype,
        greedy_sampling=True,
        shared_kv_states=getattr(output, "shared_kv_states", None),
        prompt_tokens=seen,
    )
    ends = {shared_tokenizer().token_to_id(name) for name in (END, STOP)}
    reply = [int(first.item())]
    for tokens, _ in rounds:
        reply += [int(token) for token in tokens if token is not None]
        if reply[-1] in ends:
            break
    rounds.close()
    return _count(drafter), reply


def _count(drafter: Any) -> Acceptance:
    lengths = drafter.accept_lens
    drafted = drafter.draft_lens
    return Acceptance(
        accepted=float(sum(lengths)),
        drafted=int(sum(drafted)),
        first=sum(length >= 1 for length in lengths),
        rounds=len(lengths),
    )


def mean_acceptance(
    target: nn.Module,
    drafter: nn.Module,
    kind: str,
    task: str,
    records: int,
    *,
    primed: bool,
    block_size: int | None,
    chats: int,
) -> Acceptance:
    """Return the acceptance over ``chats`` held-out prompts."""
    total = Acceptance()
    for seed in range(chats):
        prompt = held_out_prompt(seed, task, records)
        part, _ = acceptance(
            target, drafter, kind, prompt, primed=primed, block_size=block_size
        )
        total.accepted += part.accepted
        total.drafted += part.drafted
        total.first += part.first
        total.rounds += part.rounds
    return total
