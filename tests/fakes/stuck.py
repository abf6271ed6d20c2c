"""What a server is doing while a request waits too long for its answer.

    watchdog = Watchdog(host, after=45)
    with watchdog.waiting(record):
        ...                              # send, and wait for the answer
    record.stuck                         # None, or the report: looked at after 45 s

The client gives up a little later.  That cancels the request, so what kept it waiting has to
be looked at before.  The report says: which requests wait, whether the generation thread
and the event loop turn, the rows of every stage, and the stack of each thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

LOOK_SECONDS = 0.5
# Between two looks at what must move: until the generation thread has turned so often, or
# for so long.
STEPS = 3
PAUSE_SECONDS = 5.0
LOOP_SECONDS = 5.0


class Start(NamedTuple):
    """When a request was sent: the clock in seconds, and the generation thread's steps."""

    at: float
    ticks: int


class Watchdog:
    """Writes a report about the server for each request that waits for too long.

    Args:
        host: the in-process server.
        after: seconds that a request may wait before it is looked at.
    """

    def __init__(self, host: Any, after: float):
        self._host = host
        self._after = after
        self._since: dict[str, Start] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def waiting(self, record: Any) -> Iterator[None]:
        """A request waits for its answer while this is open."""
        with self._lock:
            ticks = self._host.recorder.ticks
            self._since[record.key] = Start(time.monotonic(), ticks)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._since.pop(record.key, None)

    def _look(self) -> None:
        records = self._host.recorder.records
        while True:
            time.sleep(LOOK_SECONDS)
            late = self._late()
            new = [k for k in late if k in records and records[k].stuck is None]
            if new:
                report = describe(self._host, late)
                for key in new:
                    records[key].stuck = report

    def _late(self) -> dict[str, Start]:
        """The requests that wait for too long, by key."""
        latest = time.monotonic() - self._after
        with self._lock:
            return {k: start for k, start in self._since.items() if start.at < latest}


def describe(host: Any, late: dict[str, Start]) -> str:
    """Say what the server does; waits up to PAUSE_SECONDS to see what moves.

    Args:
        host: the in-process server.
        late: when they were sent, by key of record.
    """
    recorder = host.recorder
    generator = host.runtime.response_generator
    began, ticks, before = time.monotonic(), recorder.ticks, _progress(recorder, late)
    while recorder.ticks < ticks + STEPS and time.monotonic() < began + PAUSE_SECONDS:
        time.sleep(0.01)
    pause, steps = time.monotonic() - began, recorder.ticks - ticks
    after = _progress(recorder, late)
    parts = {
        "requests": lambda: _requests(recorder, late, before, after),
        "steps of the generation thread": lambda: f"{steps} in {pause:.1f} s",
        "generator": lambda: _generator(generator),
        "rows": lambda: _rows(recorder),
        "batches": lambda: _batches(recorder),
        "event loop": lambda: _event_loop(host),
        "threads that wait for tokens": _waiting_room,
        "stacks": lambda: _stacks(generator),
    }
    return "\n".join(f"-- {name}\n{_told(part)}" for name, part in parts.items())


def _told(part: Callable[[], str]) -> str:
    """A part of the report; a fault in one leaves the others."""
    try:
        return part()
    except Exception as error:
        return f"cannot be told: {type(error).__name__}: {error}"


def _progress(recorder: Any, late: dict[str, Start]) -> dict[str, tuple]:
    """Prompt tokens read, tokens emitted, tokens asked for, by key."""
    found = {key: recorder.records[key] for key in late if key in recorder.records}
    return {key: (r.prefilled, len(r.ids), r.asked) for key, r in found.items()}


def _requests(recorder: Any, late: dict, before: dict, after: dict) -> str:
    lines = []
    for key in before.keys() & after.keys() & recorder.records.keys():
        record, start = recorder.records[key], late[key]
        queue = record.raw_inputs.get("_rqueue")
        lines.append(
            f"{key}: waits {time.monotonic() - start.at:.0f} s and "
            f"{recorder.ticks - start.ticks} steps, uid {record.uid}, request "
            f"{id(queue):x}, prompt {len(record.prompt_ids)}, (prefilled, emitted, "
            f"asked) {before[key]} -> {after[key]}, finish {record.finish_reason}, "
            f"hold_at {record.hold_at}, in its queue "
            f"{queue.qsize() if queue is not None else None}"
        )
    return "\n".join(lines)


