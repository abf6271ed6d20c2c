"""Each row of a batch is sampled as its own request asks."""

from __future__ import annotations

from typing import Any

from ..change import Change, Target

AR = "mlx_vlm.generate.ar"
SERVER = "mlx_vlm.server.generation"


class RowSamplers(Change):
    name = "row-samplers"
    summary = (
        "Each row is sampled with its own temperature, filters, seed and log-probs"
    )
    targets = (
        Target(AR, "PromptProcessingBatch.generate"),
        Target(AR, "GenerationBatch.next"),
        Target(AR, "GenerationBatch.extend"),
        Target(AR, "GenerationBatch.filter"),
        Target(SERVER, "ResponseGenerator.generate"),
        Target(SERVER, "ResponseGenerator._log_prefill_started"),
        Target(SERVER, "ResponseGenerator._step"),
    )
    why = (
        "The first request's sampler, greedy flag and logprobs setting serve the whole batch: a request with temperature 0 "
        "that joins one with 1.5 is sampled at 1.5, and log-probabilities are those that the first one asked for."
    )
    upstream = "https://github.com/Blaizzy/mlx-vlm/issues/1647, https://github.com/Blaizzy/mlx-vlm/issues/1353"
    remove_when = "GenerationBatch has a sampler for each row"
    # It decides what is drafted, and joins batches with log-probabilities and without.
    requires = ("undrafted-requests",)
    marks = (
        "mlx_vlm.generate.row_samplers:GroupedSampler",
        "mlx_vlm.server.request_sampling:make_sampling",
    )

    def apply(self, patcher: Any) -> None:
        from ..core import row_samplers as core

        def generate(original: Any) -> Any:
            def wrapper(
                self: Any,
                sampler: Any,
                stop_criteria: Any,
                compute_logprobs: bool = True,
                top_logprobs_k: int = 0,
            ) -> Any:
                sampler, compute_logprobs, top_logprobs_k = core.sample_prompt_rows(
                    self, sampler, compute_logprobs, top_logprobs_k
                )
                batch = original(
                    self, sampler, stop_criteria, compute_logprobs, top_logprobs_k
                )
                core.hand_over_sampling(self, batch)
                return batch

            return wrapper

        patcher.replace_method(AR, "PromptProcessingBatch.generate", generate)
        _apply_to_batches(patcher, core)
        _apply_to_server(patcher, core)


def _apply_to_batches(patcher: Any, core: Any) -> None:
    def advance(original: Any) -> Any:
        def wrapper(self: Any) -> Any:
            rows, delivers = core.sampling_of(self), self._next_lps is not None
            responses = original(self)
            if delivers:
                core.hide_unasked(rows, responses)
            return responses

        return wrapper

    def extend(original: Any) -> Any:
        def wrapper(self: Any, other: Any) -> None:
            original(self, other)
            core.join_sampling(self, other)

        return wrapper

    def filter_rows(original: Any) -> Any:
        def wrapper(self: Any, keep: Any) -> None:
            original(self, keep)
            core.settle_sampling(self)

        return wrapper

    patcher.replace_method(AR, "GenerationBatch.next", advance)
    patcher.replace_method(AR, "GenerationBatch.extend", extend)
    patcher.replace_method(AR, "GenerationBatch.filter", filter_rows)


def _apply_to_server(patcher: Any, core: Any) -> None:
    from ..core.request_sampling import make_sampling

    def before_generate(
        server: Any,
        prompt: Any,
        images: Any = None,
        audio: Any = None,
        args: Any = None,
        videos: Any = None,
    ) -> None:
        # On the request's thread, so that bad settings are its own error.
        if args is not None:
            args.sampling = make_sampling(server, args)

    def started(original: Any) -> Any:
        # What this returns, stock keeps with the row.
        def wrapper(self: Any, request: Any, **kwargs: Any) -> dict:
            log_state = original(self, request, **kwargs)
            sampling = getattr(request.args, "sampling", None)
            if sampling is None:
                sampling = make_sampling(self, request.args)
            return {**log_state, "sampling": sampling}

        return wrapper

    def before_step(server: Any, batch_gen: Any, active: Any, *_: Any) -> None:
        core.note_sampling(batch_gen, active)

    patcher.precede(SERVER, "ResponseGenerator.generate", before_generate)
    patcher.replace_method(SERVER, "ResponseGenerator._log_prefill_started", started)
    patcher.precede(SERVER, "ResponseGenerator._step", before_step)


CHANGE = RowSamplers()
