"""How many tokens of a prompt are new: its length less its longest common prefix with any earlier prompt + reply.

That needs token ids.  With a tokenizer at hand the client renders and encodes each prompt itself, and says so when the
count differs from the server's.  A reply's ids are not sent by the server; they are taken as known when the next
prompt ends the reply where the server stopped counting, otherwise the figure is marked as estimated.  Without a
tokenizer ``new`` is the prompt less the session's previous prompt + reply.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .rows import ESTIMATE, TOKENIZER, Row


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of leading ids that two prompts share."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


class Renderer(Protocol):
    """Turns a history into the ids of the prompt that the server makes of it."""

    special: set[int]

    def prompts(
        self, messages: list[dict[str, Any]], tools: list[Any], thinking: bool | None
    ) -> list[list[int]]:
        """The ids in each form that servers hand to templates, most usual first."""
        ...


class ModelTokenizer:
    """Tokenizer and chat template of a local model directory, through transformers."""

    def __init__(self, directory: str | Path) -> None:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(directory))
        template = Path(directory) / "chat_template.jinja"
        if self._tokenizer.chat_template is None and template.is_file():
            self._tokenizer.chat_template = template.read_text(encoding="utf-8")
        self.special = set(self._tokenizer.all_special_ids)

    def prompts(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any],
        thinking: bool | None,
        ask: bool = True,
    ) -> list[list[int]]:
        """Content as plain text, then as a list of parts (gemma4 and others); ``ask`` opens the model's turn."""
        plain = [_template_message(message) for message in messages]
        parts = [_with_parts(message) for message in plain]
        return [self._encode(form, tools, thinking, ask) for form in (plain, parts)]

    def _encode(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any],
        thinking: bool | None,
        ask: bool,
    ) -> list[int]:
        extra: dict[str, Any] = (
            {} if thinking is None else {"enable_thinking": thinking}
        )
        extra |= {"tokenize": False, "add_generation_prompt": ask}
        render: Any = self._tokenizer.apply_chat_template
        text: str = render(messages, tools=tools or None, **extra)
        bos = self._tokenizer.bos_token
        add_special = bos is None or not text.startswith(bos)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special))


def _template_message(message: dict[str, Any]) -> dict[str, Any]:
    """As the server hands it to the template: arguments as a mapping, reasoning under both names."""
    result = dict(message)
    if "reasoning_content" in message:
        result["reasoning"] = message["reasoning_content"]
    calls = []
    for call in message.get("tool_calls", []):
        function = dict(call["function"])
        try:
            function["arguments"] = json.loads(function["arguments"])
        except json.JSONDecodeError:
            function["arguments"] = {}
        calls.append({**call, "function": function})
    if calls:
        result["tool_calls"] = calls
    return result


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    if (
        message["role"] == "tool"
        or "tool_calls" in message
        or not isinstance(message["content"], str)
    ):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


@dataclass
class _Seen:
    session: int
    ids: list[int]
    reply: int = 0  # tokens generated after ids; 0 while the reply is on its way
    stopped: bool = False  # the reply's last token ends the turn


@dataclass(frozen=True)
class Sent:
    """A prompt on its way: its ids in each possible form, and how many earlier ones had been answered."""

    forms: list[list[int]]
    earlier: int


@dataclass
class NewCounter:
    """Finds ``new`` for each request of one server; call ``sent`` before and ``answered`` after each."""

    renderer: Renderer | None = None
    tools: list[Any] = field(default_factory=list)
    thinking: bool | None = None
    _seen: list[_Seen] = field(default_factory=list)
    _latest: dict[int, _Seen] = field(default_factory=dict)
    _lengths: dict[int, int] = field(default_factory=dict)
    _form: int | None = None

    def sent(self, messages: list[dict[str, Any]]) -> Sent:
        """Ids of the prompt about to be sent (none without a tokenizer); earlier means answered by now."""
        forms = (
            self.renderer.prompts(messages, self.tools, self.thinking)
            if self.renderer
            else []
        )
        return Sent(forms, len(self._seen))

    def answered(self, row: Row, sent: Sent) -> None:
        """Fill the row's ``new``, ``new_from`` and ``note``, and remember prompt and reply."""
        forms = sent.forms
        ids = self._match(forms, row.prompt)
        if ids is None:
            row.new, row.new_from = self._estimate(row), ESTIMATE
            if self.renderer:
                counts = "/".join(str(len(form)) for form in forms)
                row.note = f"tokenizer gives {counts} tokens, the server {row.prompt}"
        else:
            known, certain = self._known(row.session, ids, self._seen[: sent.earlier])
            row.new, row.new_from = len(ids) - known, TOKENIZER if certain else ESTIMATE
            if not certain:
                row.note = "the reply before was not sent back as the tokens that were generated"
            seen = _Seen(row.session, ids, row.generated, row.finish_reason not in _CUT)
            self._seen.append(seen)
            self._latest[row.session] = seen
        self._lengths[row.session] = row.prompt + row.generated

    def _match(self, forms: list[list[int]], prompt: int) -> list[int] | None:
        order = range(len(forms)) if self._form is None else [self._form]
        for index in order:
            if len(forms[index]) == prompt:
                self._form = index
                return forms[index]
        return None

    def _estimate(self, row: Row) -> int:
        return max(0, row.prompt - self._lengths.get(row.session, 0))

    def _known(
        self, session: int, ids: list[int], earlier: list[_Seen]
    ) -> tuple[int, bool]:
        """Longest prefix of ``ids`` in an earlier prompt + reply, and whether the reply's part of it is certain."""
        best = max((common_prefix(ids, seen.ids) for seen in earlier), default=0)
        last = self._latest.get(session)
        if last is None or common_prefix(ids, last.ids) < len(last.ids):
            return best, True
        end = len(last.ids) + last.reply
        closing = end - 1 if last.stopped else end
        certain = (
            closing < len(ids) and ids[closing] in self.renderer.special
            if self.renderer
            else False
        )
        return min(len(ids), max(best, end)), certain


_CUT = {
    "length",
    "max_tokens",
    "incomplete",
}  # finish reasons that leave the turn without an end token