def _generator(generator: Any) -> str:
    own = vars(generator)
    lock = generator._cancel_lock
    free = lock.acquire(timeout=0.2)
    if free:
        lock.release()
    followers = [
        (prompt.request.request_id, prompt.leader)
        for prompt in own.get("followers", ())
    ]
    cancelled = [
        (int(uid), f"{id(getattr(uid, 'rqueue', None)):x}")
        for uid in list(generator._cancelled)
    ]
    return (
        f"thread alive {generator._thread.is_alive()}, stop {generator._stop}, queued "
        f"{generator.requests.qsize()}, cancelled {cancelled}, cancel lock free {free}, "
        f"followers (request, leader) {followers}, faults {own.get('row_faults')}"
    )


def _rows(recorder: Any) -> str:
    """The requests that the server takes for active."""
    return "\n".join(
        f"{uid}: request {info.get('request_id')}, prefilled "
        f"{info.get('prefill_processed')}, generated {info.get('generated_tokens')}, "
        f"in its queue {info['rqueue'].qsize()}"
        for uid, info in list((recorder.active or {}).items())
    )


def _batches(recorder: Any) -> str:
    """The rows of each stage of the batch generator, and what is kept about them."""
    batch = recorder.batch() if recorder.batch is not None else None
    if batch is None:
        return "none"
    prompt, decoding = batch._prompt_batch, batch._generation_batch
    lines = [
        f"waiting (uid, tokens) {[(s[0], len(s[1])) for s in batch._unprocessed_sequences]}",
        f"prefilled {None if prompt is None else _prompt_batch(prompt)}",
        f"decoding {_decoding(decoding)}",
    ]
    for drafted in getattr(batch, "speculative_batches", ()):
        lines.append(f"speculative {_decoding(drafted)} turns {drafted.turns}")
    for name in ("overtaken", "settled_order", "rows_alone", "followers_among"):
        lines.append(f"{name} {getattr(batch, name, None)}")
    lines.append(f"wait for the disk {list(getattr(batch, 'disk_loads', ()))}")
    return "\n".join(lines)


def _prompt_batch(prompt: Any) -> str:
    columns = prompt._input_ids.shape[1]
    return (
        f"uids {prompt.uids}, done {prompt._processed_prompt_columns}, left {columns}, "
        f"suffixes {prompt._suffix_lens}"
    )


def _decoding(batch: Any) -> str:
    tokens = getattr(batch, "_num_tokens", None)
    return f"uids {batch.uids}, tokens {tokens} of {batch.max_tokens}"


def _event_loop(host: Any) -> str:
    """Whether it turns, and at what each of its tasks stands."""
    loop = host.server.servers[0].get_loop()
    started = time.monotonic()
    looked = asyncio.run_coroutine_threadsafe(_tasks(), loop)
    try:
        tasks = looked.result(LOOP_SECONDS)
    except TimeoutError:
        return f"has not turned for {LOOP_SECONDS:g} s"
    turned = time.monotonic() - started
    return "\n".join([f"turned in {turned:.3f} s, tasks {len(tasks)}", *tasks])


async def _tasks() -> list[str]:
    return [_awaits(task.get_coro()) for task in asyncio.all_tasks()]


def _awaits(coroutine: Any) -> str:
    """The innermost places of a chain of coroutines, and what the last one awaits."""
    places = []
    while coroutine is not None and (code := getattr(coroutine, "cr_code", None)):
        frame = coroutine.cr_frame
        line = frame.f_lineno if frame is not None else 0
        places.append(f"{Path(code.co_filename).name}:{line} {code.co_name}")
        coroutine = coroutine.cr_await
    return " > ".join([*places[-5:], repr(coroutine)[:120]])


def _waiting_room() -> str:
    for name in ("mlx_vlm_cacheplus.core.waiting_room", "mlx_vlm.server.waiting_room"):
        room = getattr(sys.modules.get(name), "ROOM", None)
        if room is not None:
            return (
                f"threads {room._threads}, idle {room._idle}, requests "
                f"{room._requests}, work {len(room._work)}"
            )
    return "none"


def _stacks(generator: Any) -> str:
    """Of each thread; threads that stand at the same place once."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    names[generator._thread.ident] = "GENERATION"
    found: dict[str, list[str]] = {}
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame)[-16:])
        found.setdefault(stack, []).append(names.get(ident, str(ident)))
    return "\n".join(f"{', '.join(who)}:\n{stack}" for stack, who in found.items())
