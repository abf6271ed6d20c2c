"""The cache keeps replies that were written with a draft model."""

from __future__ import annotations

from typing import Any

from ..change import Change, Target

AR = "mlx_vlm.generate.ar"
MTP = "mlx_vlm.speculative.mtp"
EAGLE3 = "mlx_vlm.speculative.eagle3"
DFLASH = "mlx_vlm.speculative.dflash"
# Where a round decides what is accepted, for one row and for several.
WALKS_OF_ONE = ((EAGLE3, "_eagle3_walk"), (DFLASH, "_speculative_walk"))
WALKS = (
    (MTP, "_speculative_walk_batch"),
    (MTP, "_speculative_walk_batch_deferred_greedy"),
    (EAGLE3, "_eagle3_walk_batch"),
    (DFLASH, "_speculative_walk_batch"),
    (DFLASH, "_sample_dflash_target_walk"),
    (MTP, "_speculative_walk_batch_uniform_acceptance"),
    (MTP, "_speculative_walk_batch_deferred_uniform"),
    (EAGLE3, "_eagle3_walk_batch_uniform_acceptance"),
)


class DraftedReplies(Change):
    name = "drafted-replies"
    summary = "A reply written with a draft model enters the prefix cache as well"
    targets = (
        Target(AR, "PromptProcessingBatch.generate"),
        Target(AR, "SpeculativeGenerationBatch.next"),
        Target(AR, "SpeculativeGenerationBatch._refresh_uids"),
        Target(AR, "run_speculative_server_rounds"),
        *(Target(*walk) for walk in (*WALKS_OF_ONE, *WALKS)),
    )
    why = (
        "With a draft model the reply is dropped when its row ends, and the next turn reads it again. A reply that ends "
        "inside a verified block leaves caches that are ahead of it, so what is there could not be kept as it is."
    )
    upstream = "related: https://github.com/Blaizzy/mlx-vlm/issues/2206, https://github.com/Blaizzy/mlx-vlm/issues/946"
    remove_when = "SpeculativeGenerationBatch commits the rows that it drops"
    requires = ("output-tokens", "reply-ids")
    marks = ("mlx_vlm.generate.drafted_replies:cut_at_row_ends",)

    def apply(self, patcher: Any) -> None:
        from ..core import drafted_replies as core
        from ..core.output_tokens import open_rows

        def generate(original: Any) -> Any:
            def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
                rows = open_rows(self)
                batch = original(self, *args, **kwargs)
                core.attach_drafted_rows(batch, rows)
                return batch

            return wrapper

        def refresh(original: Any) -> Any:
            def wrapper(self: Any) -> None:
                core.commit_drafted_rows(self)
                original(self)

            return wrapper

        def rounds(original: Any) -> Any:
            def wrapper(*args: Any, stop_check: Any = None, **kwargs: Any) -> Any:
                if stop_check is not None:
                    stop_check = core.watched_stop_check(stop_check)
                return original(*args, stop_check=stop_check, **kwargs)

            return wrapper

        patcher.replace_method(AR, "PromptProcessingBatch.generate", generate)
        patcher.surround(AR, "SpeculativeGenerationBatch.next", core.recorded_round)
        patcher.replace_method(AR, "SpeculativeGenerationBatch._refresh_uids", refresh)
        patcher.replace_method(AR, "run_speculative_server_rounds", rounds)
        _apply_to_walks(patcher, core.cut_at_row_ends)


def _apply_to_walks(patcher: Any, cut: Any) -> None:
    def of_one(original: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            accepted, tokens = original(*args)
            (accepted,), (tokens,) = cut([accepted], [tokens])
            return accepted, tokens

        return wrapper

    def of_all(original: Any) -> Any:
        return lambda *args, **kwargs: cut(*original(*args, **kwargs))

    for walk in WALKS_OF_ONE:
        patcher.replace_method(*walk, of_one)
    for walk in WALKS:
        patcher.replace_method(*walk, of_all)


CHANGE = DraftedReplies()
