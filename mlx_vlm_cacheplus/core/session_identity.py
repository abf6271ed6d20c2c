"""Which session a request belongs to, as its sender says it.

In this order: a header that agents send, a field of the body, and otherwise nothing:
then ``session_table`` goes by lineage, the conversation that the prompt extends.

The name travels with the request: the middleware puts what was sent into a context
variable, which the thread that queues the request inherits; there the salt under which
the cache looks the prompt up becomes a :class:`Salt`, an integer that remembers who
asks.  So no code between the server and the cache needs to know of sessions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .session_table import Request, Salt

# Client, and the headers that name its session.  Of several names the values are
# joined; those behind the first may be missing.
HEADERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Claude Code", ("x-claude-code-session-id", "x-claude-code-agent-id")),
    ("Qwen Code", ("x-qwen-code-session-id",)),
    ("OpenCode, its own providers", ("x-opencode-session",)),
    ("OpenCode, other providers", ("x-session-affinity",)),
    ("Hermes", ("x-hermes-session-id",)),
    ("LiteLLM", ("x-litellm-session-id",)),
    ("Codex", ("session_id",)),
    ("Codex", ("session-id",)),
    ("Codex", ("conversation_id",)),
    ("several", ("x-session-id",)),
    ("several", ("x-conversation-id",)),
)
# Fields of the body, dotted where nested.
FIELDS = (
    "prompt_cache_key",
    "session_id",
    "metadata.session_id",
    "metadata.user_id",
)
LONGEST_NAME = 256
# A longer body is not looked into: its copy would be held while it is read.
LONGEST_BODY = 8 << 20

Identify = Callable[[Mapping[str, str], Mapping[str, Any]], str | None]


def identify(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """The name of a request's session, or None where its sender gives none.

    Args:
        headers: by name, in any case.
        body: the decoded request; read only where no header answers.
    """
    for _, names in HEADERS:
        if headers.get(names[0], "").strip():
            values = [headers[n].strip() for n in names if headers.get(n, "").strip()]
            return "/".join(values)
    for field in FIELDS:
        value: Any = body
        for part in field.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str) and value.strip():
            return value.strip()
    return None


class Body(Mapping[str, Any]):
    """The decoded body of a request; decoded when it is first read."""

    def __init__(self) -> None:
        self._chunks: list[bytes] | None = []
        self._size = 0
        self._fields: dict[str, Any] | None = None

    def add(self, chunk: bytes) -> None:
        """Take note of a part; of a body that is too long nothing is kept."""
        self._size += len(chunk)
        if self._size > LONGEST_BODY:
            self._chunks = None
        elif self._chunks is not None:
            self._chunks.append(chunk)

    def _read(self) -> dict[str, Any]:
        if self._fields is None:
            try:
                found = json.loads(b"".join(self._chunks or ()) or b"{}")
            except ValueError:
                found = {}
            self._fields = found if isinstance(found, dict) else {}
            self._chunks = None
        return self._fields

    def __getitem__(self, key: str) -> Any:
        return self._read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


class Sender:
    """What one HTTP request says of its session; read once, when it is first needed."""

    def __init__(self, headers: Mapping[str, str], body: Body, identify: Identify):
        self._sent: tuple[Mapping[str, str], Body] | None = (headers, body)
        self._identify = identify
        self._name: str | None = None

    def name(self) -> str | None:
        """The session's name, cut to a length that can be kept; None for none."""
        if self._sent is not None:
            name = self._identify(*self._sent)
            self._sent = None
            if isinstance(name, str) and name.strip().isprintable():
                self._name = name.strip()[:LONGEST_NAME] or None
        return self._name


# The request that the current task serves; ``asyncio.to_thread`` carries it along.
_sender: ContextVar[Sender | None] = ContextVar("sender", default=None)


def salted(salt: int, tenant: str | None) -> int:
    """The salt of the request being served here, with who asks; as it is elsewhere."""
    sender = _sender.get()
    if sender is None:
        return salt
    return Salt.of(salt, Request(sender.name(), tenant))


class RequestsNameTheirSession:
    """ASGI middleware: what a request says of its session is known while it is served."""

    def __init__(self, app: ASGIApp, identify: Identify = identify):
        self.app = app
        self.identify = identify

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body = Body()

        async def receive_noted() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                body.add(message.get("body", b""))
            return message

        token = _sender.set(Sender(Headers(scope=scope), body, self.identify))
        try:
            await self.app(scope, receive_noted, send)
        finally:
            _sender.reset(token)
