"""A drafter with random weights for the hybrid model, and an oracle in its place.

A random drafter is never accepted.  The oracle is the same drafter, but proposes what
the target will say, with planted errors, so that accepting and rolling back both run.
It cannot show a starved drafter: it needs no state.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fakes.models import model_dir


def make_drafter(folder: Path, block_size: int = 4, seed: int = 7) -> str:
    """Write an MTP drafter of one layer for the bundled hybrid model."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map

    package = importlib.import_module("mlx_vlm.speculative.drafters.qwen3_5_mtp")
    target = json.loads((model_dir("hybrid") / "config.json").read_text())
    config = {
        "model_type": "qwen3_5_mtp",
        "text_config": {**target, "mtp_num_hidden_layers": 1},
        "block_size": block_size,
        "tie_word_embeddings": True,
    }
    with mx.stream(mx.cpu):
        mx.random.seed(seed)
        model = package.Model(package.ModelConfig.from_dict(config))
        # Default weights make every proposal the same token.
        wide = tree_map(lambda w: 3 * w if w.ndim > 1 else w, model.parameters())
        weights = dict(tree_flatten(wide))
        mx.eval(weights)
        folder.mkdir(parents=True)
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


class Oracle:
    """What the target will say, and what was made of it.

    plans: replies that the target is known to give.  A row is told from others by
        what it has said so far.
    wrong_every: every so many-th proposal is an error; 0 for none.
    rounds: (proposed, accepted) of each row and round.
    """

    def __init__(self, plans: Sequence[Sequence[int]], wrong_every: int = 5):
        self.plans = [list(plan) for plan in plans]
        self.wrong_every = wrong_every
        self.said: list[list[int]] = []
        self.rounds: list[tuple[int, int]] = []
        self._proposed = 0

    def install(self, draft_model: Any) -> None:
        """Take the place of a loaded drafter's proposals, until it is loaded again."""
        draft_model.__class__ = _oracle_class(_base(type(draft_model)), self)

    def start(self, bonus: list[int]) -> None:
        """Note the first token of each row of a batch that was just prefilled."""
        self.said = self.said or [[token] for token in bonus]

    def propose(self, row: int, count: int) -> list[int]:
        """What this row will say next, with planted errors."""
        said = self.said[row]
        plan = next((p for p in self.plans if p[: len(said)] == said), [])
        tokens = (plan[len(said) :] + [0] * count)[:count]
        for i in range(count):
            self._proposed += 1
            if self.wrong_every and self._proposed % self.wrong_every == 0:
                tokens[i] = (tokens[i] + 1) % 600
        return tokens

    def verified(self, proposed: int, accepted: list[int], new: list[list[int]]):
        """Note what the target made of a round."""
        for row, tokens in enumerate(new):
            self.said[row] += [int(t) for t in tokens]
            self.rounds.append((proposed, int(accepted[row])))

    @property
    def accepted(self) -> int:
        """How many proposed tokens were accepted so far."""
        return sum(a for _, a in self.rounds)


def _base(cls: type) -> type:
    return cls.__mro__[1] if cls.__name__ == "OracleDrafter" else cls


def _oracle_class(base: type, oracle: Oracle) -> type:
    import mlx.core as mx

    def propose(model: Any, drafted: Any, last_bonus: Any) -> Any:
        bonus = [last_bonus] if isinstance(last_bonus, int) else last_bonus.tolist()
        oracle.start(bonus)
        count = drafted.shape[1]
        rows = [oracle.propose(row, count) for row in range(len(bonus))]
        return mx.array(rows, dtype=drafted.dtype)

    class OracleDrafter(base):  # type: ignore[valid-type,misc]
        def reset(self, *args: Any, **kwargs: Any) -> Any:
            oracle.said = []
            return super().reset(*args, **kwargs)

        def draft_block(self, last_bonus: Any, *args: Any, **kwargs: Any) -> Any:
            drafted = super().draft_block(last_bonus, *args, **kwargs)
            return propose(self, drafted, last_bonus)

        # Rounds of other kinds take this one when they are greedy.
        draft_block_greedy = draft_block

        def accept_verified_tokens(
            self,
            hidden: Any,
            draft: Any,
            accepted: int,
            new: Any,
            *args: Any,
            **kw: Any,
        ) -> None:
            oracle.verified(draft.shape[1], [accepted], [new])
            super().accept_verified_tokens(hidden, draft, accepted, new, *args, **kw)

        def accept_verified_tokens_batch(
            self,
            hidden: Any,
            draft: Any,
            accepted: Any,
            new: Any,
            *args: Any,
            **kw: Any,
        ) -> None:
            if len(accepted) > 1:  # a batch of one is passed on to the other method
                oracle.verified(draft.shape[1], accepted, new)
            super().accept_verified_tokens_batch(
                hidden, draft, accepted, new, *args, **kw
            )

        def filter_batch(self, keep: Any) -> None:
            kept = keep.tolist() if hasattr(keep, "tolist") else list(keep)
            oracle.said = [oracle.said[i] for i in kept]
            super().filter_batch(keep)

    return OracleDrafter
