"""Drafters with random weights for bundled models, and an oracle in their place.

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

PACKAGES = {
    "mtp": "qwen3_5_mtp",
    "eagle3": "eagle3",
    "dflash": "gemma4_dflash",
    "assistant": "gemma4_assistant",
}


def make_drafter(
    folder: Path, block_size: int = 4, seed: int = 7, kind: str = "mtp"
) -> str:
    """Write a drafter of one layer: MTP for the hybrid model, the others for the dense one."""
    config = {**_config(kind), "block_size": block_size}
    package = importlib.import_module(f"mlx_vlm.speculative.drafters.{PACKAGES[kind]}")
    return write_drafter(folder, package, config, seed)


def write_drafter(folder: Path, package: Any, config: dict[str, Any], seed: int) -> str:
    """Write a drafter of a package of stock's with random weights."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map

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


def _config(kind: str) -> dict[str, Any]:
    if kind == "mtp":
        target = json.loads((model_dir("hybrid") / "config.json").read_text())
        return {
            "model_type": "qwen3_5_mtp",
            "text_config": {**target, "mtp_num_hidden_layers": 1},
            "tie_word_embeddings": True,
        }
    target = json.loads((model_dir("dense") / "config.json").read_text())["text_config"]
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "vocab_size",
    )
    layer = {**{name: target[name] for name in names}, "num_hidden_layers": 1}
    if kind == "assistant":
        own = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        return {
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": target["hidden_size"],
            "text_config": {**target, **own},
        }
    if kind == "eagle3":
        return {
            "model_type": "eagle3",
            "transformer_layer_config": layer,
            "draft_vocab_size": target["vocab_size"],
            "target_layer_ids": [1, 2, 3],
        }
    return {
        "model_type": "gemma4",
        **layer,
        "target_layer_ids": [0, 2],
        "dflash_config": {"mask_token_id": 4, "num_target_layers": 4},
    }


# Tokens by which the oracle finds a row's place in a reply, where it did not see its start.
KNOWN = 3


class Oracle:
    """What the target will say, and what was made of it.

    plans: replies that the target is known to give.  A row is told from others by
        what it has said so far.
    wrong_every: every so many-th token of a reply is proposed wrong; 0 for none.
    rounds: (proposed, accepted) of each row and round.
    """

    def __init__(self, plans: Sequence[Sequence[int]], wrong_every: int = 5):
        self.plans = [list(plan) for plan in plans]
        self.wrong_every = wrong_every
        self.rounds: list[tuple[int, int]] = []

    def install(self, draft_model: Any) -> None:
        """Take the place of a loaded drafter's proposals, until it is loaded again."""
        draft_model.__class__ = _oracle_class(_base(type(draft_model)), self)

    def propose(self, said: list[int], count: int) -> list[int]:
        """What a row that has said this will say next, with planted errors."""
        tokens = (self._rest(said) + [0] * count)[:count]
        for i in range(count):
            if self.wrong_every and (len(said) + i) % self.wrong_every == 0:
                tokens[i] = (tokens[i] + 1) % 600
        return tokens

    def _rest(self, said: list[int]) -> list[int]:
        for plan in self.plans:
            if plan[: len(said)] == said:
                return plan[len(said) :]
        # A row whose batch took others is known from there on.
        newest = said[-KNOWN:]
        for plan in self.plans:
            for end in range(len(newest), len(plan)):
                if plan[end - len(newest) : end] == newest:
                    return plan[end:]
        return []

    @property
    def accepted(self) -> int:
        """How many proposed tokens were accepted so far."""
        return sum(a for _, a in self.rounds)


def _base(cls: type) -> type:
    return cls.__mro__[1] if cls.__name__ == "OracleDrafter" else cls


def _oracle_class(base: type, oracle: Oracle) -> type:
    if hasattr(base, "accept_verified_tokens"):
        return _told_oracle_class(base, oracle)
    if hasattr(base, "set_shared_kv"):
        return _stateless_oracle_class(base, oracle)
    return _untold_oracle_class(base, oracle)


