"""A line that differs in every request does not stand in front of the prompt."""

from __future__ import annotations

import functools
import os
from typing import Any

from ..change import Change, Option, Target

PROMPT = "mlx_vlm.prompt_utils"
ENV = "MLX_VLM_CACHEPLUS_VOLATILE_LINES"


def check_setting(text: str) -> None:
    """Raises ValueError where the text is neither a word nor a regular expression."""
    from ..core.volatile_lines import read_patterns

    read_patterns(text)


class VolatileLines(Change):
    name = "volatile-lines"
    summary = "A client's per-request line in front of the system text is left out of the prompt"
    targets = (Target(PROMPT, "get_chat_template"),)
    why = (
        "A coding agent puts an attribution line with a checksum of the request first in the system text. Every prompt of "
        "a session then differs from the one before near its first token, and no prefix cache can help."
    )
    upstream = (
        "no issue yet; the same in https://github.com/vllm-project/vllm/issues/36829"
    )
    remove_when = "the stock drops such a line, or the client stops sending it"
    marks = ("mlx_vlm.volatile_lines:without_volatile_lines",)
    options = (
        Option(
            "--cacheplus-volatile-lines",
            ENV,
            "Lines in front of the system text that differ in every request are left out of the prompt: on (the known "
            "ones, the default), off, or a regular expression for one more.",
            metavar="on|off|REGEX",
            check=check_setting,
        ),
    )

    def apply(self, patcher: Any) -> None:
        from ..core import volatile_lines as core

        def render(original: Any) -> Any:
            @functools.wraps(original)
            def wrapper(
                processor: Any, messages: Any, *args: Any, **kwargs: Any
            ) -> Any:
                kept = core.without_volatile_lines(messages, os.environ.get(ENV))
                return original(processor, kept, *args, **kwargs)

            return wrapper

        patcher.replace_method(PROMPT, "get_chat_template", render)


CHANGE = VolatileLines()
