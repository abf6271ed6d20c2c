"""The cold run: greedy ids of a prompt on an empty cache, by a model of its own.

The reference is a second copy of the model, so that nothing a test looks for on
the served model object (positions, caches) is touched, and one row, so that no
padding and no batch is involved.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PRIVATE = ("_rqueue",)


@dataclass
class ColdRun:
    """ids[i] is the greedy token after prompt + ids[:i]; gaps[i] its lead over the next
    one; logprobs[i] its log-probability."""

    ids: list[int]
    gaps: list[float]
    logprobs: list[float] = field(default_factory=list)


class ColdModel:
    """A private copy of a model, for reference runs."""

    def __init__(self, path: str, dtype: str | None):
        import mlx.core as mx

        utils = importlib.import_module("mlx_vlm.utils")
        self.model, self.processor = utils.load(path)
        if dtype:
            self.model.set_dtype(getattr(mx, dtype))
        mx.eval(self.model.parameters())

    def run(
        self,
        prompt_ids: Sequence[int],
        n: int,
        *,
        follow: Sequence[int] | None = None,
        raw_inputs: dict[str, Any] | None = None,
    ) -> ColdRun:
        """Return n greedy ids after ``prompt_ids`` on an empty cache.

        follow: feed these ids instead of the run's own (teacher forcing), so that
            gaps can be read along a scripted reply.
        raw_inputs: the record's preprocessed inputs (pictures); text alone if None.
        """
        import mlx.core as mx

        cache_module = importlib.import_module("mlx_vlm.models.cache")
        language_model = self.model.language_model
        for name in ("_rope_deltas", "_position_ids"):
            if hasattr(language_model, name):
                setattr(language_model, name, None)
        cache = cache_module.make_prompt_cache(language_model)
        ids = mx.array([list(prompt_ids)])
        extra = {
            k: v
            for k, v in (raw_inputs or {}).items()
            if k not in PRIVATE
            and k not in ("input_ids", "pixel_values", "attention_mask")
        }
        pixels = (raw_inputs or {}).get("pixel_values")
        mask = (raw_inputs or {}).get("attention_mask")
        embed = self.model.get_input_embeddings(ids, pixels, mask=mask, **extra)
        kwargs = {k: v for k, v in embed.to_dict().items() if v is not None}
        kwargs = {**extra, **kwargs}
        out = language_model(ids, cache=cache, **kwargs)
        deltas = kwargs.get(
            "rope_deltas", getattr(language_model, "_rope_deltas", None)
        )
        step_kwargs = {} if deltas is None else {"rope_deltas": deltas}
        result = ColdRun([], [])
        for i in range(n):
            token, gap, logprob = _top(out.logits[0, -1])
            result.ids.append(token)
            result.gaps.append(gap)
            result.logprobs.append(logprob)
            fed = token if follow is None or i >= len(follow) else int(follow[i])
            if i + 1 < n:
                out = language_model(mx.array([[fed]]), cache=cache, **step_kwargs)
        return result


def _top(logits: Any) -> tuple[int, float, float]:
    import mlx.core as mx

    values = logits.astype(mx.float32)
    best = mx.argsort(values)[-2:]
    low, high = values[best].tolist()
    return int(best[1].item()), high - low, high - mx.logsumexp(values).item()


def first_difference(ids: Sequence[int], cold: ColdRun) -> tuple[int, float] | None:
    """Return (index, the cold run's gap there) of the first difference, or None."""
    for i, (got, want) in enumerate(zip(ids, cold.ids, strict=False)):
        if got != want:
            return i, cold.gaps[i]
    return None
