"""The cache keeps what the model wrote."""

from __future__ import annotations

import functools
from typing import Any

from ..change import Change, Target

AR = "mlx_vlm.generate.ar"
APC = "mlx_vlm.apc"
COORDINATOR = "mlx_vlm.apc_coordinator"


class OutputTokens(Change):
    name = "output-tokens"
    summary = "A reply enters the prefix cache when its row ends, however it ends"
    targets = (
        Target(AR, "PromptProcessingBatch.generate"),
        Target(AR, "GenerationBatch._step"),
        Target(AR, "GenerationBatch.filter"),
        Target(AR, "GenerationBatch.extend"),
        Target(AR, "BatchGenerator.next"),
        Target(APC, "APCManager.store_exact_cache"),
        Target(COORDINATOR, "APCCoordinator.checkpoint_lengths"),
    )
    why = (
        "Only prompts are stored. A conversation's next turn holds the previous reply, so the server reads again what it "
        "has just written; for models stored as whole states it also loses the state at the end of the reply."
    )
    upstream = "related: https://github.com/Blaizzy/mlx-vlm/issues/946, https://github.com/Blaizzy/mlx-vlm/issues/999"
    remove_when = "GenerationBatch commits the rows that it drops"
    marks = ("mlx_vlm.generate.output_tokens:commit_ended_rows",)
    # Two places, stock's default, hold one conversation's prompt and reply; a second agent would push both out.
    env_defaults = {"APC_CHECKPOINT_ENTRIES": "8"}

    def apply(self, patcher: Any) -> None:
        from ..core import output_tokens as core

        def generate(original: Any) -> Any:
            def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
                rows = core.open_rows(self)
                batch = original(self, *args, **kwargs)
                core.attach_rows(batch, rows)
                return batch

            return wrapper

        def step(original: Any) -> Any:
            return lambda self: core.step_recorded(
                self, functools.partial(original, self)
            )

        def filter_rows(original: Any) -> Any:
            def wrapper(self: Any, keep: Any) -> None:
                core.commit_ended_rows(self, keep)
                original(self, keep)

            return wrapper

        def extend(original: Any) -> Any:
            def wrapper(self: Any, other: Any) -> None:
                original(self, other)
                core.merge_rows(self, other)

            return wrapper

        patcher.replace_method(AR, "PromptProcessingBatch.generate", generate)
        patcher.replace_method(AR, "GenerationBatch._step", step)
        patcher.replace_method(AR, "GenerationBatch.filter", filter_rows)
        patcher.replace_method(AR, "GenerationBatch.extend", extend)
        patcher.surround(AR, "BatchGenerator.next", core.rows_survive_errors)
        _apply_to_storage(patcher)


def _apply_to_storage(patcher: Any) -> None:
    from mlx_vlm.apc import _cache_nbytes

    from ..core import superseded_states as core

    def store(original: Any) -> Any:
        def wrapper(
            self: Any, token_ids: Any, prompt_cache: Any, *, extra_hash: int = 0
        ) -> bool:
            nbytes = _cache_nbytes(prompt_cache)
            # A state that will be refused must not cost its predecessors.
            if self._exact_cache_max > 0 and nbytes <= self.memory_max_bytes:
                core.make_room_for_successor(self, token_ids, extra_hash, nbytes)
            return original(self, token_ids, prompt_cache, extra_hash=extra_hash)

        return wrapper

    def lengths(original: Any) -> Any:
        return lambda self, *args: core.bounded_captures(original(self, *args))

    patcher.replace_method(APC, "APCManager.store_exact_cache", store)
    patcher.replace_method(COORDINATOR, "APCCoordinator.checkpoint_lengths", lengths)


CHANGE = OutputTokens()
