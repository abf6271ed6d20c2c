"""Positions come from the row, never from the model object."""

from __future__ import annotations

import functools
from typing import Any

from ..change import Change, Target

AR = "mlx_vlm.generate.ar"
INSERT = "BatchGenerator.insert"
PAD = "_pad_sequence_aligned_prompt_kwarg"
STEP = "GenerationBatch._step"
SPECULATIVE_NEXT = "SpeculativeGenerationBatch.next"


class RowPositions(Change):
    name = "row-positions"
    summary = "Each row carries its own rotary positions"
    targets = (
        Target(AR, INSERT),
        Target(AR, PAD),
        Target(AR, STEP),
        Target(AR, SPECULATIVE_NEXT),
    )
    why = (
        "Qwen3.5-type text models keep positions on the model object. A left-padded row in a ragged batch gets keys "
        "shifted by its padding, a prefix restored in a fresh process restarts at position 0, and two batches that meet "
        "fail with a shape error. Wrong positions are wrong keys, and a cache would keep them."
    )
    upstream = "no issue yet; related to https://github.com/Blaizzy/mlx-vlm/pull/2263"
    remove_when = "get_input_embeddings returns position_ids and rope_deltas for every model that has get_rope_index"
    marks = ("mlx_vlm.generate.row_positions:with_row_positions",)

    def apply(self, patcher: Any) -> None:
        from ..core import row_positions as core

        def insert(original: Any) -> Any:
            @functools.wraps(original)
            def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
                uids = original(self, *args, **kwargs)
                self._unprocessed_sequences = core.with_positions_for_rows(
                    self.model, self._unprocessed_sequences, uids
                )
                return uids

            return wrapper

        def pad(original: Any) -> Any:
            @functools.wraps(original)
            def wrapper(key: str, v: Any, target_length: int, *, left: bool) -> Any:
                padded = core.continued_to_the_left(key, v, target_length, left=left)
                if padded is not None:
                    return padded
                return original(key, v, target_length, left=left)

            return wrapper

        def seated(original: Any) -> Any:
            @functools.wraps(original)
            def wrapper(self: Any) -> Any:
                core.seat_batch_positions(self)
                return original(self)

            return wrapper

        patcher.replace_method(AR, INSERT, insert)
        patcher.replace_method(AR, PAD, pad)
        patcher.replace_method(AR, STEP, seated)
        patcher.replace_method(AR, SPECULATIVE_NEXT, seated)


CHANGE = RowPositions()
