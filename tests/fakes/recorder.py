"""Sees what the server really did: ids in, ids out, tokens forwarded.

The recorder wraps seams of stock's server for the time of the tests.  Every
request of the fixture carries a key in its body (endpoints accept unknown
fields); the recorder follows it from the request to the batch row:

    _build_gen_args        request body -> GenerationArguments     (key -> args)
    _make_logits_processors  args and prompt ids, on the GPU thread (key -> prompt)
    BatchGenerator.insert  prompt -> uid                            (uid -> key)
    PromptProcessingBatch  rows of the language model's prefill calls
    _stream_text           every emitted token of a row
    _TokenIterator         which token of a row its handler waits for

It also scripts replies (the *puppet*: a logits processor that leaves one token)
and holds the GPU thread at a chosen token, so that requests meet where a test
wants them to.  All waits are bounded.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

KEY = "cacheplus_test_key"
HOLD_SECONDS = 10.0


@dataclass
class Record:
    """One request as the server saw it.

    hold_at: the generation thread stands at this token, once, until ``release()``.
    asked: how many tokens the request's handler has asked for.
    stuck: what the server did while the request waited too long (see tests.fakes.stuck).
    """

    key: str
    script: list[int] | None = None
    then: str = "stop"
    prompt_ids: list[int] = field(default_factory=list)
    raw_inputs: dict[str, Any] = field(default_factory=dict)
    uid: int | None = None
    ids: list[int] = field(default_factory=list)
    prefilled: int = 0
    forwards: list[tuple[int, int, int]] = field(default_factory=list)
    finish_reason: str | None = None
    hold_at: int | None = None
    held: threading.Event = field(default_factory=threading.Event)
    release: Callable[[], bool] | None = None
    asked: int = 0
    stuck: str | None = None


class Puppet:
    """A logits processor that makes the row say ``script``, then ``then``."""

    def __init__(self, script: list[int], then: str, eos: int):
        self.script = list(script)
        self.then = then
        self.eos = eos
        self.said = 0

    def __call__(self, tokens: Any, logits: Any) -> Any:
        import mlx.core as mx

        if self.said < len(self.script):
            token = self.script[self.said]
        elif self.then == "free":
            return logits
        else:
            token = self.eos
        self.said += 1
        hit = mx.arange(logits.shape[-1])[None] == token
        return mx.where(hit, mx.zeros_like(logits), mx.full(logits.shape, -1e9))


class Recorder:
    """Install once a process with ``install()``; ``uninstall()`` undoes it."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.by_uid: dict[int, Record] = {}
        self.by_request: dict[str, Record] = {}
        self.decode_calls: list[tuple[int, int]] = []
        self.active: dict[int, Any] | None = None
        self.batch: Any = None
        self.ticks = 0
        self.gate = 0
        self.gate_reached = threading.Event()
        self._row = threading.local()
        self._undo: list[Callable[[], None]] = []
        self._models: set = set()

    # -- what a test asks ---------------------------------------------------
    def expect(self, key: str, **fields: Any) -> Record:
        """Announce a request before it is sent."""
        record = self.records[key] = Record(key, **fields)
        return record

    def admit_together(self, requests: int) -> None:
        """Hold admission until so many requests are queued (or HOLD_SECONDS are over).

        Returns once the generation thread stands at the gate, so that no request
        slips in before it.
        """
        self.gate_reached.clear()
        self.gate = requests
        self.gate_reached.wait(HOLD_SECONDS)

    def forget(self) -> None:
        """Drop everything recorded so far."""
        self.records.clear()
        self.by_uid.clear()
        self.by_request.clear()
        self.decode_calls.clear()

    # -- wrapping -----------------------------------------------------------
    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        # What the owner itself holds: of a descriptor, getattr gives another object.
        own, held = name in vars(owner), vars(owner).get(name)
        wrapper = make(original)
        setattr(owner, name, wrapper)

        def undo() -> None:
            if own:
                setattr(owner, name, held)
            else:
                delattr(owner, name)

        self._undo.append(undo)

    def install(self) -> None:
        """Wrap the seams of the installed stock."""
        normalization = importlib.import_module("mlx_vlm.server.request_normalization")
        generation = importlib.import_module("mlx_vlm.server.generation")
        ar = importlib.import_module("mlx_vlm.generate.ar")
        self._wrap(normalization, "_build_gen_args", self._build_gen_args)
        generator = generation.ResponseGenerator
        self._wrap(generator, "_gpu_embed", self._gpu_embed)
        self._wrap(generator, "_make_logits_processors", self._processors)
        self._wrap(generator, "_log_prefill_started", self._started)
        if hasattr(generator, "_apply_cancellations"):
            self._wrap(generator, "_apply_cancellations", self._cancellations)
        else:  # before 0.7.8 the loop does it itself
            self._wrap(generator, "_drain_cancellations", self._drained)
        self._wrap(generator, "_stream_text", self._stream_text)
        self._wrap(generator, "_collect_pending_requests", self._collect)
        self._wrap(generation._TokenIterator, "__next__", self._next_token)
        self._wrap(ar.BatchGenerator, "insert", self._insert)
        for name in ("prompt_step", "generate"):
            self._wrap(ar.PromptProcessingBatch, name, self._prefill)

    def uninstall(self) -> None:
        """Put every seam back, newest first."""
        while self._undo:
            self._undo.pop()()
        self._models.clear()

    def watch(self, language_model: Any) -> None:
        """Count the forward calls of this model's class."""
        cls = type(language_model)
        if cls not in self._models:
            self._models.add(cls)
            self._wrap(cls, "__call__", self._forward)

    # -- the wrappers -------------------------------------------------------
    def _build_gen_args(self, original: Any) -> Any:
        def build_gen_args(request: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(request, *args, **kwargs)
            out._test_key = getattr(request, KEY, None)
            return out

        return build_gen_args

    def _started(self, original: Any) -> Any:
        def log_prefill_started(generator: Any, request: Any, **kwargs: Any) -> Any:
            record = self.records.get(getattr(request.args, "_test_key", None) or "")
            if record is not None:
                # The queue is kept alive: the request id is its address.
                record.raw_inputs = {**request.raw_inputs, "_rqueue": request.rqueue}
                self.by_request[f"{id(request.rqueue):x}"] = record
            return original(generator, request, **kwargs)

        return log_prefill_started

    def _gpu_embed(self, original: Any) -> Any:
        def gpu_embed(generator: Any, *args: Any, **kwargs: Any) -> Any:
            self.watch(generator.model.language_model)
            return original(generator, *args, **kwargs)

        return gpu_embed

    def _processors(self, original: Any) -> Any:
        def make_logits_processors(
            generator: Any, args: Any, input_ids: Any = None
        ) -> Any:
            out = original(generator, args, input_ids)
            record = self.records.get(getattr(args, "_test_key", None) or "")
            self._row.pending = record
            if record is not None:
                record.prompt_ids = input_ids.reshape(-1).tolist()
                if record.script is not None:
                    eos = generator.tokenizer.eos_token_id
                    out = [*out, Puppet(record.script, record.then, eos)]
            return out

        return make_logits_processors

    def _insert(self, original: Any) -> Any:
        def insert(batch: Any, *args: Any, **kwargs: Any) -> Any:
            uids = original(batch, *args, **kwargs)
            record = getattr(self._row, "pending", None)
            self._row.pending = None
            if record is not None and len(uids) == 1:
                record.uid = uids[0]
                self.by_uid[uids[0]] = record
            elif len(uids) == 1:
                self.by_uid.pop(uids[0], None)
            return uids

        return insert

    def _prefill(self, original: Any) -> Any:
        def prefill(batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._row.batch = batch
            try:
                return original(batch, *args, **kwargs)
            finally:
                self._row.batch = None

        return prefill

    def _forward(self, original: Any) -> Any:
        def call(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            rows, columns = inputs.shape[:2]
            batch = getattr(self._row, "batch", None)
            if batch is None:
                self.decode_calls.append((rows, columns))
            else:
                self._note_prefill(batch, rows, columns)
            return original(model, inputs, *args, **kwargs)

        return call

    def _note_prefill(self, batch: Any, rows: int, columns: int) -> None:
        start = batch._processed_prompt_columns
        for row, uid in enumerate(batch.uids):
            record = self.by_uid.get(uid)
            if record is None:
                continue
            length = batch._suffix_lens[row]
            pad = 0
            if batch._right_pad_per_row is None:
                pad = batch._left_padding_per_row[row]
            done = min(length, max(0, start - pad))
            real = min(length, max(0, start + columns - pad)) - done
            record.prefilled += real
            record.forwards.append((rows, columns, real))

    def _stream_text(self, original: Any) -> Any:
        def stream_text(
            generator: Any, info: Any, token: int, finish_reason: Any
        ) -> Any:
            record = self.by_request.get(str(info.get("request_id")))
            if record is not None:
                record.ids.append(int(token))
                record.finish_reason = finish_reason
                if record.hold_at == len(record.ids):
                    record.held.set()
                    _wait(record.release, HOLD_SECONDS)
            return original(generator, info, token, finish_reason)

        return stream_text

    def _next_token(self, original: Any) -> Any:
        def next_token(reply: Any) -> Any:
            record = self.by_request.get(f"{id(reply._rqueue):x}")
            if record is not None:
                record.asked += 1
            return original(reply)

        return next_token

    def _collect(self, original: Any) -> Any:
        def collect_pending_requests(generator: Any, *args: Any, **kwargs: Any) -> Any:
            deadline = time.monotonic() + HOLD_SECONDS
            while self.gate and time.monotonic() < deadline:
                self.gate_reached.set()
                if generator.requests.qsize() >= self.gate:
                    break
                time.sleep(0.002)
            self.gate = 0
            return original(generator, *args, **kwargs)

        return collect_pending_requests

    def _cancellations(self, original: Any) -> Any:
        def apply_cancellations(generator: Any, batch: Any, active: Any) -> Any:
            out = original(generator, batch, active)
            self._note_round(batch, active)
            return out

        return apply_cancellations

    def _drained(self, original: Any) -> Any:
        def drain_cancellations(generator: Any) -> Any:
            loop = sys._getframe(1).f_locals
            if "batch_gen" in loop and "active" in loop:
                self._note_round(loop["batch_gen"], loop["active"])
            return original(generator)

        return drain_cancellations

    def _note_round(self, batch: Any, active: Any) -> None:
        self.active = active
        self.batch = None if batch is None else weakref.ref(batch)
        self.ticks += 1


def _wait(condition: Callable[[], bool] | None, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while condition is not None and not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
