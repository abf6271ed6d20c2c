"""Targets that say a known reply, and drafters that agree with it as often as planned.

A random drafter is never accepted by a random target, so acceptance is given to both:

*The target* has random weights, but its layers are quiet: the hidden state at the end is
mostly the embedding of the last token.  The head's row of each token of a fixed chain is
the embedding of the token before it.  So the greedy reply to any prompt is that chain,
by a wide margin, however the work is split (prefill steps, single tokens, verified
blocks), without a sampler, and the same on every side.  The model computes everything;
values do not change what that costs.

*The drafter* runs its real forward pass; then its proposal is the chain behind the last
token, in which a fixed share of tokens, chosen by token, is wrong.  What it proposes
depends on nothing but the last token.  A real drafter that has not read the prompt, as
stock's after a restored prefix, would be accepted less often: this gift to stock makes
the comparison conservative.
"""

from __future__ import annotations

import importlib
import json
import random
import re
from pathlib import Path
from typing import Any

from tests.bench.gpu_server import CHAIN
from tests.fakes.models import model_dir

QUIET = 0.05
DRAFTERS = (
    ("mlx_vlm.speculative.drafters.eagle3.eagle3", "Eagle3DraftModel"),
    ("mlx_vlm.speculative.drafters.qwen3_5_mtp.qwen3_5_mtp", "Qwen3_5MTPDraftModel"),
)


def make_chain(tokens: int, wrong: float) -> dict[str, Any]:
    """A reply of ``tokens`` tokens with its stop, from the bundled tokenizer.

    ``chain`` begins with the last token of every prompt; ``wrong`` lists the tokens
    after which the drafter errs.  Raises where the tokenizer has too few whole words.
    """
    from tokenizers import Tokenizer

    folder = model_dir("hybrid")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (begin,) = tokenizer.encode("\n", add_special_tokens=False).ids
    words = [
        number
        for word, number in sorted(vocabulary.items())
        if re.fullmatch("Ġ[A-Za-z]+", word)
        and tokenizer.encode(word.replace("Ġ", " "), add_special_tokens=False).ids
        == [number]
    ]
    rng = random.Random(5)
    rng.shuffle(words)
    said = [vocabulary["amber"], *words][: tokens - 1]
    if len(said) < tokens - 1:
        raise ValueError(f"a reply has at most {len(words) + 2} tokens")
    text = tokenizer.decode(said)
    if tokenizer.encode(text, add_special_tokens=False).ids != said:
        raise ValueError("the reply is not read back as it was written")
    chain = [begin, *said, config["eos_token_id"][0]]
    errs = rng.sample(chain[:-1], round(wrong * len(chain[:-1])))
    return {"chain": chain, "wrong": errs, "text": text}


def quieten(weights: dict[str, Any], hidden: int) -> None:
    """Let the embedding of a token outweigh what the layers add to it."""
    sandwich = any("post_feedforward_layernorm" in name for name in weights)
    for name, value in weights.items():
        if re.search(r"(o_proj|out_proj|down_proj)\.weight$", name):
            weights[name] = value * QUIET
        if sandwich and re.search(r"post_\w+_layernorm\.weight$", name):
            weights[name] = value * QUIET
        # A target that scales its embeddings by the root of their size needs no more.
        if not sandwich and name.endswith("embed_tokens.weight"):
            weights[name] = value * hidden**0.5


def install(generator: Any, folder: Path) -> None:
    """Give a loaded target the chain's head, and its drafter the chain."""
    file = folder / CHAIN
    if not file.is_file():
        return
    plan = json.loads(file.read_text(encoding="utf-8"))
    model = generator.model
    lm = getattr(model, "language_model", model)
    _set_head(lm.model.embed_tokens, plan["chain"])
    for module, name in DRAFTERS:
        _agree(getattr(importlib.import_module(module), name), plan)


def _set_head(embedding: Any, chain: list[int]) -> None:
    import mlx.core as mx

    weight = embedding.weight
    head = weight / mx.linalg.norm(weight.astype(mx.float32), axis=1, keepdims=True)
    before, after = mx.array(chain[:-1]), mx.array(chain[1:])
    head[after] = head[before]
    # The others keep random rows, so that no two rows of the chain are alike.
    head[before[:1]] = -head[before[:1]]
    head = head.astype(weight.dtype)
    mx.eval(head)
    embedding.as_linear = lambda x: x @ head.T


def _agree(drafter: Any, plan: dict[str, Any]) -> None:
    import mlx.core as mx

    chain = plan["chain"]
    following = dict(zip(chain, chain[1:], strict=False))
    proposed = {**following, **dict.fromkeys(plan["wrong"], chain[0])}
    original = drafter.draft_block

    def behind(token: int, count: int) -> list[int]:
        out = []
        for _ in range(count):
            out.append(proposed.get(token, chain[0]))
            token = following.get(token, chain[0])
        return out

    def draft_block(self: Any, last_bonus: Any, *args: Any, **kwargs: Any) -> Any:
        drafted = original(self, last_bonus, *args, **kwargs)
        one = isinstance(last_bonus, int)
        tokens = [last_bonus] if one else last_bonus.reshape(-1).tolist()
        rows = [behind(int(token), drafted.shape[1]) for token in tokens]
        return drafted * 0 + mx.array(rows, dtype=drafted.dtype)

    drafter.draft_block = draft_block
