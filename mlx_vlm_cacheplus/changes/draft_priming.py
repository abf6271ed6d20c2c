"""The drafter reads the whole prompt."""

from __future__ import annotations

from typing import Any

from ..change import Change, Target

AR = "mlx_vlm.generate.ar"


class DraftPriming(Change):
    name = "draft-priming"
    summary = (
        "The drafter is primed with the whole prompt, chunk by chunk, for each batch"
    )
    targets = (
        Target(AR, "PromptProcessingBatch.__init__"),
        Target(AR, "PromptProcessingBatch.generate"),
        Target(AR, "SpeculativeGenerationBatch._refresh_uids"),
    )
    why = (
        "Chunked prefill leaves one last column, and that is all that a drafter is primed with: an MTP drafter reads one "
        "token of the prompt, an EAGLE3 drafter pairs it with the hidden state of position 0, and few drafts are accepted."
    )
    upstream = "related: https://github.com/Blaizzy/mlx-vlm/issues/2206, https://github.com/Blaizzy/mlx-vlm/issues/1471"
    remove_when = "prefill chunks reach the drafter"
    marks = ("mlx_vlm.speculative.draft_priming:prime",)

    def apply(self, patcher: Any) -> None:
        from ..core import batch_drafter
        from ..core import draft_priming as core

        def init(original: Any) -> Any:
            def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
                original(self, *args, **kwargs)
                core.prime(self)

            return wrapper

        def generate(original: Any) -> Any:
            def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
                batch = original(self, *args, **kwargs)
                batch_drafter.attach(self, batch)
                return batch

            return wrapper

        def refresh(original: Any) -> Any:
            def wrapper(self: Any) -> None:
                batch_drafter.report_back(self)
                original(self)
                batch_drafter.let_go(self)

            return wrapper

        patcher.replace_method(AR, "PromptProcessingBatch.__init__", init)
        patcher.replace_method(AR, "PromptProcessingBatch.generate", generate)
        patcher.replace_method(AR, "SpeculativeGenerationBatch._refresh_uids", refresh)


CHANGE = DraftPriming()
