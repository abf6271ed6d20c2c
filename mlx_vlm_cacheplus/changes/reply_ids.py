"""The model's own ids stand for the text that it wrote."""

from __future__ import annotations

import functools
import threading
from typing import Any

from ..change import Change, Target

SERVER = "mlx_vlm.server.generation"


class ReplyIds(Change):
    name = "reply-ids"
    summary = (
        "A reply that comes back as text is read with the ids that the model chose"
    )
    targets = (
        Target("mlx_vlm.generate.ar", "GenerationBatch.filter"),
        Target(SERVER, "ResponseGenerator.generate"),
        Target(SERVER, "ResponseGenerator._preprocess_request"),
    )
    why = (
        "A client sends replies back as text, and tokenizing that text again need not give the ids that the model chose. "
        "One differing id ends the reuse of everything behind it."
    )
    upstream = "no issue yet; the same fault in https://github.com/waybarrios/vllm-mlx and others (retokenization)"
    remove_when = (
        "the server accepts a reply's ids beside its text, and clients send them"
    )
    requires = ("output-tokens",)
    marks = ("mlx_vlm.generate.reply_ids:respell_inputs",)

    def apply(self, patcher: Any) -> None:
        from ..core import reply_ids as core

        def filter_rows(original: Any) -> Any:
            def wrapper(self: Any, keep: Any) -> None:
                rows = core.ending_rows(self, keep)
                original(self, keep)
                core.note_ended_rows(rows)

            return wrapper

        patcher.replace_method(
            "mlx_vlm.generate.ar", "GenerationBatch.filter", filter_rows
        )
        _apply_to_server(patcher, core)


def _apply_to_server(patcher: Any, core: Any) -> None:
    # Whose request a thread generates, for the preprocessing inside it.
    request = threading.local()

    def generate(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(
            self: Any,
            prompt: Any,
            images: Any = None,
            audio: Any = None,
            args: Any = None,
            videos: Any = None,
        ) -> Any:
            request.tenant = getattr(args, "tenant_id", None)
            try:
                return original(self, prompt, images, audio, args, videos)
            finally:
                del request.tenant

        return wrapper

    def preprocess(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(
            self: Any,
            prompt: Any,
            images: Any = None,
            audio: Any = None,
            videos: Any = None,
            **kwargs: Any,
        ) -> dict:
            raw_inputs = original(self, prompt, images, audio, videos, **kwargs)
            # The check of the context budget tokenizes outside a request.
            if not hasattr(request, "tenant"):
                return raw_inputs
            media = (images, audio, videos)
            return core.respell_inputs(self, prompt, raw_inputs, media, request.tenant)

        return wrapper

    patcher.replace_method(SERVER, "ResponseGenerator.generate", generate)
    patcher.replace_method(SERVER, "ResponseGenerator._preprocess_request", preprocess)


CHANGE = ReplyIds()
