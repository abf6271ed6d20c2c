"""Requests that speculative decoding cannot serve are decoded without it."""

from __future__ import annotations

import functools
from typing import Any

from ..change import Change, Target

AR = "mlx_vlm.generate.ar"
SERVER = "mlx_vlm.server.generation"


class WithoutDrafter:
    """A response generator as seen by a request that is about to be queued.

    The only question that it asks about the draft model is whether to refuse.
    """

    draft_model = None

    def __init__(self, server: Any):
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


class UndraftedRequests(Change):
    name = "undrafted-requests"
    summary = "Penalties, logit_bias, logprobs, response_format and thinking budgets work with a draft model loaded"
    targets = (
        Target(AR, "BatchGenerator.next"),
        Target(AR, "BatchGenerator._build_mixed_prompt_batch"),
        Target(AR, "GenerationBatch.extend"),
        Target(SERVER, "ResponseGenerator.generate"),
        Target(SERVER, "ResponseGenerator._log_prefill_started"),
        Target(SERVER, "ResponseGenerator._step"),
    )
    why = (
        "With a draft model loaded, response_format and thinking budgets are answered with HTTP 500, log-probabilities are "
        "all 0.0, and penalties and logit_bias reach the first token only. Such a request is decoded without the drafter."
    )
    upstream = "related: https://github.com/Blaizzy/mlx-vlm/issues/1224, https://github.com/Blaizzy/mlx-vlm/issues/2232"
    remove_when = (
        "a server with a draft model answers such requests as one without it does"
    )
    marks = ("mlx_vlm.generate.undrafted_requests:rows_of_one_kind",)

    def apply(self, patcher: Any) -> None:
        from ..core import undrafted_requests as core

        def build(original: Any) -> Any:
            # Stock asks for a batch of warm rows before it builds a cold one.
            def wrapper(self: Any, sequences: Any) -> Any:
                core.choose_drafting(self, sequences)
                prompt_batch = original(self, sequences)
                core.give_whole_context(prompt_batch)
                return prompt_batch

            return wrapper

        def extend(original: Any) -> Any:
            def wrapper(self: Any, other: Any) -> None:
                core.even_out_logprobs(self, other)
                original(self, other)

            return wrapper

        patcher.surround(AR, "BatchGenerator.next", core.rows_of_one_kind)
        patcher.replace_method(AR, "BatchGenerator._build_mixed_prompt_batch", build)
        patcher.replace_method(AR, "GenerationBatch.extend", extend)
        _apply_to_server(patcher, core)


def _apply_to_server(patcher: Any, core: Any) -> None:
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
            if args is not None:
                core.drop_neutral_penalty(args)
            return original(WithoutDrafter(self), prompt, images, audio, args, videos)

        return wrapper

    def started(original: Any) -> Any:
        # What this returns, stock keeps with the row.
        def wrapper(self: Any, request: Any, **kwargs: Any) -> dict:
            log_state = original(self, request, **kwargs)
            return {**log_state, "logprobs": bool(request.args.logprobs)}

        return wrapper

    def before_step(server: Any, batch_gen: Any, active: Any, *_: Any) -> None:
        core.note_rows(server, batch_gen, active)

    patcher.replace_method(SERVER, "ResponseGenerator.generate", generate)
    patcher.replace_method(SERVER, "ResponseGenerator._log_prefill_started", started)
    patcher.precede(SERVER, "ResponseGenerator._step", before_step)


CHANGE = UndraftedRequests()
