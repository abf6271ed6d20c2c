"""Lines that name one request and say nothing to the model.

Some clients put a line in front of the system text that differs in every request, so
that no two prompts of a conversation share more than a handful of tokens.  Such lines
are left out of the rendered prompt.

What is left out is narrow on purpose: whole lines, in front of the first message, if
that is a system message, and only those that a pattern knows.  Everything else is
prompt content, whatever it costs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

# Whole lines, as regular expressions.
PATTERNS = (
    # An attribution line with a checksum of the request, from a coding agent.
    r"x-anthropic-billing-header:.*",
)
ON = frozenset(("", "1", "true", "yes", "on"))
OFF = frozenset(("0", "false", "no", "off"))
SYSTEM_ROLES = ("system", "developer")


@functools.lru_cache(maxsize=8)
def read_patterns(setting: str | None) -> tuple[re.Pattern[str], ...]:
    """The patterns in force.

    Args:
        setting: None or "on" for the known ones, "off" for none, or a regular
            expression for one more.

    Raises:
        ValueError: it is no regular expression.
    """
    word = (setting or "").strip()
    if word.lower() in OFF:
        return ()
    more = () if word.lower() in ON else (word,)
    try:
        return tuple(re.compile(pattern) for pattern in (*PATTERNS, *more))
    except re.error as error:
        raise ValueError(f"not on, off, or a regular expression: {error}") from None


def without_volatile_lines(
    messages: Sequence[Any], setting: str | None = None
) -> Sequence[Any]:
    """The messages without the volatile lines in front of the first one.

    Args:
        messages: as they go into the chat template; borrowed, never changed.
    """
    patterns = read_patterns(setting)
    first = messages[0] if messages else None
    if not patterns or not isinstance(first, dict):
        return messages
    if first.get("role") not in SYSTEM_ROLES:
        return messages
    content = _shorten(first.get("content"), patterns)
    if content is first.get("content"):
        return messages
    rest = messages[1:]
    return [{**first, "content": content}, *rest] if content else list(rest)


def _shorten(content: Any, patterns: Sequence[re.Pattern[str]]) -> Any:
    """The content without them, or the same object where there are none."""
    if isinstance(content, str):
        return _drop(content, patterns)
    if isinstance(content, list) and content and isinstance(content[0], dict):
        part, *others = content
        # Chat templates read either name.
        names = [n for n in ("text", "content") if isinstance(part.get(n), str)]
        kept = {name: _drop(part[name], patterns) for name in names}
        if any(kept[name] is not part[name] for name in names):
            return [{**part, **kept}, *others] if any(kept.values()) else others
    return content


def _drop(text: str, patterns: Sequence[re.Pattern[str]]) -> str:
    line, newline, rest = text.partition("\n")
    if not any(pattern.fullmatch(line.strip()) for pattern in patterns):
        return text
    return _drop(rest, patterns) if newline else ""
