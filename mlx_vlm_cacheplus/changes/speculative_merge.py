"""Rows join a running speculative batch at a round boundary."""

from __future__ import annotations

import functools
from typing import Any

from ..change import Change, Option, Target
from ..core.merge_pace import MODE, check_mode

AR = "mlx_vlm.generate.ar"
MTP = "mlx_vlm.speculative.mtp"
EAGLE3 = "mlx_vlm.speculative.eagle3"
DFLASH = "mlx_vlm.speculative.dflash"
ROUNDS = (MTP, EAGLE3, DFLASH)
CLAMPS = "_requires_uniform_batch_acceptance"
COMMIT = "commit_speculative_round"


class SpeculativeMerge(Change):
    name = "speculative-merge"
    summary = (
        "Speculative batches that run side by side become one, where that is faster"
    )
    targets = (
        Target(AR, "BatchGenerator.next"),
        Target(AR, "SpeculativeGenerationBatch.next"),
        Target(AR, "run_speculative_server_rounds"),
        Target(MTP, "_mtp_verify_target"),
        *(Target(module, CLAMPS) for module in ROUNDS),
        *(Target(module, COMMIT) for module in ROUNDS),
    )
    why = (
        "Batches that take turns verify apart: four rows that came one after the other cost four verify steps a token, "
        "where four that came together cost one."
    )
    upstream = "related: https://github.com/Blaizzy/mlx-vlm/issues/1471, https://github.com/Blaizzy/mlx-vlm/issues/2206"
    remove_when = "SpeculativeGenerationBatch.extend takes rows while it runs"
    requires = ("draft-state", "row-samplers", "speculative-turns")
    options = (
        Option(
            "--cacheplus-draft-merge",
            MODE,
            "Speculative batches that run side by side become one: auto (the default; unless their rounds were measured "
            "to be slower so), never, or always (where it is possible).",
            metavar="auto|never|always",
            check=check_mode,
        ),
    )
    marks = ("mlx_vlm.generate.speculative_merge:join_batches",)

    def apply(self, patcher: Any) -> None:
        from ..core import drafted_replies, row_acceptance
        from ..core import speculative_merge as core
        from ..core.round_features import note_features

        def turn(original: Any) -> Any:
            return lambda self: core.timed_round(
                self, functools.partial(original, self)
            )

        def rounds(original: Any) -> Any:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                batch = drafted_replies.current_batch()
                if batch is not None:
                    core.keep_rows_apart(batch)
                    kwargs["max_tokens"] = core.tokens_left(batch)
                    kwargs["sampler"] = core.sampler_of(batch)
                    kwargs["row_ids"] = core.row_numbers(batch)
                return original(*args, **kwargs)

            return wrapper

        def verify(original: Any) -> Any:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                note_features([result.hidden])
                return result

            return wrapper

        for module in ROUNDS:
            patcher.set(module, CLAMPS, drafted_replies.rows_accept_alike)
            patcher.set(module, COMMIT, row_acceptance.commit_round)
        patcher.precede(
            AR, "BatchGenerator.next", lambda self, **_: core.join_batches(self)
        )
        patcher.replace_method(AR, "SpeculativeGenerationBatch.next", turn)
        patcher.replace_method(AR, "run_speculative_server_rounds", rounds)
        patcher.replace_method(MTP, "_mtp_verify_target", verify)


CHANGE = SpeculativeMerge()
