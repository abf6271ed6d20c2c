"""The wrappers around stock's seams: each tells the tracker what passed, and changes nothing.

All but one run a few times a request. The one on a decode step looks up one attribute; only where no ledger is kept
(output-tokens off, no cache) does it note the ids it is handed, which are Python numbers already.
"""

from __future__ import annotations

import contextvars
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from .record import Finish
from .tracker import Tracker

logger = logging.getLogger("mlx_vlm.server.cacheplus")
Result = TypeVar("Result")

# The endpoint that the current task serves; `asyncio.to_thread` carries it to the thread that queues the request.
_endpoint: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "cacheplus_endpoint", default=None
)
ENDPOINT = "_cacheplus_endpoint"
ROW_FAILED = "the row failed; the server's log says why"


class Seams:
    """One method a seam, with the signature of patching.wrap or of a factory for replace_method."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    # Threads of requests.

    def begin_request(
        self, wrapped: Callable, store: Any, args: tuple, kwargs: dict
    ) -> Any:
        """ServerMetricsStore.begin_request: the endpoint's name."""
        _endpoint.set(kwargs.get("endpoint"))
        return wrapped(*args, **kwargs)

    def generate(
        self, wrapped: Callable, generator: Any, args: tuple, kwargs: dict
    ) -> Any:
        """ResponseGenerator.generate: the endpoint goes along with the request's arguments."""
        arguments = kwargs.get("args", args[3] if len(args) > 3 else None)
        if arguments is not None:
            _safely(lambda: setattr(arguments, ENDPOINT, _endpoint.get()))
        return wrapped(*args, **kwargs)

    def cancel(
        self, wrapped: Callable, generator: Any, args: tuple, kwargs: dict
    ) -> Any:
        """ResponseGenerator._cancel: a client has hung up, or its consumer has given up."""
        uid = args[0] if args else kwargs["uid"]
        _safely(lambda: self.tracker.cancel(generator._thread.ident, uid))
        return wrapped(*args, **kwargs)

    # The thread that owns the batch generator.

    def prefill_started(
        self, wrapped: Callable, generator: Any, args: tuple, kwargs: dict
    ) -> Any:
        """ResponseGenerator._log_prefill_started: a queued request is taken up."""
        result = wrapped(*args, **kwargs)
        request = args[0] if args else kwargs.get("request")
        if kwargs.get("backend") != "diffusion":
            endpoint = getattr(getattr(request, "args", None), ENDPOINT, None)
            model = str(getattr(generator, "model_path", ""))
            manager = getattr(generator, "apc_manager", None)
            _safely(lambda: self.tracker.begin(request, model, endpoint, manager))
        return result

    def prepare(
        self, wrapped: Callable, generator: Any, args: tuple, kwargs: dict
    ) -> Any:
        """ResponseGenerator._gpu_embed and _make_logits_processors: a request that fails before it is a row.

        With row-errors, an embedding's error comes out later, where the ids are read.
        """
        try:
            result = wrapped(*args, **kwargs)
        except Exception as problem:
            text = _describe(problem)
            _safely(lambda: self.tracker.end_waiting("error", text))
            raise
        if isinstance(result, tuple) and not hasattr(result[0], "ndim"):
            error = getattr(result[0], "_error", None)
            text = _describe(error) if error else ""
            _safely(lambda: self.tracker.end_waiting("error", text))
        return result

    def insert(
        self, wrapped: Callable, batch_generator: Any, args: tuple, kwargs: dict
    ) -> Any:
        """BatchGenerator.insert: the request's ids and uid."""
        try:
            uids = wrapped(*args, **kwargs)
        except Exception as error:
            text = _describe(error)
            _safely(lambda: self.tracker.end_waiting("error", text))
            raise
        prompts = args[0] if args else kwargs.get("prompts", ())
        if len(uids) == len(prompts) == 1:
            _safely(lambda: self.tracker.insert(uids[0], prompts[0], batch_generator))
        return uids

    def look_up(
        self, wrapped: Callable, batch_generator: Any, args: tuple, kwargs: dict
    ) -> Any:
        """BatchGenerator._apc_pick_for: where a prefix comes from."""
        uid = (args[0] if args else kwargs["sequence"])[0]
        before = _safely(lambda: self.tracker.lookup_counts(uid))
        hit = wrapped(*args, **kwargs)
        _safely(lambda: self.tracker.looked_up(uid, before))
        return hit

    def open_prompt_batch(
        self, wrapped: Callable, prompt_batch: Any, args: tuple, kwargs: dict
    ) -> None:
        """PromptProcessingBatch.__init__: restored lengths."""
        wrapped(*args, **kwargs)
        _safely(lambda: self.tracker.prefill(prompt_batch))

    def finish_prompt_batch(
        self, wrapped: Callable, prompt_batch: Any, args: tuple, kwargs: dict
    ) -> Any:
        """PromptProcessingBatch.generate: prompts are read, ledgers are open."""
        batch = wrapped(*args, **kwargs)
        _safely(lambda: self.tracker.decode(batch.uids, _ledgers(batch)))
        return batch

    def step(self, original: Callable[[Any], tuple]) -> Callable[[Any], tuple]:
        """GenerationBatch._step, for rows without a ledger."""

        def _step(batch: Any) -> tuple:
            result = original(batch)
            if not batch.__dict__.get("output_rows"):
                self.tracker.feed(batch.uids, result[0])
            return result

        return _step

    def filter(self, wrapped: Callable, batch: Any, args: tuple, kwargs: dict) -> Any:
        """GenerationBatch.filter: rows that end, after output-tokens has committed them."""
        keep = args[0] if args else kwargs["keep"]
        if len(keep) >= len(batch.uids):
            return wrapped(*args, **kwargs)
        ending = _safely(lambda: self._endings(batch, keep))
        result = wrapped(*args, **kwargs)
        _safely(lambda: self._end(ending or ()))
        return result

    def _end(self, ending: Iterable[tuple[int, Finish, int]]) -> None:
        for uid, finish, generated in ending:
            self.tracker.end_row(uid, finish, generated=generated)

    def _endings(
        self, batch: Any, keep: Sequence[int]
    ) -> list[tuple[int, Finish, int]]:
        staying = set(keep)
        flights = self.tracker.flights
        found: list[tuple[int, Finish, int]] = []
        for index, uid in enumerate(batch.uids):
            flight = flights.get(uid)
            if index in staying or flight is None or uid == self.tracker.leaving:
                continue
            token, generated = flight.last_token(), int(batch._num_tokens[index])
            finish: Finish = "error"
            if token is not None and batch.stop_criteria(token):
                finish = "stop"
            elif generated >= batch.max_tokens[index]:
                finish = "length"
            found.append((uid, finish, generated))
        return found

    def speculative_next(
        self, original: Callable[[Any], list]
    ) -> Callable[[Any], list]:
        """SpeculativeGenerationBatch.next: once a round, for rows that a draft model helps to write."""

        def next(batch: Any) -> list:
            responses = original(batch)
            _safely(lambda: self._round(batch, responses))
            return responses

        return next

    def _round(self, batch: Any, responses: list) -> None:
        self.tracker.draft(getattr(batch, "draft_figures", {}))
        self.tracker.emit((r.uid for r in responses), (r.token for r in responses))
        for response in responses:
            if response.finish_reason is not None:
                self.tracker.end_row(response.uid, response.finish_reason)

    def remove(
        self, wrapped: Callable, batch_generator: Any, args: tuple, kwargs: dict
    ) -> Any:
        """BatchGenerator.remove: a cancelled request in the queue, in prefill or decoding; or a row that has failed.

        A cancelled row that is not found is tried again by stock. A failed one may have left its batch already.
        """
        uid = args[0] if args else kwargs["uid"]
        _safely(lambda: self.tracker.leave(uid))
        try:
            removed = wrapped(*args, **kwargs)
        finally:
            _safely(lambda: self.tracker.leave(None))
        if self.tracker.is_cancelled(uid):
            if removed:
                _safely(lambda: self.tracker.end_row(uid, "cancel"))
        else:
            _safely(lambda: self.tracker.end_row(uid, "error", error=ROW_FAILED))
        return removed

    def notify_queues(
        self, wrapped: Callable, instance: Any, args: tuple, kwargs: dict
    ) -> Any:
        """generation._notify_queues: an error that ends every request in flight."""
        queues = list(args[0] if args else kwargs["queues"])
        error = next(
            (_describe(item) for item in args[1:] if isinstance(item, BaseException)),
            "",
        )
        _safely(lambda: self.tracker.end_queues(queues, error))
        return wrapped(queues, *args[1:])


def _ledgers(batch: Any) -> dict[int, Any]:
    """Of output-tokens, or of drafted-replies; empty where they are off."""
    drafted = getattr(batch, "drafted", None)
    rows = getattr(batch, "output_rows", None) if drafted is None else drafted.rows
    return rows or {}


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _safely(step: Callable[[], Result]) -> Result | None:
    """A record is never the reason that a request fails."""
    try:
        return step()
    except Exception:
        _warn_once()
        logger.debug("cacheplus: a reuse record is incomplete", exc_info=True)
        return None


@functools.cache
def _warn_once() -> None:
    logger.warning(
        "cacheplus: a reuse record could not be kept; the requests are not affected (details at DEBUG)"
    )