def _stateless_oracle_class(base: type, oracle: Oracle) -> type:
    """For assistants: the target's length tells what was accepted.

    Rows that are prefilled together have the drafter's own proposals.
    """
    import mlx.core as mx

    class OracleDrafter(base):  # type: ignore[valid-type,misc]
        def reset(self, *args: Any, **kwargs: Any) -> Any:
            self.__dict__["_row"] = None
            return super().reset(*args, **kwargs)

        def draft_block(self, last_bonus: Any, *args: Any, **kwargs: Any) -> Any:
            drafted = super().draft_block(last_bonus, *args, **kwargs)
            row = self.__dict__["_row"]
            if row == "several" or isinstance(last_bonus, int) or len(last_bonus) > 1:
                self.__dict__["_row"] = "several"
                return drafted
            (bonus,) = last_bonus.tolist()
            (length,) = self._kv_valid_len.tolist()
            if row is None:
                row = self.__dict__["_row"] = {"said": [bonus]}
            else:
                accepted = length - row["length"] - 1
                row["said"] += [*row["proposed"][:accepted], bonus]
                oracle.rounds.append((len(row["proposed"]), accepted))
            row["length"] = length
            row["proposed"] = oracle.propose(row["said"], drafted.shape[1])
            return mx.array([row["proposed"]], dtype=drafted.dtype)

    return OracleDrafter


def _untold_oracle_class(base: type, oracle: Oracle) -> type:
    """For DFlash, which drafts row by row and is given the hidden states of what was kept."""
    import mlx.core as mx

    class OracleDrafter(base):  # type: ignore[valid-type,misc]
        def reset(self, *args: Any, **kwargs: Any) -> Any:
            self.__dict__["_rows"] = []
            return super().reset(*args, **kwargs)

        def draft_block(
            self, last_bonus: Any, hidden: Any, cache: Any, *args: Any, **kwargs: Any
        ) -> Any:
            drafted = super().draft_block(last_bonus, hidden, cache, *args, **kwargs)
            rows = self.__dict__["_rows"]
            known = next((r for r in rows if r["cache"] is cache), None)
            if known is None:
                known = {"cache": cache, "said": [int(last_bonus)]}
                rows.append(known)
            else:
                # One hidden state for each token of the round, the bonus included.
                accepted = hidden.shape[1] - 1
                known["said"] += [*known["proposed"][:accepted], int(last_bonus)]
                oracle.rounds.append((len(known["proposed"]), accepted))
            tokens = oracle.propose(known["said"], drafted.shape[1])
            known["proposed"] = tokens
            return mx.array([tokens], dtype=drafted.dtype)

        draft_block_greedy = draft_block

    return OracleDrafter


def _told_oracle_class(base: type, oracle: Oracle) -> type:
    import mlx.core as mx

    class OracleDrafter(base):  # type: ignore[valid-type,misc]
        # What each row of this drafter's batch has said so far.
        _said: list[list[int]]

        def reset(self, *args: Any, **kwargs: Any) -> Any:
            self.__dict__["_said"] = []
            return super().reset(*args, **kwargs)

        def draft_block(self, last_bonus: Any, *args: Any, **kwargs: Any) -> Any:
            drafted = super().draft_block(last_bonus, *args, **kwargs)
            bonus = [last_bonus] if isinstance(last_bonus, int) else last_bonus.tolist()
            if not self._said:
                self._said += [[token] for token in bonus]
            count = drafted.shape[1]
            rows = [oracle.propose(self._said[row], count) for row in range(len(bonus))]
            return mx.array(rows, dtype=drafted.dtype)

        # Rounds of other kinds take this one when they are greedy.
        draft_block_greedy = draft_block

        def _note(self, draft: Any, accepted: Any, new: Any) -> None:
            for row, tokens in enumerate(new):
                self._said[row] += [int(t) for t in tokens]
                oracle.rounds.append((draft.shape[1], int(accepted[row])))

        def accept_verified_tokens(
            self,
            hidden: Any,
            draft: Any,
            accepted: int,
            new: Any,
            *args: Any,
            **kw: Any,
        ) -> None:
            self._note(draft, [accepted], [new])
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
                self._note(draft, accepted, new)
            super().accept_verified_tokens_batch(
                hidden, draft, accepted, new, *args, **kw
            )

        def filter_batch(self, keep: Any) -> None:
            kept = keep.tolist() if hasattr(keep, "tolist") else list(keep)
            self.__dict__["_said"] = [self._said[i] for i in kept]
            super().filter_batch(keep)

    return OracleDrafter
