"""What a drafter proposes that was primed with the whole prompt at once.

The reference for priming: one forward pass of a private copy of the target over the
prompt, all features to the drafter's own entry points, nothing chunked or cached.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from tests.fakes.cold import ColdModel


class Unchunked:
    """A private target and drafter of the same folders as a server's."""

    def __init__(self, target: str, drafter: str, dtype: str = "float32"):
        import mlx.core as mx

        self.model = ColdModel(target, dtype).model
        load = importlib.import_module("mlx_vlm.speculative.drafters").load_drafter
        self.drafter, self.kind = load(drafter)
        self.drafter.set_dtype(getattr(mx, dtype))

    def first_proposal(self, prompt_ids: Sequence[int], block: int) -> list[int]:
        """The draft tokens of the first round after a prompt, greedy."""
        import mlx.core as mx

        speculative = importlib.import_module("mlx_vlm.speculative.utils")
        caches = importlib.import_module("mlx_vlm.models.cache")
        target = self.model.language_model
        for name in ("_rope_deltas", "_position_ids"):
            if hasattr(target, name):
                setattr(target, name, None)
        ids = mx.array([list(prompt_ids)])
        wanted = speculative.speculative_prefill_kwargs(self.kind, self.drafter)
        out = target(ids, cache=caches.make_prompt_cache(target), **wanted)
        hidden = speculative.speculative_hidden_state(self.kind, out)
        bonus = int(mx.argmax(out.logits[0, -1]).item())
        cache: Any = self.drafter.reset(self.model)
        greedy = lambda logits: mx.argmax(logits, axis=-1)  # noqa: E731
        options = {}
        if self.kind != "dflash":
            options = {"greedy": True}
            self.drafter.prefill_from_target_hidden(
                ids, hidden, bonus, greedy, ids.dtype, **options
            )
            hidden = hidden[:, -1:]
        drafted = self.drafter.draft_block(
            bonus, hidden, cache, block, greedy, ids.dtype, **options
        )
        return [int(t) for t in drafted.reshape(-1).tolist()]
