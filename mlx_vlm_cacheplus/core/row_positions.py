"""A prompt row carries its own positions.

Language models with multimodal rotary positions (the Qwen VL lineage and its
text-only relatives) keep ``_position_ids`` and ``_rope_deltas`` on the model
object, and fall back to them whenever a forward pass brings no positions of its
own.  One object cannot stand for several rows: a left-padded row is shifted by its
padding, a prefix restored in a fresh process restarts at position 0, and the
deltas of the batch that decodes meet the rows of the batch that is prefilled.

:func:`with_row_positions` runs once a row, when the row is queued, and puts the
two arrays where the generator pads, slices and concatenates them with the rest of
the row.  Families differ in what they read of them:

- MiniMax M3 takes the place of a whole chunk from its first column, which for a
  shorter row lies in the padding: :func:`continued_to_the_left` counts on there.
- MiniMax M3, GLM-4V and Ernie 4.5 VL begin at position 0 while the model object has no
  deltas, whatever deltas a decode step brings: :func:`seat_batch_positions` lends it
  the batch's.  That binds one attribute and is all that a decode step has more.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

logger = logging.getLogger(__name__)


def keeps_positions_on_model(language_model: Any) -> bool:
    """True for a language model whose positions can outlive the row they belong to.

    Models whose ``get_rope_index`` has another signature (falcon_ocr,
    cohere_compass) are left alone.
    """
    return hasattr(language_model, "_rope_deltas") and _takes_media_grids(
        getattr(type(language_model), "get_rope_index", None)
    )


@functools.cache
def _takes_media_grids(get_rope_index: Any) -> bool:
    return (
        callable(get_rope_index)
        and "video_grid_thw" in inspect.signature(get_rope_index).parameters
    )


def with_row_positions(
    model: Any, token_ids: list[int], prompt_kwargs: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return the prompt kwargs of one row, completed with that row's positions.

    Args:
        model: a model or its language model; borrowed, and left without the
            positions that its embedding step may have parked on it.
        token_ids: the row's whole prompt.
        prompt_kwargs: what ``get_input_embeddings`` gave for this row; borrowed.

    Returns:
        ``prompt_kwargs`` itself where nothing is missing, otherwise a copy with
        ``position_ids`` ([1, tokens] or [3, 1, tokens]) and ``rope_deltas`` ([1, 1]).
    """
    language_model = getattr(model, "language_model", model)
    if not prompt_kwargs or not keeps_positions_on_model(language_model):
        return prompt_kwargs
    parked = _take_parked(language_model, len(token_ids))
    found: tuple[Any, Any] | None
    if prompt_kwargs.get("position_ids") is not None:
        found = (prompt_kwargs["position_ids"], prompt_kwargs.get("rope_deltas"))
    else:
        found = parked or _compute(language_model, token_ids, prompt_kwargs)
    if found is None:
        return prompt_kwargs
    position_ids, rope_deltas = found
    if rope_deltas is None:
        rope_deltas = position_ids.max() + 1 - len(token_ids)
    return {
        **prompt_kwargs,
        "position_ids": position_ids,
        "rope_deltas": mx.array(rope_deltas).reshape(-1, 1)[:1],
    }


def with_positions_for_rows(
    model: Any, sequences: list[tuple], uids: Sequence[int]
) -> list[tuple]:
    """Complete the queued sequences named by ``uids``; the others pass unchanged.

    A sequence is the generator's queue entry: ``(uid, token_ids, max_tokens,
    prompt_kwargs, logits_processors, thinking_budget_criteria)``.
    """
    wanted = set(uids)
    return [
        (
            (*s[:3], with_row_positions(model, s[1], s[3]), *s[4:])
            if s[0] in wanted
            else s
        )
        for s in sequences
    ]


def seat_batch_positions(batch: Any) -> None:
    """Give the model the deltas of the batch that is about to run.

    Speculative rounds verify without passing deltas, and some families ask whether
    the model has any before they take those that are passed.  So the model's attribute
    must be the batch's own, whatever was embedded or prefilled since its last step.
    """
    rope_deltas = getattr(batch, "_rope_deltas", None)
    if rope_deltas is not None:
        language_model = getattr(batch.model, "language_model", batch.model)
        language_model._rope_deltas = rope_deltas


def continued_to_the_left(
    name: str, row: mx.array, tokens: int, *, left: bool
) -> mx.array | None:
    """Pad positions of one axis so that they count on through the padding.

    The generator pads with zeros, which is right wherever positions are looked up
    column by column, since the padding is masked; not where the first column says
    where the row begins.

    Args:
        name: of the prompt kwarg that is padded.
        row: its value, for positions [1, tokens]; borrowed.
        tokens: the length to pad to.
        left: whether padding goes in front.

    Returns:
        [1, tokens], or None where zeros are as good.
    """
    if name != "position_ids" or not left or row.ndim != 2:
        return None
    missing = tokens - row.shape[1]
    if missing <= 0 or not mx.issubdtype(row.dtype, mx.signedinteger):
        return None
    before = row[:, :1] - mx.arange(missing, 0, -1, dtype=row.dtype)
    return mx.concatenate([before, row], axis=1)


def _take_parked(language_model: Any, length: int) -> tuple[Any, Any] | None:
    """Positions that the embedding step left on the model for the row just embedded.

    They are taken away, so that no later row can mistake them for its own.
    """
    position_ids = getattr(language_model, "_position_ids", None)
    if position_ids is None:
        return None
    rope_deltas = language_model._rope_deltas
    language_model._position_ids = None
    language_model._rope_deltas = None
    rows = position_ids.shape[1] if position_ids.ndim == 3 else position_ids.shape[0]
    if rows != 1 or position_ids.shape[-1] != length:
        return None
    return position_ids, rope_deltas


def _compute(
    language_model: Any, token_ids: list[int], prompt_kwargs: dict[str, Any]
) -> tuple[Any, Any] | None:
    """Ask the model for the positions of the whole prompt, media grids included."""
    try:
        return language_model.get_rope_index(
            mx.array(token_ids)[None],
            prompt_kwargs.get("image_grid_thw"),
            prompt_kwargs.get("video_grid_thw"),
            None,
        )
    except Exception as error:
        # The model decides alone, as it did before; the row is not worse off.
        logger.warning("No positions for a row of %d tokens: %s", len(token_ids), error)
        return None
