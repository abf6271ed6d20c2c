"""A long prompt is not overtaken for ever."""

from __future__ import annotations

from typing import Any

from ..change import Change, Target

AR = "mlx_vlm.generate.ar"


class FairQueue(Change):
    name = "fair-queue"
    summary = "A waiting prompt is overtaken by no more tokens of later ones than it has itself"
    targets = (Target(AR, "BatchGenerator.next"),)
    why = (
        "Waiting prompts are sorted by length at every arrival and the shortest are admitted, so that a long prompt waits as "
        "long as shorter ones keep coming, however late they come."
    )
    upstream = "related: https://github.com/Blaizzy/mlx-vlm/issues/2033"
    remove_when = "BatchGenerator bounds how often a waiting prompt is overtaken"
    marks = ("mlx_vlm.generate.fair_queue:in_fair_order",)

    def apply(self, patcher: Any) -> None:
        from ..core import fair_queue as core

        patcher.surround(AR, "BatchGenerator.next", core.in_fair_order)


CHANGE = FairQueue()
