"""The bundled tiny models keep what docs/MODELS.md promises of them."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm import load
from mlx_vlm.models.cache import make_prompt_cache

from tests.fakes.modelkit.dialogues import sample_dialogue
from tests.fakes.modelkit.rendering import pieces_of, shared_tokenizer
from tests.fakes.modelkit.words import KEYS, VALUES
from tests.fakes.models import LOOKUP_TOOL, NAMES, model_dir, record_prompt

TRAINED = ("dense", "hybrid")
MIB = 2**20
USER = {"role": "user", "content": "dump"}
TEXTS = (
    "",
    "amber = fox yak sun\n",
    "def f(x):\n\treturn {'a': [1, 2.5e-3]}  # ok\r\n\n",
    '{"name": "lookup", "arguments": {"key": "\\u00e9\\n"}}',
    "héllo wörld, 世界! \U0001f642\U0001f9d1\u200d\U0001f680 \u0000\u2028\ufffd  end ",
    "<|im_start|>user\nhi<|im_end|>\n<think>\nx\n</think>\n\n<tool_call>\n{}\n</tool_call>",
)


@cache
def loaded(name: str) -> tuple[Any, Any]:
    model, processor = load(str(model_dir(name)))
    return model, getattr(processor, "tokenizer", processor)


def prompt_ids(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None, **kwargs: Any
) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False, **kwargs
    )
    return tokenizer.encode(text, add_special_tokens=False)


def greedy(
    name: str,
    messages: list[dict[str, Any]],
    limit: int = 160,
    dtype: mx.Dtype = mx.float32,
    tools: Any = None,
    **kwargs: Any,
) -> tuple[list[int], str]:
    """Return the ids of a greedy reply, its end token included, and its text."""
    model, tokenizer = loaded(name)
    model.set_dtype(dtype)
    cache = make_prompt_cache(model.language_model)
    tokens = prompt_ids(tokenizer, messages, tools, **kwargs)
    written: list[int] = []
    logits = model.language_model(mx.array([tokens]), cache=cache).logits
    while len(written) < limit:
        written.append(int(logits[0, -1].argmax().item()))
        if written[-1] == tokenizer.eos_token_id:
            break
        logits = model.language_model(mx.array([written[-1:]]), cache=cache).logits
    return written, tokenizer.decode(written, skip_special_tokens=True)


def test_all_models_together_stay_small() -> None:
    total = 0
    for name in NAMES:
        total += sum(path.stat().st_size for path in model_dir(name).iterdir())
    assert total < 12 * MIB


@pytest.mark.parametrize("name", NAMES)
def test_stock_loads_the_model_and_it_ends_turns_with_im_end(name: str) -> None:
    model, tokenizer = loaded(name)
    assert model.language_model.model.embed_tokens.weight.shape[0] >= len(tokenizer)
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"
    assert tokenizer.eos_token_id in model.config.eos_token_id


def test_layers_are_of_the_kinds_that_the_names_say() -> None:
    kinds = {
        name: [
            type(c).__name__ for c in make_prompt_cache(loaded(name)[0].language_model)
        ]
        for name in NAMES
    }
    assert set(kinds["dense"]) == {"KVCache"} and len(kinds["dense"]) >= 4
    assert kinds["hybrid"] == ["ArraysCache", "KVCache"] * 2
    assert kinds["window"] == ["RotatingKVCache"] * 3 + ["KVCache"]


@pytest.mark.parametrize("name", NAMES)
def test_any_text_survives_the_tokenizer(name: str) -> None:
    _, tokenizer = loaded(name)
    rng = random.Random(name)
    points = [chr(rng.choice((rng.randrange(1, 0xD800), rng.randrange(0xE000, 0x110000))))
              for _ in range(400)]  # fmt: skip
    for text in (*TEXTS, "".join(points)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_keys_values_and_markers_are_single_tokens() -> None:
    tokenizer = shared_tokenizer()
    single = KEYS + [f" {value}" for value in VALUES]
    single += ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|image_pad|>"]
    single += ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    assert len(KEYS) == len(set(KEYS)) == len(VALUES) == len(set(VALUES)) == 64
    assert all(len(tokenizer.encode(text).ids) == 1 for text in single)


def test_the_training_rendering_is_that_of_the_chat_template() -> None:
    _, tokenizer = loaded("hybrid")
    for seed in range(60):
        chat = sample_dialogue(random.Random(seed), 700, 16)
        text = tokenizer.apply_chat_template(
            chat.messages, tools=chat.tools, tokenize=False
        )
        trained = "".join(piece for piece, _ in pieces_of(chat))
        assert text.startswith(trained) if chat.open_end else text == trained


@pytest.mark.parametrize("name", NAMES)
def test_content_may_be_a_list_of_parts_or_nothing(name: str) -> None:
    _, tokenizer = loaded(name)
    parts = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}, {"role": "assistant", "content": None}],
        tokenize=False,
    )
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"<|im_start|>user\n{picture}what is it?<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n<|im_end|>\n")


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("in_system", [True, False])
def test_a_turn_sent_back_extends_prompt_and_reply(name: str, in_system: bool) -> None:
    _, tokenizer = loaded(name)
    chat = record_prompt(3, 12, in_system=in_system, filler=4)
    for _ in range(3):
        before = prompt_ids(tokenizer, chat.messages)
        written, text = greedy(name, chat.messages, limit=100)
        assert written[-1] == tokenizer.eos_token_id
        chat.messages += [{"role": "assistant", "content": text}, chat.ask("get", 4)]
        after = prompt_ids(tokenizer, chat.messages)
        assert after[: len(before) + len(written)] == before + written


@pytest.mark.parametrize("arguments", [{"key": "amber"}, '{"key": "amber"}'])
@pytest.mark.parametrize("content", [None, ""])
def test_tool_calls_extend_the_prompt_too(arguments: Any, content: Any) -> None:
    name, tools = "dense", [LOOKUP_TOOL]
    _, tokenizer = loaded(name)
    messages: list[dict[str, Any]] = [
        {
            "role": "system",
            "content": record_prompt(5, 8, filler=2).messages[0]["content"],
        },
        {"role": "user", "content": "look:\namber"},
    ]
    before = prompt_ids(tokenizer, messages, tools)
    written, text = greedy(name, messages, tools=tools)
    body = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert json.loads(body) == {"name": "lookup", "arguments": {"key": "amber"}}
    call = {"function": {"name": "lookup", "arguments": arguments}}
    messages += [
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "amber = fox yak sun"},
    ]
    after = prompt_ids(tokenizer, messages, tools)
    assert after[: len(before) + len(written)] == before + written
    assert greedy(name, messages, tools=tools)[1] == "amber = fox yak sun"


def test_reasoning_is_dropped_after_a_new_question() -> None:
    _, tokenizer = loaded("hybrid")
    reply = {"role": "assistant", "content": "yes", "reasoning_content": "let me see"}

    def render(messages: list[dict[str, Any]], **kwargs: Any) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)

    asked = render([USER], add_generation_prompt=True, enable_thinking=True)
    kept = render([USER, reply])
    assert asked.endswith("<think>\n") and kept.startswith(asked)
    assert "<think>\nlet me see\n</think>\n\nyes<|im_end|>" in kept
    tool = {"role": "tool", "content": "done"}
    assert "let me see" in render([USER, reply, tool])
    assert "let me see" not in render([USER, reply, USER])


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_replies_are_long_and_varied(name: str, dtype: mx.Dtype) -> None:
    texts = []
    for seed in (1, 2):
        chat = record_prompt(seed, 16, filler=6)
        written, text = greedy(name, chat.messages, limit=200, dtype=dtype)
        assert len(written) > 60 and len(set(written)) > 30
        assert written[-1] == loaded(name)[1].eos_token_id
        texts.append(text)
    assert len(set(texts)) == 2


@pytest.mark.parametrize("name", TRAINED)
def test_a_reply_follows_a_record_that_stands_far_back(name: str) -> None:
    chat = record_prompt(7, 12, filler=4, task="get", count=4)
    asked = chat.expected.splitlines()[0].split()[0]
    changed = [(k, ("fox", "yak", "owl")) if k == asked else (k, v)
               for k, v in chat.records]  # fmt: skip
    other = record_prompt(7, 12, filler=4, task="get", count=4, records=changed)
    before, after = (greedy(name, c.messages)[1].splitlines() for c in (chat, other))
    assert before[0] == chat.expected.splitlines()[0]
    assert after[0] == f"{asked} = fox yak owl"
    assert after[1:] == before[1:]


def vision_logits(picture: np.ndarray) -> np.ndarray:
    from mlx_vlm.utils import prepare_inputs
    from PIL import Image

    model, processor = load(str(model_dir("vlm")))
    content: Any = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=False,
    )
    images = [Image.fromarray(picture)]
    inputs = prepare_inputs(processor, images=images, prompts=text)
    assert (np.array(inputs["input_ids"]) == model.config.image_token_id).sum() > 1
    kwargs = {key: inputs[key] for key in ("pixel_values", "image_grid_thw")}
    logits = model(inputs["input_ids"], mask=None, **kwargs).logits
    return np.array(logits[0, -1].astype(mx.float32))


def test_different_pictures_give_different_logits() -> None:
    rng = np.random.default_rng(1)
    first, second = (
        rng.integers(0, 255, (64, 96, 3), dtype=np.uint8) for _ in range(2)
    )
    one, two, again = (vision_logits(image) for image in (first, second, first))
    assert np.abs(one - two).max() > 0.1
    assert np.array_equal(one, again)
