"""The conversation as the client sends it: the session's messages with the model's own replies between them.

A recorded tool result belongs to the call at the same place in the reply before it.  A model other than the recorded
one may call nothing, or more: a result without a call goes in as a user message that names the tool, a call without a
result is answered by a fixed line.  So every call is answered, every result is read, and any template takes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from .session import Session, Turn

UNANSWERED = "(not run: the recorded session has no result for this call)"


@dataclass
class Reply:
    """What the model wrote in one turn, as the server returned it."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def text(self) -> str:
        """Everything the model wrote, comparable between two servers (call ids are random and left out)."""
        calls = [
            [call["function"].get("name"), call["function"].get("arguments")]
            for call in self.tool_calls
        ]
        return json.dumps([self.reasoning, self.content, calls], ensure_ascii=False)


class History:
    """Messages in OpenAI chat form.  Owns them; callers borrow ``messages`` until the next change."""

    def __init__(self, session: Session, marker: str = "") -> None:
        """A marker goes in front of the system text (without one: of the first user text)."""
        self.echo_reasoning = session.echo_reasoning
        self.messages: list[dict[str, Any]] = []
        self._marker = marker
        if session.system:
            self.messages.append(
                {"role": "system", "content": self._marked(session.system)}
            )

    def _marked(self, text: str) -> str:
        marker, self._marker = self._marker, ""
        return f"{marker}\n{text}" if marker else text

    def add_turn(self, turn: Turn) -> None:
        """Append what the client says, its tool results matched to the calls of the reply before it."""
        calls = self.messages[-1].get("tool_calls", []) if self.messages else []
        results = [message for message in turn.add if message["role"] == "tool"]
        for call, result in zip(calls, results, strict=False):
            self._answer(call, result["content"])
        for call in calls[len(results) :]:
            self._answer(call, UNANSWERED)
        for result in results[len(calls) :]:
            self._say(
                f"Result of {result.get('name') or 'the tool'}:\n{result['content']}"
            )
        for message in turn.add:
            if message["role"] == "user":
                self._say(message["content"])

    def _answer(self, call: dict[str, Any], content: str) -> None:
        name = call["function"]["name"]
        self.messages.append(
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": name,
                "content": content,
            }
        )

    def _say(self, content: Any) -> None:
        if isinstance(content, str):
            content = self._marked(content)
        self.messages.append({"role": "user", "content": content})

    def add_reply(self, reply: Reply) -> None:
        """Append the model's reply exactly as it was returned."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.reasoning and self.echo_reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = reply.tool_calls
        self.messages.append(message)


def recorded_reply(turn: Turn, number: int) -> Reply:
    """The reply that the session recorded, for counting and for --forced; call ids are made from the turn."""
    expected = turn.expected or {}
    calls = []
    for index, call in enumerate(expected.get("tool_calls") or []):
        arguments = call.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": call["name"], "arguments": arguments}
        calls.append(
            {"id": f"call_{number}_{index}", "type": "function", "function": function}
        )
    reason = "tool_calls" if calls else "stop"
    return Reply(
        expected.get("content") or "", expected.get("reasoning") or "", calls, reason
    )
