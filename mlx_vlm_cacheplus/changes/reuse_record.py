"""Every request leaves a record of what was restored, read, written and kept. Plumbing of the plugin: no patch."""

from __future__ import annotations

from ..change import Change, Target
from ..patching import ChangePatcher

AR = "mlx_vlm.generate.ar"
GENERATION = "mlx_vlm.server.generation"
APP = "mlx_vlm.server.app"


class ReuseRecord(Change):
    name = "reuse-record"
    summary = "a reuse record a request: one log line, GET /v1/cacheplus/report, and the totals"
    targets = (
        Target(GENERATION, "ServerMetricsStore.begin_request"),
        Target(GENERATION, "ResponseGenerator.generate"),
        Target(GENERATION, "ResponseGenerator._log_prefill_started"),
        Target(GENERATION, "ResponseGenerator._gpu_embed"),
        Target(GENERATION, "ResponseGenerator._make_logits_processors"),
        Target(GENERATION, "ResponseGenerator._cancel"),
        Target(GENERATION, "_notify_queues"),
        Target(AR, "BatchGenerator.insert"),
        Target(AR, "BatchGenerator.remove"),
        Target(AR, "BatchGenerator._apc_pick_for"),
        Target(AR, "PromptProcessingBatch.__init__"),
        Target(AR, "PromptProcessingBatch.generate"),
        Target(AR, "GenerationBatch._step"),
        Target(AR, "GenerationBatch.filter"),
        Target(AR, "SpeculativeGenerationBatch.next"),
        Target(APP, "app"),
    )
    why = (
        "Stock reports cached tokens in the usage of a reply, and counters of the whole server; nothing says what of one "
        "request was read again although the server had read or written it before, or why."
    )
    upstream = "none: it observes the changes, and reports on them"
    remove_when = "upstream reports new, re-read and committed tokens a request"
    has_patch = False

    def too_late(self) -> str:
        return ""  # a route can be added at any time

    def apply(self, patcher: ChangePatcher) -> None:
        import importlib

        from ..plugins import publish_record
        from ..reports import endpoint
        from ..reports.ledger import Ledger
        from ..reports.seams import Seams
        from ..reports.tracker import Tracker

        tracker = Tracker(Ledger(publish_record))
        seams = Seams(tracker)
        patcher.wrap(
            GENERATION, "ServerMetricsStore.begin_request", seams.begin_request
        )
        patcher.wrap(GENERATION, "ResponseGenerator.generate", seams.generate)
        patcher.wrap(
            GENERATION, "ResponseGenerator._log_prefill_started", seams.prefill_started
        )
        for step in ("_gpu_embed", "_make_logits_processors"):
            patcher.wrap(GENERATION, f"ResponseGenerator.{step}", seams.prepare)
        patcher.wrap(GENERATION, "ResponseGenerator._cancel", seams.cancel)
        patcher.wrap(GENERATION, "_notify_queues", seams.notify_queues)
        patcher.wrap(AR, "BatchGenerator.insert", seams.insert)
        patcher.wrap(AR, "BatchGenerator.remove", seams.remove)
        patcher.wrap(AR, "BatchGenerator._apc_pick_for", seams.look_up)
        patcher.wrap(AR, "PromptProcessingBatch.__init__", seams.open_prompt_batch)
        patcher.wrap(AR, "PromptProcessingBatch.generate", seams.finish_prompt_batch)
        patcher.replace_method(AR, "GenerationBatch._step", seams.step)
        patcher.wrap(AR, "GenerationBatch.filter", seams.filter)
        patcher.replace_method(
            AR, "SpeculativeGenerationBatch.next", seams.speculative_next
        )
        server = importlib.import_module(APP)
        route = endpoint.make_route(tracker, server)
        patcher.set_within(
            APP, "app", "router.routes", [*server.app.router.routes, route]
        )


CHANGE = ReuseRecord()
