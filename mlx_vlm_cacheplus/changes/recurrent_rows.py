"""A warm row of a recurrent model is prefilled by itself."""

from __future__ import annotations

from typing import Any

from ..change import Change, Target

AR = "mlx_vlm.generate.ar"


class RecurrentRows(Change):
    name = "recurrent-rows"
    summary = "Rows that would spoil each other are prefilled one at a time: warm recurrent ones, and pictures"
    targets = (Target(AR, "BatchGenerator._next"),)
    why = (
        "Rows prefilled beside a warm one are padded on the right. Qwen3.5 runs such a batch row by row and loses the "
        "lengths that mask the padding, so the state of a short row reads padding: its first token is right, the rest "
        "is not. Features that a model takes as a list (qwen3_vl's pictures) are the first row's for all rows of a batch."
    )
    upstream = "no issue yet; the cure in the model is to carry `lengths` through Qwen3_5Model's per-row path"
    remove_when = (
        "a warm and a cold row of different length, prefilled together, give their solo tokens on Qwen3.5, and prompts with "
        "different pictures on Qwen3-VL"
    )
    marks = ("mlx_vlm.generate.recurrent_rows:rows_that_fit_together",)

    def apply(self, patcher: Any) -> None:
        from ..core import recurrent_rows as core

        patcher.surround(AR, "BatchGenerator._next", core.rows_that_fit_together)


CHANGE = RecurrentRows()
