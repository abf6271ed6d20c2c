"""The three chat protocols of the server: how a history is sent, and how a reply and its usage come back.

One class a protocol, all with the same four members: ``path``, ``body`` (the request), ``whole`` (a reply in one
piece) and ``event`` (one streamed event; true when it carries something the model wrote).  Both readers fill a
``Received``.  Histories are kept in OpenAI chat form and converted here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Protocol

from .history import Reply


class ServerFault(RuntimeError):
    """The server answered with an error, or with something that is no reply."""


@dataclass
class Received:
    """One reply and the server's own counts; tokens, None where the server did not say."""

    reply: Reply = field(default_factory=Reply)
    id: str | None = None
    prompt: int | None = None
    restored: int | None = None
    generated: int | None = None
    server_speed: float | None = None  # tokens a second, the server's figure


@dataclass(frozen=True)
class Ask:
    """Everything a request needs besides the history."""

    model: str
    tools: list[dict[str, Any]]
    max_tokens: int
    temperature: float
    stream: bool
    enable_thinking: bool | None = None

    def common(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": self.temperature,
            "stream": self.stream,
        }
        if self.enable_thinking is not None:
            body["enable_thinking"] = self.enable_thinking
        return body


class Protocol_(Protocol):
    """What replay needs from a chat protocol."""

    path: str

    def body(self, messages: list[dict[str, Any]], ask: Ask) -> dict[str, Any]: ...

    def whole(self, data: dict[str, Any], out: Received) -> None: ...

    def event(self, data: dict[str, Any], out: Received) -> bool: ...


class Chat:
    """POST /v1/chat/completions."""

    path = "/v1/chat/completions"

    def body(self, messages: list[dict[str, Any]], ask: Ask) -> dict[str, Any]:
        body = {**ask.common(), "messages": messages, "max_tokens": ask.max_tokens}
        if ask.tools:
            body["tools"] = ask.tools
        if ask.stream:
            body["stream_options"] = {"include_usage": True}
        return body

    def whole(self, data: dict[str, Any], out: Received) -> None:
        choice = data["choices"][0]
        self._take(choice.get("message") or {}, out.reply)
        out.reply.finish_reason = choice.get("finish_reason")
        self._usage(data, out)

    def event(self, data: dict[str, Any], out: Received) -> bool:
        wrote = False
        for choice in data.get("choices") or []:
            wrote = self._take(choice.get("delta") or {}, out.reply) or wrote
            out.reply.finish_reason = (
                choice.get("finish_reason") or out.reply.finish_reason
            )
        self._usage(data, out)
        return wrote

    @staticmethod
    def _take(message: dict[str, Any], reply: Reply) -> bool:
        content = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        calls = message.get("tool_calls") or []
        reply.content += content
        reply.reasoning += reasoning
        for place, call in enumerate(calls):
            _merge_call(reply.tool_calls, call.get("index", place), call)
        return bool(content or reasoning or calls)

    @staticmethod
    def _usage(data: dict[str, Any], out: Received) -> None:
        out.id = data.get("id") or out.id
        usage, timings = data.get("usage"), data.get("timings") or {}
        if not usage:
            return
        out.prompt = usage.get("prompt_tokens")
        out.restored = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        # Without streaming, completion_tokens leaves out thinking tags; predicted_n counts what was generated.
        out.generated = timings.get("predicted_n") or usage.get("completion_tokens")
        out.server_speed = timings.get("predicted_per_second")


def _merge_call(calls: list[dict[str, Any]], index: int, delta: dict[str, Any]) -> None:
    """Add one streamed piece to the call at ``index``; name and arguments arrive in pieces."""
    while len(calls) <= index:
        calls.append(
            {
                "id": f"call_{len(calls)}",
                "type": "function",
                "function": {"name": "", "arguments": ""},
            }
        )
    call, function = calls[index], delta.get("function") or {}
    call["id"] = delta.get("id") or call["id"]
    call["function"]["name"] += function.get("name") or ""
    arguments = function.get("arguments") or ""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    call["function"]["arguments"] += arguments


