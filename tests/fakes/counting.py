"""Counts what the server does around the model in a decode step: array operations and host syncs.

``counted(server)`` yields a list that gets one ``Step`` for each step of the generation
thread.  What the language model itself does is left out, and so are steps that prefill.
"""

from __future__ import annotations

import importlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# Calls after which the host has waited for the device.
SYNCS = ("eval", "synchronize")
SYNC_METHODS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")
# Neither: they hand work over, free memory, or only name a place.
FREE = {"async_eval", "clear_cache", "default_stream", "default_device", "stream"}
FREE |= {"get_peak_memory", "get_active_memory", "get_cache_memory", "new_stream"}
FREE_METHODS = {"__init__", "__new__", "__repr__", "__len__", "__hash__", "__str__"}
FREE_METHODS |= {"__init_subclass__", "__class__", "__getattribute__", "__setattr__"}
FREE_METHODS |= {"__delattr__", "__dir__", "__subclasshook__", "__sizeof__", "__doc__"}
FREE_METHODS |= {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"}
FREE_METHODS |= {"__format__"}


@dataclass
class Step:
    """One decode step: rows in the batch, and the names of what was called, counted."""

    rows: int = 0
    syncs: Counter = field(default_factory=Counter)
    operations: Counter = field(default_factory=Counter)


class _Counting(threading.local):
    step: Step | None = None
    inside_model: int = 0


@contextmanager
def counted(server: Any) -> Iterator[list[Step]]:
    """Count every decode step of the server while the block runs."""
    import mlx.core as mx

    generation = importlib.import_module("mlx_vlm.server.generation")
    ar = importlib.import_module("mlx_vlm.generate.ar")
    state = _Counting()
    steps: list[Step] = []
    undo: list[Callable[[], None]] = []

    def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = vars(owner).get(name, getattr(owner, name))
        inherited = isinstance(owner, type) and name not in vars(owner)
        setattr(owner, name, make(original))
        restore = (owner, name, original)
        undo.append(
            (lambda: delattr(owner, name)) if inherited else (lambda: setattr(*restore))
        )

    for name in dir(mx):
        function = getattr(mx, name)
        if callable(function) and not isinstance(function, type) and name not in FREE:
            wrap(mx, name, _counter(state, name, name in SYNCS))
    for name in dir(mx.array):
        if name not in FREE_METHODS and callable(getattr(mx.array, name)):
            wrap(mx.array, name, _counter(state, name, name in SYNC_METHODS))
    wrap(type(server.language_model), "__call__", _outside(state))
    wrap(generation.ResponseGenerator, "_step", _recorded(state, steps))
    for name in ("prompt_step", "generate"):
        wrap(ar.PromptProcessingBatch, name, _dropped(state))
    try:
        yield steps
    finally:
        while undo:
            undo.pop()()


def _counter(state: _Counting, name: str, is_sync: bool) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            step = state.step
            if step is not None and not state.inside_model:
                (step.syncs if is_sync else step.operations)[name] += 1
            return original(*args, **kwargs)

        return call

    return make


def _outside(state: _Counting) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            state.inside_model += 1
            try:
                return original(*args, **kwargs)
            finally:
                state.inside_model -= 1

        return call

    return make


def _recorded(state: _Counting, steps: list[Step]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def step(generator: Any, batch: Any, active: Any, *args: Any) -> Any:
            state.step = mine = Step(rows=len(batch._generation_batch))
            try:
                return original(generator, batch, active, *args)
            finally:
                if state.step is mine and mine.rows:
                    steps.append(mine)
                state.step = None

        return step

    return make


def _dropped(state: _Counting) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            state.step = None
            return original(*args, **kwargs)

        return call

    return make
