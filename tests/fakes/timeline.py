"""What the generation thread did, in order, for tests that count who had a turn.

    with Timeline() as line:
        ...                     # requests
    line.events                 # ("queued", uid), ("chunk", uids), ("round", uids), ("token", uid)

It looks at stock's seams only, so that it sees the same on every tree: a round is one verify
step of a speculative batch, a chunk is one forward pass of a prompt.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

Event = tuple[str, Any]


class Timeline:
    """Records while its block runs; see the module's text."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._batch: Any = None
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Timeline:
        ar = importlib.import_module("mlx_vlm.generate.ar")
        rounds = ("mtp", "eagle3", "dflash")
        for name in rounds:
            module = importlib.import_module(f"mlx_vlm.speculative.{name}")
            self._wrap(module, "_record_speculative_round", self._round)
        self._wrap(ar.SpeculativeGenerationBatch, "next", self._turn)
        self._wrap(ar.GenerationBatch, "next", self._step)
        for name in ("prompt_step", "generate"):
            self._wrap(ar.PromptProcessingBatch, name, self._chunk)
        self._wrap(ar.BatchGenerator, "insert", self._queued)
        self._wrap(ar.BatchGenerator, "next", self._emitted)
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()

    # -- what a test asks ---------------------------------------------------
    def between(self, first: Event, last: Event) -> list[Event]:
        """The events between these two."""
        start = self.events.index(first)
        return self.events[start + 1 : self.events.index(last, start)]

    def rounds_of(self, uid: int) -> list[int]:
        """Places of the rounds that a row was in."""
        return [
            place
            for place, (kind, who) in enumerate(self.events)
            if kind == "round" and uid in who
        ]

    def most_between_turns(self, kind: str, uid: int) -> int:
        """The most events of a kind between two rounds of a row."""
        places = self.rounds_of(uid)
        return max(
            sum(event[0] == kind for event in self.events[a + 1 : b])
            for a, b in zip(places, places[1:], strict=False)
        )

    # -- the wrappers -------------------------------------------------------
    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = vars(owner)[name]
        setattr(owner, name, make(original))
        self._undo.append(lambda: setattr(owner, name, original))

    def _turn(self, original: Any) -> Any:
        def turn(batch: Any) -> Any:
            self._batch = batch
            try:
                return original(batch)
            finally:
                self._batch = None

        return turn

    def _round(self, original: Any) -> Any:
        def record(*args: Any) -> None:
            uids = tuple(self._batch.uids)
            # DFlash counts each row of a batch.
            if self.events[-1] != ("round", uids) or len(uids) < 2:
                self.events.append(("round", uids))
            original(*args)

        return record

    def _step(self, original: Any) -> Any:
        def step(batch: Any) -> Any:
            if batch.uids:
                self.events.append(("step", tuple(batch.uids)))
            return original(batch)

        return step

    def _chunk(self, original: Any) -> Any:
        def chunk(batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.events.append(("chunk", tuple(batch.uids)))
            return original(batch, *args, **kwargs)

        return chunk

    def _queued(self, original: Any) -> Any:
        def insert(generator: Any, *args: Any, **kwargs: Any) -> Any:
            uids = original(generator, *args, **kwargs)
            self.events.extend(("queued", uid) for uid in uids)
            return uids

        return insert

    def _emitted(self, original: Any) -> Any:
        def advance(generator: Any, **kwargs: Any) -> Any:
            prompts, responses = original(generator, **kwargs)
            self.events.extend(("token", response.uid) for response in responses)
            return prompts, responses

        return advance
