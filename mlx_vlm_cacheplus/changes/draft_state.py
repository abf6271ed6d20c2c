"""What the drafter has read is kept with the target's part."""

from __future__ import annotations

from typing import Any

from ..change import Change, Target

AR = "mlx_vlm.generate.ar"
DFLASH = "mlx_vlm.speculative.dflash"


class DraftState(Change):
    name = "draft-state"
    summary = "The drafter's state is stored and restored with the prefix"
    targets = (
        Target(AR, "BatchGenerator.__init__"),
        Target(AR, "BatchGenerator.remove"),
        Target(AR, "PromptProcessingBatch.__init__"),
        Target(AR, "PromptProcessingBatch.prompt_step"),
        Target(AR, "PromptProcessingBatch.generate"),
        Target(DFLASH, "_dflash_verify"),
        Target(DFLASH, "_dflash_verify_greedy"),
    )
    why = (
        "A prefix that is restored brings back the target's part alone: the drafter starts from nothing at each turn, sees "
        "only the new tokens, and most of what it drafts is rejected."
    )
    upstream = "related: https://github.com/Blaizzy/mlx-vlm/issues/2206, https://github.com/Blaizzy/mlx-vlm/issues/1471"
    remove_when = "the prefix cache stores a request's speculative state"
    requires = ("segment-tree", "drafted-replies", "draft-priming")
    marks = ("mlx_vlm.draft_state:DraftPart",)

    def apply(self, patcher: Any) -> None:
        from ..core import draft_state as core
        from ..core.round_features import note_features

        def configure(original: Any) -> Any:
            def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
                original(self, *args, **kwargs)
                if self.apc is not None:
                    core.configure(self.apc, self.draft_model, self.draft_kind)

            return wrapper

        def remove(original: Any) -> Any:
            def wrapper(self: Any, uid: Any) -> bool:
                with core.offered_while_read(self._prompt_batch, uid):
                    return original(self, uid)

            return wrapper

        def restore(original: Any) -> Any:
            def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
                original(self, *args, **kwargs)
                core.restore_rows(self)

            return wrapper

        def generate(original: Any) -> Any:
            def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
                with core.offered_while_read(self):
                    batch = original(self, *args, **kwargs)
                core.attach(self, batch)
                return batch

            return wrapper

        patcher.replace_method(AR, "BatchGenerator.__init__", configure)
        patcher.replace_method(AR, "BatchGenerator.remove", remove)
        patcher.replace_method(AR, "PromptProcessingBatch.__init__", restore)
        patcher.surround(
            AR, "PromptProcessingBatch.prompt_step", core.offered_while_read
        )
        patcher.replace_method(AR, "PromptProcessingBatch.generate", generate)
        _apply_to_verification(patcher, note_features)


def _apply_to_verification(patcher: Any, note: Any) -> None:
    def verify(original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            output, state = original(*args, **kwargs)
            note(output.hidden_states)
            return output, state

        return wrapper

    def verify_greedy(original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            features, *rest = original(*args, **kwargs)
            note(features)
            return (features, *rest)

        return wrapper

    patcher.replace_method(DFLASH, "_dflash_verify", verify)
    patcher.replace_method(DFLASH, "_dflash_verify_greedy", verify_greedy)


CHANGE = DraftState()
