"""An error in one row fails that row."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

from ..change import Change, Target

AR = "mlx_vlm.generate.ar"
SERVER = "mlx_vlm.server.generation"
APP = "mlx_vlm.server.app"

logger = logging.getLogger("mlx_vlm.server")


class FailedInputs:
    """Stands for a row's input ids after its embedding raised.

    The server reads the ids where it reports an error to the request alone; that is
    where the exception comes out.
    """

    def __init__(self, error: Exception):
        self._error = error

    def squeeze(self, *_: Any) -> Any:
        raise self._error


class RowErrors(Change):
    name = "row-errors"
    summary = "An error in one row fails that row, not every request in flight"
    targets = (
        Target(AR, "GenerationBatch.next"),
        Target(AR, "GenerationBatch.extend"),
        Target(AR, "SpeculativeGenerationBatch.next"),
        Target(AR, "BatchGenerator.insert"),
        Target(AR, "BatchGenerator.next"),
        Target(SERVER, "ResponseGenerator._step"),
        Target(SERVER, "ResponseGenerator._gpu_embed"),
        Target(SERVER, "ResponseGenerator._drain_cancellations"),
        Target(SERVER, "ResponseGenerator._stream_text"),
        Target(SERVER, "_TokenIterator.__init__"),
        Target(APP, "app"),
    )
    why = (
        "The generation thread answers any exception by failing every request in flight and dropping their caches: one "
        "bad picture, grammar or prompt ends the replies of all agents on the server."
    )
    upstream = "no issue yet; seen with https://github.com/Blaizzy/mlx-vlm/issues/2033"
    remove_when = (
        "the server's generation loop reports an exception to the rows that caused it"
    )
    marks = (
        "mlx_vlm.generate.row_errors:next_isolated",
        "mlx_vlm.server.hang_ups:own_cancels",
    )

    def apply(self, patcher: Any) -> None:
        from ..core import row_errors as core

        def decode(original: Any) -> Any:
            return lambda self: core.decode_recorded(
                self, functools.partial(original, self)
            )

        def extend(original: Any) -> Any:
            return lambda self, other: core.extend_recorded(
                self, functools.partial(original, self, other)
            )

        def advance(original: Any) -> Any:
            return lambda self, **kwargs: core.next_isolated(
                self, functools.partial(original, self, **kwargs)
            )

        def insert(original: Any) -> Any:
            def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
                uids = original(self, *args, **kwargs)
                core.guard_queued(self, uids)
                return uids

            return wrapper

        patcher.replace_method(AR, "BatchGenerator.insert", insert)
        patcher.replace_method(AR, "GenerationBatch.next", decode)
        patcher.replace_method(AR, "SpeculativeGenerationBatch.next", decode)
        patcher.replace_method(AR, "GenerationBatch.extend", extend)
        patcher.replace_method(AR, "BatchGenerator.next", advance)
        _apply_to_server(patcher, core)
        _apply_to_hang_ups(patcher)


def _apply_to_server(patcher: Any, core: Any) -> None:
    def step(original: Any) -> Any:
        def wrapper(
            self: Any, batch_gen: Any, active: Any, gen_kwargs: Any = None
        ) -> None:
            inner = functools.partial(original, self, batch_gen, active, gen_kwargs)
            core.step_and_fail_rows(self, batch_gen, active, inner)

        return wrapper

    def embed(original: Any) -> Any:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(self, *args, **kwargs)
            except Exception as error:
                logger.exception("A request could not be embedded")
                return FailedInputs(error), {}

        return wrapper

    def text(original: Any) -> Any:
        def wrapper(self: Any, info: Any, *args: Any) -> Any:
            return core.stream_text(
                self, info, functools.partial(original, self, info, *args)
            )

        return wrapper

    patcher.replace_method(SERVER, "ResponseGenerator._step", step)
    patcher.replace_method(SERVER, "ResponseGenerator._gpu_embed", embed)
    patcher.replace_method(SERVER, "ResponseGenerator._stream_text", text)


def _apply_to_hang_ups(patcher: Any) -> None:
    from starlette.middleware import Middleware

    from ..core import hang_ups as core

    def drain(original: Any) -> Any:
        return lambda self: core.own_cancels(self, original(self))

    def iterator(original: Any) -> Any:
        def wrapper(self: Any, rqueue: Any, uid: Any, *args: Any) -> None:
            original(self, rqueue, core.RowUid.of(uid, rqueue), *args)
            core.belongs_to_request(self)

        return wrapper

    patcher.replace_method(SERVER, "ResponseGenerator._drain_cancellations", drain)
    patcher.replace_method(SERVER, "_TokenIterator.__init__", iterator)
    app = importlib.import_module(APP).app
    outermost = Middleware(core.RepliesEndWithTheirRequest)
    patcher.set_within(APP, "app", "user_middleware", [outermost, *app.user_middleware])


CHANGE = RowErrors()
