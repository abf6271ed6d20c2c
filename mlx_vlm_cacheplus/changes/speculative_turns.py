"""Speculative batches take turns; nobody waits for somebody else's reply."""

from __future__ import annotations

import functools
from typing import Any

from ..change import Change, Target

AR = "mlx_vlm.generate.ar"
SERVER = "mlx_vlm.server.generation"


class SpeculativeTurns(Change):
    name = "speculative-turns"
    summary = "With a draft model loaded, a request that arrives during another's reply is admitted at once"
    targets = (
        Target(AR, "BatchGenerator.__init__"),
        Target(AR, "BatchGenerator.next"),
        Target(AR, "BatchGenerator._extend_generation_batch"),
        Target(AR, "BatchGenerator.remove"),
        Target(AR, "BatchGenerator.has_work"),
        Target(AR, "PromptProcessingBatch.__init__"),
        Target(AR, "SpeculativeGenerationBatch.next"),
        Target(SERVER, "ResponseGenerator._step"),
        Target(SERVER, "speculative_stats_since"),
    )
    why = (
        "While a speculative batch runs nobody is admitted, since SpeculativeGenerationBatch.extend cannot take a row: a "
        "request for 16 tokens waits for the end of a reply of 800."
    )
    upstream = "related: https://github.com/Blaizzy/mlx-vlm/issues/1471, https://github.com/Blaizzy/mlx-vlm/issues/2033"
    remove_when = "BatchGenerator admits requests while a speculative batch runs"
    requires = ("row-positions", "drafted-replies", "draft-priming")
    marks = ("mlx_vlm.generate.speculative_turns:take_turns",)

    def apply(self, patcher: Any) -> None:
        from ..core import speculative_turns as core

        def init(original: Any) -> Any:
            def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
                original(self, *args, **kwargs)
                core.open_turns(self)

            return wrapper

        def advance(original: Any) -> Any:
            return lambda self, **kwargs: core.take_turns(
                self, functools.partial(original, self, **kwargs)
            )

        def extend(original: Any) -> Any:
            def wrapper(self: Any, gen_batch: Any) -> None:
                if not core.seat_beside(self, gen_batch):
                    original(self, gen_batch)

            return wrapper

        def remove(original: Any) -> Any:
            return lambda self, uid: core.remove_row(self, uid) or original(self, uid)

        def has_work(original: Any) -> Any:
            return lambda self: bool(self.speculative_batches) or original(self)

        patcher.replace_method(AR, "BatchGenerator.__init__", init)
        patcher.replace_method(AR, "BatchGenerator.next", advance)
        patcher.replace_method(AR, "BatchGenerator._extend_generation_batch", extend)
        patcher.replace_method(AR, "BatchGenerator.remove", remove)
        patcher.replace_method(AR, "BatchGenerator.has_work", has_work)
        _apply_to_batches(patcher, core)
        _apply_to_server(patcher, core)


def _apply_to_batches(patcher: Any, core: Any) -> None:
    def init(original: Any) -> Any:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            core.own_drafter(self)
            core.chunk_primed(self, kwargs.get("prefill_step_size"))

        return wrapper

    def turn(original: Any) -> Any:
        return lambda self: core.whole_round(self, functools.partial(original, self))

    patcher.replace_method(AR, "PromptProcessingBatch.__init__", init)
    patcher.replace_method(AR, "SpeculativeGenerationBatch.next", turn)


def _apply_to_server(patcher: Any, core: Any) -> None:
    def before_step(server: Any, batch_gen: Any, active: Any, *_: Any) -> None:
        batch_gen.requests_in_flight = active

    patcher.precede(SERVER, "ResponseGenerator._step", before_step)
    patcher.replace_method(
        SERVER, "speculative_stats_since", lambda original: core.drafts_since
    )


CHANGE = SpeculativeTurns()
