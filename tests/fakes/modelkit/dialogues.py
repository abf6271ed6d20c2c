"""The training distribution: chats whose answers can only be read off the prompt.

A system or user message carries records such as ``amber = fox yak sun`` between
lines of other text. The last lines of a user message say what to write:

``dump``
    every record, in the order of the notes;
``get:`` and one key a line
    those records, in that order;
``loop``
    the records again and again, without an end;
``look:`` and one key, where tools are listed
    a call of the tool ``lookup``, then the record that the tool gave back.

A user message without one of these gets every record, and, where there are no
records at all, its own text back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .words import CODE, KEYS, SENTENCES, VALUES

Record = tuple[str, tuple[str, str, str]]
Message = dict[str, Any]
Piece = tuple[str, bool]

LOOKUP_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Return the record of a key.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}},
            "required": ["key"],
        },
    },
}
_WORDS = sorted({word for line in SENTENCES for word in line.split()})
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHXYZ0123456789_-./#éß世"


@dataclass
class Dialogue:
    """A chat with its right answers, in the form the chat template takes."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False
    open_end: bool = False


def make_records(rng: random.Random, count: int) -> list[Record]:
    """Draw ``count`` (at most 64) records with different keys."""
    keys = rng.sample(KEYS, count)
    return [(key, tuple(rng.sample(VALUES, 3))) for key in keys]


def record_line(record: Record) -> str:
    """Return a record as it stands in a prompt and in an answer."""
    return f"{record[0]} = {' '.join(record[1])}"


def record_lines(records: Sequence[Record]) -> str:
    """Return records one a line, without a new line at the end."""
    return "\n".join(record_line(record) for record in records)


def filler_line(rng: random.Random) -> str:
    """Return one line of text that carries no record."""
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(SENTENCES)
    if kind < 0.7:
        return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(2, 14)))
    if kind < 0.9:
        return rng.choice(CODE)
    size = rng.randint(1, 24)
    return "".join(rng.choice(_LETTERS + "    ") for _ in range(size))


def filler_text(rng: random.Random, lines: int) -> str:
    """Return ``lines`` lines of filler."""
    return "\n".join(filler_line(rng) for _ in range(lines))


def notes_block(rng: random.Random, records: Sequence[Record], filler: int) -> str:
    """Return the records in order, with ``filler`` other lines spread among them."""
    lines: list[str] = ["Notes:"] + [record_line(record) for record in records]
    if rng.random() < 0.5:  # one long text before or after the notes
        extra = [filler_line(rng) for _ in range(filler)]
        cut = rng.randint(0, filler)
        return "\n".join(extra[:cut] + lines + extra[cut:])
    for _ in range(filler):
        lines.insert(rng.randint(0, len(lines)), filler_line(rng))
    return "\n".join(lines)


def ask(command: str, keys: Sequence[str] = ()) -> str:
    """Return the text of a command, as the models were trained on it."""
    return "\n".join([command, *keys])


def _answer(
    rng: random.Random, records: list[Record], room: int
) -> tuple[str, list[Record]]:
    """Choose a question with an answer of at most about ``room`` tokens."""
    few = max(1, min(len(records), room // 6))
    kind = rng.random()
    if kind < 0.3 and len(records) <= few:
        return "dump", records
    if kind < 0.4 and len(records) <= few:
        return filler_text(rng, rng.randint(1, 2)), records
    chosen = rng.sample(records, rng.randint(1, few))
    return ask("get:", [record[0] for record in chosen]), chosen


def _add_lookup(rng: random.Random, chat: Dialogue, records: list[Record]) -> None:
    known = dict(records)
    key = rng.choice(KEYS)
    values = known.get(key) or tuple(rng.sample(VALUES, 3))
    call = {"name": "lookup", "arguments": {"key": key}}
    line = record_line((key, values))
    chat.messages += [
        {"role": "user", "content": ask("look:", [key])},
        {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
        {"role": "tool", "content": line},
        {"role": "assistant", "content": line},
    ]


def _add_turn(
    rng: random.Random, chat: Dialogue, records: list[Record], text: str, room: int
) -> None:
    question, chosen = _answer(rng, records, room)
    content = f"{text}\n{question}" if text else question
    reply: Message = {"role": "assistant", "content": record_lines(chosen)}
    if chat.thinking:
        reply["reasoning_content"] = "\n".join(record[0] for record in chosen)
    chat.messages += [{"role": "user", "content": content}, reply]


def _loop_turn(rng: random.Random, records: list[Record], room: int) -> list[Message]:
    few = records[: max(1, min(len(records), room // 12))]
    del records[len(few) :]
    rounds = room // (6 * len(few)) + 1
    text = record_lines(list(few) * rounds)
    return [
        {"role": "user", "content": "loop"},
        {"role": "assistant", "content": text},
    ]


def sample_dialogue(rng: random.Random, length: int, most: int) -> Dialogue:
    """Draw a chat of about ``length`` tokens with at most ``most`` records."""
    if rng.random() < 0.06:
        return _echo(rng, length)
    most = max(2, min(most, length // 20, len(KEYS)))
    records = make_records(rng, rng.randint(2, most))
    turns = rng.choice((1, 1, 2, 3)) if length > 200 else 1
    chat = Dialogue(thinking=rng.random() < 0.1)
    if rng.random() < 0.15 and length > 300:
        chat.tools = [LOOKUP_TOOL]
    room = length - 40 - 6 * len(records) - (180 if chat.tools else 0)
    spare = max(0, room - 8 * len(records) * turns)
    filler = int(spare / 20 * rng.random() * min(1.0, length / 400))
    room = (room - 20 * filler) // turns - 25
    if rng.random() < 0.08:
        chat.messages = _loop_turn(rng, records, room)
        chat.open_end, chat.thinking = True, False
    notes = notes_block(rng, records, filler)
    in_system = chat.open_end or rng.random() < 0.7
    if in_system:
        chat.messages.insert(0, {"role": "system", "content": notes})
    for turn in range(0 if chat.open_end else turns):
        if chat.tools and rng.random() < 0.5:
            _add_lookup(rng, chat, records if in_system else [])
        text = notes if turn == 0 and not in_system else ""
        if not text and rng.random() < 0.2:
            text = filler_line(rng)
        _add_turn(rng, chat, records, text, room)
    return chat


def _echo(rng: random.Random, length: int) -> Dialogue:
    chat = Dialogue()
    text = filler_text(rng, rng.randint(1, max(1, min(4, length // 80))))
    text = text.strip() or "quiet"
    if rng.random() < 0.5 and length > 200:
        system = filler_text(rng, rng.randint(1, length // 80))
        chat.messages.append({"role": "system", "content": system})
    chat.messages += [
        {"role": "user", "content": text},
        {"role": "assistant", "content": text},
    ]
    return chat


def without_records(chat: Dialogue) -> Dialogue:
    """Return the chat with its notes removed: what is left gives no answer."""
    messages = [dict(message) for message in chat.messages]
    for message in messages:
        if message["role"] in ("system", "user", "tool"):
            lines = str(message["content"]).split("\n")
            kept = [line for line in lines if " = " not in line]
            message["content"] = "\n".join(kept)
    return Dialogue(messages, chat.tools, chat.thinking, chat.open_end)
