"""Session files from OpenAI-style request logs: one request body a line, the conversation growing from line to line.

A line is a body ``{"messages": [...], "tools": [...]}`` or ``{"request": BODY, "response": COMPLETION}``.  What a body
adds to the one before it is the turn; the assistant messages among it are the recorded replies.  Bodies that do not
continue the conversation (title requests, other agents) are left out and reported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from .session import Session, SessionError, Turn

_SYSTEM = ("system", "developer")


@dataclass
class Imported:
    """The session, and one line for each log line that was left out."""

    session: Session
    skipped: list[str] = field(default_factory=list)


@dataclass
class _Request:
    line: int
    body: dict[str, Any]
    messages: list[dict[str, Any]]  # without system messages
    reply: dict[str, Any] | None  # from the logged response


def import_log(text: str, name: str = "imported", where: str = "log") -> Imported:
    """Read a request log; SessionError names the line that cannot be read."""
    requests = [
        _read(line, number, where)
        # Not splitlines(): JSON allows U+2028 and its like inside a string.
        for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1)
        if line.strip()
    ]
    if not requests:
        raise SessionError(f"{where}: no requests")
    chain, skipped = _chain(requests, where)
    turns = []
    for index, request in enumerate(chain):
        before = chain[index - 1].messages if index else []
        after = chain[index + 1].messages if index + 1 < len(chain) else None
        turns.append(_turn(request, before, after, where))
    body = chain[0].body
    limit = body.get("max_tokens") or body.get("max_completion_tokens")
    session = Session(
        name=name,
        turns=turns,
        description=f"imported from {len(chain)} requests",
        system=_system(body["messages"]),
        tools=body.get("tools") or [],
        max_tokens=limit or Session.max_tokens,
    )
    return Imported(session, skipped)


def _read(line: str, number: int, where: str) -> _Request:
    """One line; whatever is wrong with it is told with its number."""
    try:
        request = _request(line, number, where)
        json.dumps(request.body, ensure_ascii=False).encode("utf-8")
        limit = request.body.get("max_tokens") or request.body.get(
            "max_completion_tokens"
        )
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise SessionError(
                f"{where}: line {number}: max_tokens is {limit!r}, not a number of tokens"
            )
        if not isinstance(request.body.get("tools") or [], list):
            raise SessionError(f"{where}: line {number}: tools is not a list")
        for message in request.messages:
            if not isinstance(message.get("tool_calls") or [], list):
                raise SessionError(f"{where}: line {number}: tool_calls is not a list")
    except (RecursionError, UnicodeError) as error:
        raise SessionError(f"{where}: line {number}: {error}") from None
    return request


def _request(line: str, number: int, where: str) -> _Request:
    at = f"{where}: line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise SessionError(f"{at} is not JSON: {error}") from None
    wrapped = isinstance(record, dict) and isinstance(record.get("request"), dict)
    body = record["request"] if wrapped else record
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise SessionError(
            f'{at} has no list "messages" (a request body, or one under "request", is expected)'
        )
    for message in body["messages"]:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise SessionError(f"{at}: a message without a role")
    messages = [
        _plain(message)
        for message in body["messages"]
        if message["role"] not in _SYSTEM
    ]
    return _Request(
        number,
        body,
        messages,
        _logged_reply(record.get("response")) if wrapped else None,
    )


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Content parts of text only as one string, so that clients that switch forms still continue."""
    content = message.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and "text" in part for part in content
    ):
        return {**message, "content": "\n".join(str(part["text"]) for part in content)}
    return {**message, "content": "" if content is None else content}


def _logged_reply(response: Any) -> dict[str, Any] | None:
    try:
        return dict(response["choices"][0]["message"])
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def _system(messages: list[dict[str, Any]]) -> str | None:
    parts = [
        _plain(message)["content"] for message in messages if message["role"] in _SYSTEM
    ]
    return "\n\n".join(str(part) for part in parts if part) or None


def _chain(requests: list[_Request], where: str) -> tuple[list[_Request], list[str]]:
    """The longest conversation of the log, and what does not belong to it."""
    chains: list[list[_Request]] = []
    for request in requests:
        for chain in chains:
            if _continues(chain[-1].messages, request.messages):
                chain.append(request)
                break
        else:
            chains.append([request])
    best = max(chains, key=len)
    rest = (request for chain in chains if chain is not best for request in chain)
    lines = sorted(request.line for request in rest)
    return best, [
        f"{where}: line {line} does not continue the conversation; left out"
        for line in lines
    ]


def _continues(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> bool:
    if len(after) <= len(before):
        return False
    same = all(_key(old) == _key(new) for old, new in zip(before, after, strict=False))
    return same and any(
        message["role"] in ("user", "tool") for message in after[len(before) :]
    )


def _key(message: dict[str, Any]) -> tuple[Any, ...]:
    return (
        message["role"],
        json.dumps(message["content"], sort_keys=True),
        message.get("tool_call_id"),
    )


def _turn(
    request: _Request,
    before: list[dict[str, Any]],
    after: list[dict[str, Any]] | None,
    where: str,
) -> Turn:
    names: dict[str, str] = {}
    for message in request.messages:
        for call in message.get("tool_calls") or []:
            names[call.get("id", "")] = (call.get("function") or {}).get("name", "")
    add = [
        _added(message, names)
        for message in request.messages[len(before) :]
        if message["role"] != "assistant"
    ]
    if not add:
        raise SessionError(f"{where}: line {request.line} adds no user or tool message")
    reply = request.reply
    if after is not None and len(after) > len(request.messages):
        following = after[len(request.messages)]
        reply = following if following["role"] == "assistant" else reply
    return Turn(add=add, expected=_expected(reply) if reply else None)


def _added(message: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    if message["role"] in ("tool", "function"):
        name = message.get("name") or names.get(message.get("tool_call_id") or "")
        return {
            "role": "tool",
            **({"name": name} if name else {}),
            "content": message["content"],
        }
    return {"role": "user", "content": message["content"]}


def _expected(reply: dict[str, Any]) -> dict[str, Any]:
    expected: dict[str, Any] = {"content": _plain(reply)["content"]}
    reasoning = reply.get("reasoning_content") or reply.get("reasoning")
    if reasoning:
        expected["reasoning"] = reasoning
    calls = []
    for call in reply.get("tool_calls") or []:
        function = call.get("function") or {}
        arguments = function.get("arguments", {})
        try:
            arguments = (
                json.loads(arguments) if isinstance(arguments, str) else arguments
            )
        except json.JSONDecodeError:
            pass  # kept as the text that the model wrote
        calls.append({"name": function.get("name", ""), "arguments": arguments})
    if calls:
        expected["tool_calls"] = calls
    return expected
