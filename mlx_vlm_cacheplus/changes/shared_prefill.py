"""Requests that arrive together read what they share once."""

from __future__ import annotations

import functools
from typing import Any

from ..change import Change, Target

AR = "mlx_vlm.generate.ar"
COORDINATOR = "mlx_vlm.apc_coordinator"
SERVER = "mlx_vlm.server.generation"


class SharedPrefill(Change):
    name = "shared-prefill"
    summary = "Requests that arrive together with the same cold prefix read it once"
    targets = (
        Target(AR, "BatchGenerator.next"),
        Target(COORDINATOR, "APCCoordinator.checkpoint_lengths"),
        Target(SERVER, "ResponseGenerator._collect_pending_requests"),
        Target(SERVER, "ResponseGenerator._step"),
    )
    why = (
        "Agents that start together send one system text and the same tools. The cache holds none of it yet, so each of "
        "them reads it, and each holds its embeddings meanwhile."
    )
    upstream = "related: https://github.com/Blaizzy/mlx-vlm/issues/2206"
    remove_when = "a prefix that is being read is read for whoever waits for it"
    requires = ("segment-tree",)
    marks = ("mlx_vlm.shared_prefixes:best_leader",)

    def apply(self, patcher: Any) -> None:
        from ..core import shared_prefill as core
        from ..core.shared_prefixes import add_shared_stops

        def lengths(original: Any) -> Any:
            def wrapper(self: Any, token_ids: Any, media_token_ids: Any) -> Any:
                stops = original(self, token_ids, media_token_ids)
                return add_shared_stops(self, token_ids, stops)

            return wrapper

        def collect(original: Any) -> Any:
            def wrapper(self: Any, **options: Any) -> Any:
                if "capacity" not in options:  # the loop of diffusion models
                    return original(self, **options)
                return core.admit(self, functools.partial(original, self), **options)

            return wrapper

        patcher.surround(AR, "BatchGenerator.next", core.rows_that_share_nothing)
        patcher.replace_method(
            COORDINATOR, "APCCoordinator.checkpoint_lengths", lengths
        )
        patcher.replace_method(
            SERVER, "ResponseGenerator._collect_pending_requests", collect
        )
        patcher.precede(
            SERVER,
            "ResponseGenerator._step",
            lambda server, batch_gen, active, *_: core.note_rows_at_work(
                server, batch_gen, active
            ),
        )


CHANGE = SharedPrefill()
