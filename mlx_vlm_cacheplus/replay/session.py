"""Session files: what the client of an agent session says, one JSON line a turn.

The first line is the header, every further line one turn.  Nothing here knows a server; see ``docs/REPLAY.md``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

FORMAT = 1
_HEADER_KEYS = {"session", "name", "description", "system", "tools", "defaults"}
_DEFAULT_KEYS = {"max_tokens", "temperature", "echo_reasoning", "enable_thinking"}
_TURN_KEYS = {"turn", "add", "expected", "max_tokens"}
_ROLES = {"user", "tool"}


class SessionError(ValueError):
    """A session file that cannot be read; the message names file and line."""


@dataclass(frozen=True)
class Turn:
    """What the client adds before one request, and how long the reply may be."""

    add: list[dict[str, Any]]
    expected: dict[str, Any] | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class Session:
    """A recorded session; ``turns`` is never empty."""

    name: str
    turns: list[Turn]
    description: str = ""
    system: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int = 256
    temperature: float = 0.0
    echo_reasoning: bool = True
    enable_thinking: bool | None = None

    def first(self, turns: int | None) -> Session:
        """The same session, cut after ``turns`` turns (None: all)."""
        if turns is None:
            return self
        return Session(**{**self.__dict__, "turns": self.turns[: max(1, turns)]})

    def reply_limit(self, turn: Turn, override: int | None = None) -> int:
        """Longest reply in tokens: the caller's word, else the turn's, else the session's."""
        return override or turn.max_tokens or self.max_tokens


def load(source: str | Path) -> Session:
    """Read a session file, or one of the bundled sessions by name (``short``)."""
    path = Path(source)
    if path.is_file():
        return parse(read_text(path), str(path))
    name = str(source).removesuffix(".jsonl")
    if name in bundled():
        text = _bundle().joinpath(f"{name}.jsonl").read_text(encoding="utf-8")
        return parse(text, name)
    known = ", ".join(bundled())
    raise SessionError(
        f"{source}: no such file, and no bundled session of that name (bundled: {known})"
    )


def read_text(path: Path) -> str:
    """A UTF-8 file; SessionError when it is not one."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SessionError(f"{path}: not UTF-8 text: {error}") from None


def bundled() -> list[str]:
    """Names of the sessions that come with the package."""
    return sorted(
        item.name[: -len(".jsonl")]
        for item in _bundle().iterdir()
        if item.name.endswith(".jsonl")
    )


def _bundle() -> Any:
    return resources.files("mlx_vlm_cacheplus") / "sessions"


def parse(text: str, where: str = "session") -> Session:
    """Session from JSON lines; SessionError names the line that is wrong."""
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise SessionError(f"{where}: line {number} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise SessionError(f"{where}: line {number} is not a JSON object")
        records.append((number, record))
    if not records:
        raise SessionError(f"{where}: empty")
    header = _header(records[0][1], f"{where}: line {records[0][0]}")
    turns = [_turn(record, f"{where}: line {number}") for number, record in records[1:]]
    if not turns:
        raise SessionError(f"{where}: a header and no turns")
    return Session(turns=turns, **header)


def _header(record: dict[str, Any], at: str) -> dict[str, Any]:
    if record.get("session") != FORMAT:
        raise SessionError(
            f'{at}: the first line must be a header with "session": {FORMAT}'
        )
    _refuse_unknown(record, _HEADER_KEYS, at)
    defaults = record.get("defaults") or {}
    if not isinstance(defaults, dict):
        raise SessionError(f'{at}: "defaults" is not an object')
    _refuse_unknown(defaults, _DEFAULT_KEYS, at)
    _refuse_limit(defaults, at)
    return {
        "name": str(record.get("name") or "session"),
        "description": str(record.get("description") or ""),
        "system": record.get("system"),
        "tools": record.get("tools") or [],
        **defaults,
    }


def _turn(record: dict[str, Any], at: str) -> Turn:
    _refuse_unknown(record, _TURN_KEYS, at)
    add = record.get("add")
    if not isinstance(add, list) or not add:
        raise SessionError(f'{at}: "add" must list the messages that the client adds')
    for message in add:
        if (
            not isinstance(message, dict)
            or message.get("role") not in _ROLES
            or "content" not in message
        ):
            raise SessionError(
                f"{at}: an added message needs a content and a role of {sorted(_ROLES)}"
            )
    _refuse_limit(record, at)
    if not isinstance(record.get("expected"), (dict, type(None))):
        raise SessionError(f'{at}: "expected" is not an object')
    return Turn(
        add=add, expected=record.get("expected"), max_tokens=record.get("max_tokens")
    )


def _refuse_limit(record: dict[str, Any], at: str) -> None:
    limit = record.get("max_tokens", 1)
    if not isinstance(limit, int) or limit < 1:
        raise SessionError(f'{at}: "max_tokens" must be 1 or more')


def _refuse_unknown(record: dict[str, Any], known: set[str], at: str) -> None:
    unknown = sorted(set(record) - known)
    if unknown:
        raise SessionError(
            f"{at}: unknown key {unknown[0]!r} (known: {', '.join(sorted(known))})"
        )


def dump(session: Session) -> str:
    """Session as JSON lines; ``parse`` reads it back."""
    defaults: dict[str, Any] = {
        "max_tokens": session.max_tokens,
        "temperature": session.temperature,
    }
    defaults["echo_reasoning"] = session.echo_reasoning
    if session.enable_thinking is not None:
        defaults["enable_thinking"] = session.enable_thinking
    header: dict[str, Any] = {"session": FORMAT, "name": session.name}
    if session.description:
        header["description"] = session.description
    header |= {"system": session.system, "tools": session.tools, "defaults": defaults}
    lines = [header]
    for number, turn in enumerate(session.turns, 1):
        line: dict[str, Any] = {"turn": number, "add": turn.add}
        if turn.max_tokens is not None:
            line["max_tokens"] = turn.max_tokens
        if turn.expected is not None:
            line["expected"] = turn.expected
        lines.append(line)
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
