"""Where the bundled tiny models are, and prompts that they answer at length.

The models answer from records such as ``amber = fox yak sun`` in their prompt; see
docs/MODELS.md. A test that wants a long, varied reply asks for it like this::

    chat = record_prompt(seed=1, n_records=20)
    reply = ...  # greedy, with chat.messages, on a model of model_dir("hybrid")
    # about 6 tokens a record: here some 120 tokens, then <|im_end|>

and a further turn by appending the reply and ``chat.ask("get", 5)``. A server with
``model_dir(DRAFTERS[name])`` takes ``drafter_dir(name)`` as its draft model.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.modelkit.dialogues import (
    LOOKUP_TOOL,
    Record,
    ask,
    filler_text,
    make_records,
    notes_block,
    record_lines,
)

__all__ = [
    "DRAFTERS",
    "LOOKUP_TOOL",
    "NAMES",
    "RecordPrompt",
    "drafter_dir",
    "model_dir",
    "record_prompt",
]

NAMES: tuple[str, ...] = ("dense", "hybrid", "window", "vlm")
#: The trained drafters, and the model that each one drafts for.
DRAFTERS: dict[str, str] = {
    "hybrid-mtp": "hybrid",
    "hybrid-eagle3": "hybrid",
    "dense-eagle3": "dense",
    "dense-dflash": "dense",
}


def model_dir(name: str) -> Path:
    """Return the folder of a bundled model, to be given to stock's loader or server."""
    if name not in NAMES:
        raise ValueError(f"unknown tiny model {name!r}: one of {', '.join(NAMES)}")
    return Path(__file__).resolve().parent / "models" / name


def drafter_dir(name: str) -> Path:
    """Return the folder of a trained drafter, to be given as a draft model."""
    if name not in DRAFTERS:
        raise ValueError(f"unknown drafter {name!r}: one of {', '.join(DRAFTERS)}")
    return Path(__file__).resolve().parent / "models" / "drafters" / name


@dataclass
class RecordPrompt:
    """A chat of the training distribution and what a perfect model would answer.

    ``messages`` goes to the chat endpoint as it is. ``expected`` is the perfect answer
    to its last message: the models come close, but compare runs with each other,
    never with this.
    """

    messages: list[dict[str, Any]]
    records: list[Record]
    expected: str
    rng: random.Random = field(repr=False)

    def ask(self, task: str = "get", count: int = 8) -> dict[str, str]:
        """Return a further user message, of about 6 answer tokens a record.

        ``task`` is "dump" (all records), "get" (``count`` of them, drawn anew), "loop"
        (all of them without an end, so set a token limit), or "look" (a tool call; give
        ``tools=[LOOKUP_TOOL]`` with the request). ``expected`` is set for it.
        """
        chosen = self.records
        if task in ("get", "look"):
            size = 1 if task == "look" else min(count, len(self.records))
            chosen = self.rng.sample(self.records, size)
        self.expected = record_lines(chosen)
        keys = [record[0] for record in chosen] if task in ("get", "look") else []
        command = {"get": "get:", "look": "look:"}.get(task, task)
        return {"role": "user", "content": ask(command, keys)}


def record_prompt(
    seed: int,
    n_records: int = 16,
    *,
    filler: int = 6,
    task: str = "dump",
    count: int = 8,
    in_system: bool = True,
    prefix_lines: int = 0,
    records: list[Record] | None = None,
) -> RecordPrompt:
    """Return a one-question chat; the same arguments always give the same texts.

    ``n_records`` (2 to 64) records of 6 tokens stand in the system message, or in the
    user message with ``in_system=False``, among ``filler`` other lines of about 20
    tokens; ``prefix_lines`` more such lines come first, to push them further back.
    ``task`` and ``count`` choose the question (see ``RecordPrompt.ask``), and
    ``records`` replaces the records, to change one and keep the rest. Trained lengths
    go up to 2,048 tokens; beyond that the replies stay varied but err more.
    """
    rng = random.Random(seed)
    drawn = make_records(rng, n_records)
    used = drawn if records is None else records
    notes = notes_block(rng, used, filler)
    if prefix_lines:
        notes = f"{filler_text(rng, prefix_lines)}\n{notes}"
    chat = RecordPrompt([], list(used), "", rng)
    question = chat.ask(task, count)
    if in_system:
        chat.messages = [{"role": "system", "content": notes}, question]
    else:
        question["content"] = f"{notes}\n{question['content']}"
        chat.messages = [question]
    return chat
