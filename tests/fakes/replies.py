"""One shape for the answers of stock's endpoints, streamed or not.

``Reply`` is what a test reads.  The ``*_reply`` functions turn the JSON body of
an endpoint into one, the ``*_stream`` functions the decoded events of a stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


class RequestFailed(AssertionError):
    """The server answered with an error, or did not answer in time.

    stuck: what the server did meanwhile (see tests.fakes.stuck), or None.
    """

    def __init__(self, status: int, text: str, stuck: str | None = None):
        report = f"\n{stuck}" if stuck else ""
        super().__init__(f"HTTP {status}: {text[:400]}{report}")
        self.status = status
        self.text = text


@dataclass
class Reply:
    """An answer, and (once recorded) the token ids behind it.

    text/reasoning/tool_calls   what the client got; tool_calls as {name, arguments (str), id}
    prompt_tokens, cached_tokens, completion_tokens, finish_reason   as the endpoint reported
    prompt_ids   the ids that the server made of the request
    ids          every emitted id, the stop token included
    prefilled    prompt tokens really forwarded through the language model
    forwards     the prefill calls: (number of rows, columns, real tokens of this row)
    raw          the response body, or the list of events of a stream
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    prefilled: int = 0
    forwards: list[tuple] = field(default_factory=list)
    raw: Any = None
    record: Any = None

    def message(self) -> dict[str, Any]:
        """Return the assistant message that a client would send back (chat form)."""
        out: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        if self.tool_calls:
            out["tool_calls"] = [
                {
                    "id": call["id"] or f"call_{i}",
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for i, call in enumerate(self.tool_calls)
            ]
        return out


def sse_events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON payloads of a server-sent-event stream, without [DONE]."""
    for line in lines:
        if line.startswith("data:"):
            data = line[5:].strip()
            if data and data != "[DONE]":
                yield json.loads(data)


def _chat_usage(reply: Reply, usage: dict[str, Any] | None) -> None:
    if not usage:
        return
    reply.prompt_tokens = usage.get("prompt_tokens", 0)
    reply.completion_tokens = usage.get("completion_tokens", 0)
    details = usage.get("prompt_tokens_details") or {}
    reply.cached_tokens = details.get("cached_tokens", 0)


def _chat_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    return {
        "id": call.get("id"),
        "name": function.get("name"),
        "arguments": function.get("arguments") or "",
    }


def chat_reply(body: dict[str, Any]) -> Reply:
    """Return the Reply of a /chat/completions body."""
    choice = body["choices"][0]
    message = choice["message"]
    reply = Reply(
        text=message.get("content") or "",
        reasoning=message.get("reasoning") or "",
        tool_calls=[_chat_call(c) for c in message.get("tool_calls") or []],
        finish_reason=choice.get("finish_reason"),
        raw=body,
    )
    _chat_usage(reply, body.get("usage"))
    return reply


def chat_stream(events: list[dict[str, Any]]) -> Reply:
    """Return the Reply of a /chat/completions stream."""
    reply = Reply(raw=events)
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        _raise_on_error(event)
        _chat_usage(reply, event.get("usage"))
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            reply.text += delta.get("content") or ""
            reply.reasoning += delta.get("reasoning") or ""
            for part in delta.get("tool_calls") or []:
                part_call = _chat_call(part)
                call = calls.setdefault(
                    part.get("index", 0), {"id": None, "name": None, "arguments": ""}
                )
                call["id"] = call["id"] or part_call["id"]
                call["name"] = call["name"] or part_call["name"]
                call["arguments"] += part_call["arguments"]
            reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    reply.tool_calls = [calls[i] for i in sorted(calls)]
    return reply


def responses_reply(body: dict[str, Any]) -> Reply:
    """Return the Reply of a /responses body."""
    reply = Reply(raw=body)
    for item in body.get("output") or []:
        if item.get("type") == "message":
            reply.text += "".join(
                p.get("text") or "" for p in item.get("content") or []
            )
        elif item.get("type") == "reasoning":
            parts = (item.get("content") or []) + (item.get("summary") or [])
            reply.reasoning += "".join(p.get("text") or "" for p in parts)
        elif item.get("type") == "function_call":
            reply.tool_calls.append(
                {
                    "id": item.get("call_id"),
                    "name": item.get("name"),
                    "arguments": item.get("arguments") or "",
                }
            )
    usage = body.get("usage") or {}
    reply.prompt_tokens = usage.get("input_tokens", 0)
    reply.completion_tokens = usage.get("output_tokens", 0)
    reply.cached_tokens = (usage.get("input_tokens_details") or {}).get(
        "cached_tokens", 0
    )
    reason = (body.get("incomplete_details") or {}).get("reason")
    reply.finish_reason = reason or body.get("status")
    return reply


def responses_stream(events: list[dict[str, Any]]) -> Reply:
    """Return the Reply of a /responses stream (from its terminal event)."""
    last: dict[str, Any] = {}
    for event in events:
        _raise_on_error(event)
        if event.get("type") in ("response.completed", "response.incomplete"):
            last = event["response"]
    reply = responses_reply(last)
    reply.raw = events
    return reply


def _messages_usage(reply: Reply, usage: dict[str, Any] | None) -> None:
    if not usage:
        return
    reply.cached_tokens = usage.get("cache_read_input_tokens") or reply.cached_tokens
    if usage.get("input_tokens"):
        reply.prompt_tokens = usage["input_tokens"] + (
            usage.get("cache_read_input_tokens") or 0
        )
    reply.completion_tokens = usage.get("output_tokens") or reply.completion_tokens


def messages_reply(body: dict[str, Any]) -> Reply:
    """Return the Reply of a /v1/messages body; prompt_tokens includes cached ones."""
    reply = Reply(raw=body, finish_reason=body.get("stop_reason"))
    for block in body.get("content") or []:
        reply.text += block.get("text") or ""
        reply.reasoning += block.get("thinking") or ""
        if block.get("type") == "tool_use":
            reply.tool_calls.append(
                {
                    "id": block.get("id"),
                    "name": block.get("name"),
                    "arguments": json.dumps(block.get("input")),
                }
            )
    _messages_usage(reply, body.get("usage"))
    return reply


def messages_stream(events: list[dict[str, Any]]) -> Reply:
    """Return the Reply of a /v1/messages stream."""
    reply = Reply(raw=events)
    for event in events:
        _raise_on_error(event)
        kind = event.get("type")
        if kind == "message_start":
            _messages_usage(reply, event["message"].get("usage"))
        elif kind == "content_block_start":
            block = event["content_block"]
            if block.get("type") == "tool_use":
                reply.tool_calls.append(
                    {"id": block.get("id"), "name": block.get("name"), "arguments": ""}
                )
        elif kind == "content_block_delta":
            delta = event["delta"]
            reply.text += delta.get("text") or ""
            reply.reasoning += delta.get("thinking") or ""
            if delta.get("type") == "input_json_delta":
                reply.tool_calls[-1]["arguments"] += delta.get("partial_json") or ""
        elif kind == "message_delta":
            reply.finish_reason = event["delta"].get("stop_reason")
            _messages_usage(reply, event.get("usage"))
    return reply


def _raise_on_error(event: dict[str, Any]) -> None:
    error = event.get("error")
    if error or event.get("type") == "error":
        raise RequestFailed(500, json.dumps(event))
