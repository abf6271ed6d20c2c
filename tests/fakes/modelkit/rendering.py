"""Turns dialogues into token ids and loss weights, fast enough for training.

The text is that of the chat template, cut into pieces that are either prompt or
answer. tests/contract/test_tiny_models.py holds both renderings equal.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .dialogues import Dialogue, Message, Piece
from .tokenizer import STOP, build_tokenizer

PROMPT_WEIGHT = 0.05


@lru_cache(maxsize=1)
def shared_tokenizer() -> Tokenizer:
    """Return the one tokenizer of all tiny models."""
    return build_tokenizer()


def _tools_text(tools: list[dict[str, Any]]) -> str:
    lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You can call these tools. Each is one line of JSON.\n<tools>"
        f"{lines}\n</tools>\nTo call one, answer with a block like this:\n"
        '<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>'
    )


def _call_text(call: dict[str, Any]) -> str:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    head = f'<tool_call>\n{{"name": "{function["name"]}", "arguments": '
    return head + arguments + "}\n</tool_call>"


def _assistant_pieces(message: Message, reasons: bool) -> list[Piece]:
    text = message["content"] or ""
    reasoning = message.get("reasoning_content") if reasons else None
    pieces: list[Piece] = [("<|im_start|>assistant\n", False)]
    if reasoning:
        pieces.append(("<think>\n", False))
        text = f"{reasoning}\n</think>\n\n{text}"
    for call in message.get("tool_calls") or []:
        text += ("\n" if text else "") + _call_text(call)
    return pieces + [(text, True)]


def pieces_of(chat: Dialogue) -> list[Piece]:
    """Cut the rendered chat into (text, is answer) pieces."""
    pieces: list[Piece] = []
    messages = chat.messages
    last_user = max(i for i, m in enumerate(messages) if m["role"] == "user")
    if chat.tools:
        head = ""
        if messages[0]["role"] == "system":
            head = messages[0]["content"] + "\n\n"
        text = head + _tools_text(chat.tools)
        pieces.append((f"<|im_start|>system\n{text}<|im_end|>\n", False))
    for index, message in enumerate(messages):
        role, text = message["role"], message["content"]
        if role == "assistant":
            pieces += _assistant_pieces(message, index > last_user)
            pieces += [("<|im_end|>", True), ("\n", False)]
        elif role == "tool":
            text = f"\n<tool_response>\n{text}\n</tool_response>"
            pieces.append((f"<|im_start|>user{text}<|im_end|>\n", False))
        elif not (role == "system" and index == 0 and chat.tools):
            pieces.append((f"<|im_start|>{role}\n{text}<|im_end|>\n", False))
    return pieces[:-2] if chat.open_end else pieces


@lru_cache(maxsize=200_000)
def _line_ids(line: str) -> tuple[int, ...]:
    return tuple(shared_tokenizer().encode(line, add_special_tokens=False).ids)


def encode_text(text: str) -> list[int]:
    """Encode text line by line; new lines are tokens of their own, so this is exact."""
    ids: list[int] = []
    lines = text.split("\n")
    for line in lines[:-1]:
        ids += _line_ids(line + "\n")
    return ids + list(_line_ids(lines[-1]))


def encode_dialogue(chat: Dialogue, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and loss weights, both int32/float32 of [length]; longer is cut."""
    pad = shared_tokenizer().token_to_id(STOP)
    ids = np.full(length, pad, dtype=np.int32)
    weights = np.zeros(length, dtype=np.float32)
    at = 0
    for text, is_answer in pieces_of(chat):
        piece = encode_text(text)[: length - at]
        ids[at : at + len(piece)] = piece
        weights[at : at + len(piece)] = 1.0 if is_answer else PROMPT_WEIGHT
        at += len(piece)
    return ids, weights