class Messages:
    """POST /v1/messages.  Its input_tokens leave out what was restored, so the two are added up."""

    path = "/v1/messages"

    def body(self, messages: list[dict[str, Any]], ask: Ask) -> dict[str, Any]:
        body = {**ask.common(), "max_tokens": ask.max_tokens, "messages": []}
        for message in messages:
            if message["role"] == "system":
                body["system"] = message["content"]
            else:
                body["messages"].append(_message_param(message))
        if ask.tools:
            body["tools"] = [_messages_tool(tool["function"]) for tool in ask.tools]
        return body

    def whole(self, data: dict[str, Any], out: Received) -> None:
        for block in data.get("content") or []:
            self._start(block, out.reply)
        out.id = data.get("id")
        out.reply.finish_reason = data.get("stop_reason")
        self._usage(data.get("usage") or {}, out)

    def event(self, data: dict[str, Any], out: Received) -> bool:
        kind, delta = data.get("type"), data.get("delta") or {}
        if kind == "message_start":
            out.id = data["message"].get("id")
            self._usage(data["message"].get("usage") or {}, out)
        elif kind == "content_block_start":
            return self._start(data.get("content_block") or {}, out.reply)
        elif kind == "content_block_delta":
            out.reply.content += delta.get("text") or ""
            out.reply.reasoning += delta.get("thinking") or ""
            if delta.get("partial_json"):
                out.reply.tool_calls[-1]["function"]["arguments"] += delta[
                    "partial_json"
                ]
            return bool(
                delta.get("text") or delta.get("thinking") or delta.get("partial_json")
            )
        elif kind == "message_delta":
            out.reply.finish_reason = delta.get("stop_reason")
            out.generated = (data.get("usage") or {}).get(
                "output_tokens", out.generated
            )
        return False

    @staticmethod
    def _start(block: dict[str, Any], reply: Reply) -> bool:
        if block.get("type") == "tool_use":
            arguments = (
                json.dumps(block["input"], ensure_ascii=False)
                if block.get("input")
                else ""
            )
            function = {"name": block.get("name", ""), "arguments": arguments}
            reply.tool_calls.append(
                {"id": block["id"], "type": "function", "function": function}
            )
            return True
        reply.content += block.get("text") or ""
        reply.reasoning += block.get("thinking") or ""
        return bool(block.get("text") or block.get("thinking"))

    @staticmethod
    def _usage(usage: dict[str, Any], out: Received) -> None:
        read = usage.get("cache_read_input_tokens") or 0
        out.restored = read
        out.prompt = (
            (usage.get("input_tokens") or 0)
            + read
            + (usage.get("cache_creation_input_tokens") or 0)
        )
        out.generated = usage.get("output_tokens")


def _message_param(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        block = {
            "type": "tool_result",
            "tool_use_id": message["tool_call_id"],
            "content": message["content"],
        }
        return {"role": "user", "content": [block]}
    if message["role"] == "user":
        return {"role": "user", "content": message["content"]}
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        blocks.append(
            {
                "type": "thinking",
                "thinking": message["reasoning_content"],
                "signature": "",
            }
        )
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", []):
        function = call["function"]
        entry = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        blocks.append({**entry, "input": _mapping(function["arguments"])})
    return {"role": "assistant", "content": blocks or [{"type": "text", "text": ""}]}


def _mapping(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments or "{}")
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _messages_tool(function: dict[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return {
        "name": function["name"],
        "description": function.get("description", ""),
        "input_schema": schema,
    }


class Responses:
    """POST /v1/responses, with the whole history as input and nothing stored on the server."""

    path = "/v1/responses"

    def body(self, messages: list[dict[str, Any]], ask: Ask) -> dict[str, Any]:
        body = {**ask.common(), "max_output_tokens": ask.max_tokens, "store": False}
        items = [
            item
            for message in messages
            if message["role"] != "system"
            for item in _response_items(message)
        ]
        body["input"] = items
        for message in messages:
            if message["role"] == "system":
                body["instructions"] = message["content"]
        if ask.tools:
            body["tools"] = [
                {"type": "function", **tool["function"]} for tool in ask.tools
            ]
        return body

    def whole(self, data: dict[str, Any], out: Received) -> None:
        out.id, out.reply = data.get("id"), Reply(finish_reason=data.get("status"))
        for item in data.get("output") or []:
            self._item(item, out.reply)
        usage = data.get("usage") or {}
        out.prompt, out.generated = usage.get("input_tokens"), usage.get(
            "output_tokens"
        )
        out.restored = (usage.get("input_tokens_details") or {}).get("cached_tokens")

    def event(self, data: dict[str, Any], out: Received) -> bool:
        kind = data.get("type", "")
        if kind in ("response.completed", "response.incomplete"):
            self.whole(data["response"], out)
        return kind.endswith(".delta")

    @staticmethod
    def _item(item: dict[str, Any], reply: Reply) -> None:
        if item.get("type") == "message":
            reply.content += "".join(
                part.get("text", "") for part in item.get("content") or []
            )
        elif item.get("type") == "reasoning":
            reply.reasoning += "".join(
                part.get("text", "") for part in item.get("summary") or []
            )
        elif item.get("type") == "function_call":
            function = {
                "name": item["name"],
                "arguments": item.get("arguments") or "{}",
            }
            reply.tool_calls.append(
                {"id": item["call_id"], "type": "function", "function": function}
            )


def _response_items(message: dict[str, Any]) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        return [
            {
                "type": "function_call_output",
                "call_id": message["tool_call_id"],
                "output": message["content"],
            }
        ]
    items = []
    if message["content"] or message.get("reasoning_content"):
        item = {
            "type": "message",
            "role": message["role"],
            "content": message["content"],
        }
        if message.get("reasoning_content"):
            item["reasoning"] = message["reasoning_content"]
        items.append(item)
    for call in message.get("tool_calls", []):
        items.append(
            {"type": "function_call", "call_id": call["id"], **call["function"]}
        )
    return items


PROTOCOLS: dict[str, Protocol_] = {
    "chat": Chat(),
    "messages": Messages(),
    "responses": Responses(),
}
