"""A server on 127.0.0.1 that speaks the three chat protocols, with words for tokens and a prefix cache to choose.

What it counts can be planted and computed by hand: a prompt is the words of the history, a reply is scripted, and the
cache keeps prompts alone (``keeps="prompts"``) or prompts and replies (``keeps="replies"``).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mlx_vlm_cacheplus.replay.tokens import common_prefix

END = "</assistant>"
Script = Callable[[int], dict[str, Any]]


def words(messages: list[dict[str, Any]], ask: bool = True) -> list[str]:
    """The prompt: what a chat template would make of the history."""
    out: list[str] = []
    for message in messages:
        out.append(f"<{message['role']}>")
        out += message.get("reasoning_content", "").split()
        out += (message.get("content") or "").split()
        for call in message.get("tool_calls", []):
            function = call["function"]
            out += [function["name"], *function["arguments"].split()]
        out.append(f"</{message['role']}>")
    return [*out, "<assistant>"] if ask else out


class WordTokenizer:
    """The client's view of the same prompts, as ids."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {END: 0}
        self.special = {0}

    def prompts(self, messages, tools, thinking):
        return [
            [self._ids.setdefault(word, len(self._ids)) for word in words(messages)]
        ]


class FakeServer:
    """Context manager; ``asked`` holds the histories it was sent, in chat form."""

    def __init__(
        self, script: Script, keeps: str = "prompts", report: list | None = None
    ):
        self.script, self.keeps, self.report = script, keeps, report
        self.asked: list[list[dict[str, Any]]] = []
        self.bodies: list[dict[str, Any]] = []
        self._kept: list[list[str]] = []
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.01,), daemon=True
        )
        self.base = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(10)

    def answer(self, history: list[dict[str, Any]]) -> dict[str, Any]:
        """The scripted reply to the n-th request, with counts."""
        with self._lock:
            prompt = words(history)
            reply = dict(self.script(len(self.asked)))
            self.asked.append(history)
            restored = max(
                (common_prefix(prompt, kept) for kept in self._kept), default=0
            )
            restored = min(restored, len(prompt) - 1)
            message = {"role": "assistant", **reply}
            written = words([message], ask=False)[1:]
            if reply.get("finish") == "length":
                written = written[:-1]
            self._kept.append(prompt + (written if self.keeps == "replies" else []))
            counts = {
                "prompt": len(prompt),
                "restored": restored,
                "generated": len(written),
            }
            return {**reply, **counts}


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Keep the test's output clean."""

        def do_GET(self) -> None:
            if self.path == "/health":
                self._json(200, {"loaded_model": "words"})
            elif (
                self.path.startswith("/v1/cacheplus/report")
                and server.report is not None
            ):
                self._json(200, {"records": server.report})
            else:
                self._json(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.bodies.append(body)
            to_chat, whole, events = _WIRES[self.path]
            answer = server.answer(to_chat(body))
            if "status" in answer:
                self._json(answer["status"], {"detail": answer["detail"]})
            elif body["stream"]:
                self._events(events(answer))
            else:
                self._json(200, whole(answer))

        def _json(self, status: int, data: dict[str, Any]) -> None:
            raw = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def _events(self, events: list[dict[str, Any]]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for event in events:
                kind = f"event: {event['type']}\n" if "type" in event else ""
                self.wfile.write(f"{kind}data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

    return Handler


def _chat_body(body: dict[str, Any]) -> list[dict[str, Any]]:
    return body["messages"]


def _chat_usage(answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt_tokens": answer["prompt"],
        "completion_tokens": answer["generated"],
        "prompt_tokens_details": {"cached_tokens": answer["restored"]},
    }


def _chat_message(answer: dict[str, Any]) -> dict[str, Any]:
    names = ("content", "reasoning_content", "tool_calls")
    return {name: answer[name] for name in names if name in answer}


def _chat_whole(answer: dict[str, Any]) -> dict[str, Any]:
    choice = {"message": _chat_message(answer), "finish_reason": _finish(answer)}
    return {"id": "c1", "choices": [choice], "usage": _chat_usage(answer)}


def _finish(answer: dict[str, Any]) -> str:
    return answer.get("finish") or ("tool_calls" if "tool_calls" in answer else "stop")


def _chat_events(answer: dict[str, Any]) -> list[dict[str, Any]]:
    if "garbled" in answer:
        return [{"choices": [{"delta": {"tool_calls": [7]}}]}]
    if "broken" in answer:
        return [{"error": answer["broken"]}]
    message, events = _chat_message(answer), []
    for name in ("reasoning_content", "content"):
        text = message.get(name, "")
        for piece in (text[:3], text[3:]):
            events.append({"choices": [{"delta": {name: piece}}]})
    for index, call in enumerate(message.get("tool_calls", [])):
        function = call["function"]
        head = {
            "index": index,
            "id": call["id"],
            "function": {"name": function["name"]},
        }
        rest = {"index": index, "function": {"arguments": function["arguments"]}}
        for delta in (head, rest):
            events.append({"choices": [{"delta": {"tool_calls": [delta]}}]})
    events.append({"choices": [{"delta": {}, "finish_reason": _finish(answer)}]})
    if "silent" in answer:
        return events
    return [*events, {"id": "c1", "choices": [], "usage": _chat_usage(answer)}]


def _messages_body(body: dict[str, Any]) -> list[dict[str, Any]]:
    out = [{"role": "system", "content": body["system"]}] if "system" in body else []
    for message in body["messages"]:
        blocks = message["content"]
        if isinstance(blocks, str):
            out.append({"role": message["role"], "content": blocks})
            continue
        if blocks[0]["type"] == "tool_result":
            out.append({"role": "tool", "content": blocks[0]["content"]})
            continue
        text = "".join(block.get("text", "") for block in blocks)
        entry: dict[str, Any] = {"role": message["role"], "content": text}
        thinking = "".join(block.get("thinking", "") for block in blocks)
        if thinking:
            entry["reasoning_content"] = thinking
        calls = [_call(block) for block in blocks if block["type"] == "tool_use"]
        out.append({**entry, "tool_calls": calls} if calls else entry)
    return out


def _call(block: dict[str, Any]) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": json.dumps(block["input"])}
    return {"id": block["id"], "type": "function", "function": function}


def _messages_usage(answer: dict[str, Any]) -> dict[str, int]:
    read = answer["restored"]
    return {
        "input_tokens": answer["prompt"] - read,
        "cache_read_input_tokens": read,
        "output_tokens": answer["generated"],
    }


def _messages_blocks(answer: dict[str, Any]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": answer["reasoning_content"]})
    if answer.get("content"):
        blocks.append({"type": "text", "text": answer["content"]})
    for call in answer.get("tool_calls", []):
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        blocks.append({**block, "input": json.loads(function["arguments"])})
    return blocks


def _messages_whole(answer: dict[str, Any]) -> dict[str, Any]:
    content, usage = _messages_blocks(answer), _messages_usage(answer)
    return {"id": "m1", "content": content, "stop_reason": "end_turn", "usage": usage}


def _messages_events(answer: dict[str, Any]) -> list[dict[str, Any]]:
    usage = {**_messages_usage(answer), "output_tokens": 0}
    events = [{"type": "message_start", "message": {"id": "m1", "usage": usage}}]
    for index, block in enumerate(_messages_blocks(answer)):
        deltas = {
            "text": lambda b: ({"text": ""}, {"type": "text_delta", "text": b["text"]}),
            "thinking": lambda b: (
                {"thinking": ""},
                {"type": "thinking_delta", "thinking": b["thinking"]},
            ),
            "tool_use": lambda b: (
                {"id": b["id"], "name": b["name"], "input": {}},
                {"type": "input_json_delta", "partial_json": json.dumps(b["input"])},
            ),
        }
        start, delta = deltas[block["type"]](block)
        start = {"type": block["type"], **start}
        events.append(
            {"type": "content_block_start", "index": index, "content_block": start}
        )
        events.append({"type": "content_block_delta", "index": index, "delta": delta})
    ended = {
        "delta": {"stop_reason": "end_turn"},
        "usage": {"output_tokens": answer["generated"]},
    }
    return [*events, {"type": "message_delta", **ended}, {"type": "message_stop"}]


def _responses_body(body: dict[str, Any]) -> list[dict[str, Any]]:
    out = (
        [{"role": "system", "content": body["instructions"]}]
        if "instructions" in body
        else []
    )
    for item in body["input"]:
        if item["type"] == "function_call_output":
            out.append({"role": "tool", "content": item["output"]})
        elif item["type"] == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if out[-1]["role"] != "assistant":
                out.append({"role": "assistant", "content": ""})
            out[-1].setdefault("tool_calls", []).append(call)
        else:
            entry = {"role": item["role"], "content": item["content"]}
            if item.get("reasoning"):
                entry["reasoning_content"] = item["reasoning"]
            out.append(entry)
    return out


def _responses_whole(answer: dict[str, Any]) -> dict[str, Any]:
    output: list[dict[str, Any]] = []
    if answer.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": answer["reasoning_content"]}]
        output.append({"type": "reasoning", "summary": summary})
    if answer.get("content"):
        part = {"type": "output_text", "text": answer["content"]}
        output.append({"type": "message", "role": "assistant", "content": [part]})
    for call in answer.get("tool_calls", []):
        output.append(
            {"type": "function_call", "call_id": call["id"], **call["function"]}
        )
    usage = {
        "input_tokens": answer["prompt"],
        "input_tokens_details": {"cached_tokens": answer["restored"]},
        "output_tokens": answer["generated"],
    }
    return {"id": "r1", "status": "completed", "output": output, "usage": usage}


def _responses_events(answer: dict[str, Any]) -> list[dict[str, Any]]:
    text = answer.get("content") or answer.get("reasoning_content") or "{"
    return [
        {"type": "response.created", "response": {}},
        {"type": "response.output_text.delta", "delta": text},
        {"type": "response.completed", "response": _responses_whole(answer)},
    ]


_WIRES: dict[str, tuple[Any, Any, Any]] = {
    "/v1/chat/completions": (_chat_body, _chat_whole, _chat_events),
    "/v1/messages": (_messages_body, _messages_whole, _messages_events),
    "/v1/responses": (_responses_body, _responses_whole, _responses_events),
}
