"""An in-process stock server on 127.0.0.1 for behaviour tests.

    def test_reply_is_kept(make_server):
        server = make_server("hybrid")                 # float32, cache on and empty
        one = server.chat([user("copy: fox yak")], max_tokens=24)
        two = server.chat([user("copy: fox yak"), one.message(), user("again")])
        assert two.cached_tokens >= len(one.prompt_ids) + len(one.ids) - 1
        server.assert_cold(two)                        # same greedy ids as a cold run

What a test has
    make_server(model, **settings)   a TinyServer; model is a bundled name or a path.
        Settings: see ``tests.fakes.host.Settings``.  The same settings give the same loaded model again,
        with an empty prefix cache; ``reload()`` loads it anew (a fresh model object).
    server.chat / responses / messages(..., stream=False, script=None, **body) -> Reply
        greedy (temperature 0) unless said otherwise; ``body`` goes into the request.
        script: the *puppet*: ids (or text) that the reply will be, then the stop token
        (then="stop") or free choice (then="free").  With a draft model only the first
        token can be scripted on stock (it applies processors to no other).
    server.cancel(messages, after=k, endpoint="chat")  streams, hangs up once k tokens were emitted, and
        returns the Reply so far, when the server has dropped the row.
    server.together([dict(messages=...), ...])   sent at once and admitted together: one
        prefill batch, if stock makes one of them.
    server.staggered([(0, dict(...)), (5, dict(...))])  each later one joins when the
        first has emitted so many tokens.
    server.encode(text) / decode(ids), server.language_model, server.manager (APC)
    server.cold(prompt_ids, n) -> ColdRun(ids, gaps);  server.assert_cold(reply)
    server.recorder.decode_calls     (rows, columns) of every decode call so far
    server.get(path) / server.post(path, body)   any other endpoint, JSON
Errors of the server are RequestFailed (an AssertionError), with .status and .text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.fakes import replies
from tests.fakes.cold import ColdRun, first_difference
from tests.fakes.host import REQUEST_SECONDS, Host, Settings
from tests.fakes.recorder import HOLD_SECONDS, KEY, Record
from tests.fakes.replies import Reply, RequestFailed

Script = str | Sequence[int] | None
# endpoint: path, field of the conversation, field of the token budget
ENDPOINTS = {
    "chat": ("/v1/chat/completions", "messages", "max_tokens"),
    "responses": ("/v1/responses", "input", "max_output_tokens"),
    "messages": ("/v1/messages", "messages", "max_tokens"),
}


class TinyServer:
    """The server with one model and settings; see the module's text."""

    def __init__(self, host: Host, settings: Settings):
        self.host = host
        self.settings = settings
        self.recorder = host.recorder
        host.use(settings)

    # -- the loaded model ----------------------------------------------------
    @property
    def generator(self) -> Any:
        """Stock's ResponseGenerator."""
        return self.host.runtime.response_generator

    @property
    def manager(self) -> Any:
        """Stock's APCManager, or None."""
        return self.host.runtime.apc_manager

    @property
    def language_model(self) -> Any:
        """The served language model."""
        return self.generator.model.language_model

    def reload(self) -> None:
        """Unload and load again: a fresh model object and an empty cache."""
        self.host.app_module.unload_model_sync()
        self.host.use(self.settings)

    def clear_cache(self) -> None:
        """Empty the prefix cache in RAM."""
        self.host.clear_cache()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return list(self.generator.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return self.generator.tokenizer.decode(list(ids))

    # -- requests ------------------------------------------------------------
    def get(self, path: str, **kwargs: Any) -> Any:
        """Return the JSON of a GET."""
        return _checked(self.host.client.get(path, **kwargs)).json()

    def post(self, path: str, body: dict[str, Any], **kwargs: Any) -> Any:
        """Return the JSON of a POST."""
        return _checked(self.host.client.post(path, json=body, **kwargs)).json()

    def chat(self, messages: list[dict[str, Any]], **kw: Any) -> Reply:
        """POST /v1/chat/completions."""
        return self._ask("chat", messages, **kw)

    def responses(self, input: Any, **kw: Any) -> Reply:
        """POST /v1/responses."""
        return self._ask("responses", input, **kw)

    def messages(self, messages: list[dict[str, Any]], **kw: Any) -> Reply:
        """POST /v1/messages (Anthropic's form)."""
        return self._ask("messages", messages, **kw)

    def _expect(self, script: Script, then: str) -> Record:
        key = f"t{next(self.host.keys)}"
        ids = self.encode(script) if isinstance(script, str) else script
        return self.recorder.expect(
            key, script=None if ids is None else [int(i) for i in ids], then=then
        )

    def expect_held(self, script: Script, at: int, until: Any) -> Record:
        """A record for ``chat(record=...)``: its row stands at token ``at`` until
        ``until()`` is true; ``record.held`` is set meanwhile."""
        record = self._expect(script, "stop")
        record.hold_at, record.release = at, until
        return record

    def _ask(
        self,
        endpoint: str,
        conversation: Any,
        *,
        stream: bool = False,
        script: Script = None,
        then: str = "stop",
        headers: dict[str, str] | None = None,
        record: Record | None = None,
        **more: Any,
    ) -> Reply:
        path, name, budget = ENDPOINTS[endpoint]
        record = record or self._expect(script, then)
        more = {budget: more.pop("max_tokens", 16), **more}
        body = self._body({name: conversation}, record, stream, more)
        if endpoint == "chat" and stream:
            body.setdefault("stream_options", {"include_usage": True})
        try:
            with self.host.watchdog.waiting(record):
                reply = self._answer(endpoint, path, body, headers)
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__}: {error}"
            raise RequestFailed(0, problem, record.stuck) from error
        return _with_record(reply, record)

    def _answer(
        self,
        endpoint: str,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str] | None,
    ) -> Reply:
        if body["stream"]:
            events = list(self._events(path, body, headers))
            return getattr(replies, f"{endpoint}_stream")(events)
        answer = self.host.client.post(path, json=body, headers=headers)
        return getattr(replies, f"{endpoint}_reply")(_checked(answer).json())

    def _body(
        self, body: dict[str, Any], record: Record, stream: bool, more: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "model": self.settings.model,
            "temperature": 0,
            **body,
            "stream": stream,
            KEY: record.key,
            **more,
        }

    def _events(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None
    ) -> Iterator[dict[str, Any]]:
        with self.host.client.stream(
            "POST", path, json=body, headers=headers
        ) as answer:
            if answer.status_code != 200:
                answer.read()
                _checked(answer)
            yield from replies.sse_events(answer.iter_lines())

    # -- several at once, and hanging up -------------------------------------
    def together(self, requests: list[dict[str, Any]]) -> list[Reply]:
        """Send chat requests at once, admitted together; replies in order.

        Any request that fails raises, after all have ended; with ``settled`` one
        gets the exceptions instead.
        """
        out = self.settled(requests)
        for item in out:
            if isinstance(item, BaseException):
                raise item
        return [item for item in out if isinstance(item, Reply)]

    def settled(self, requests: list[dict[str, Any]]) -> list[Any]:
        """As ``together``, with the exception in the place of a reply that failed."""
        self.recorder.admit_together(len(requests))
        with ThreadPoolExecutor(len(requests)) as pool:
            jobs = [pool.submit(self.chat, **request) for request in requests]
            return [_outcome(job) for job in jobs]

    def staggered(self, requests: list[tuple[int, dict[str, Any]]]) -> list[Reply]:
        """Send the first; each other joins when the first has emitted that many tokens.

        The generation thread is held there until the newcomer is queued.  Raises if a
        request fails; ``settled_staggered`` gives the exception in its place.
        """
        out = self.settled_staggered(requests)
        for item in out:
            if isinstance(item, BaseException):
                raise item
        return out

    def settled_staggered(self, requests: list[tuple[int, dict[str, Any]]]) -> list:
        """As ``staggered``, with the exception in the place of a reply that failed."""
        (_, first), *others = requests
        with ThreadPoolExecutor(len(requests)) as pool:
            record = self._expect(first.pop("script", None), first.pop("then", "stop"))
            jobs: list[Any] = []
            for after, _ in others[:1]:
                record.hold_at = after
                record.release = lambda: self.generator.requests.qsize() > 0
            jobs.append(pool.submit(self.chat, record=record, **first))
            for i, (_, request) in enumerate(others):
                if not _held(record, jobs[0]):
                    break
                record.held.clear()
                if i + 1 < len(others):
                    record.hold_at = others[i + 1][0]
                jobs.append(pool.submit(self.chat, **request))
            out = [_outcome(job) for job in jobs]
        if len(out) != len(requests):
            raise RequestFailed(0, "the first request ended before the others joined")
        return out

    def two_groups(
        self, first: list[dict[str, Any]], after: int, second: list[dict[str, Any]]
    ) -> list[Reply]:
        """Send ``first`` at once; send ``second`` at once when its leading request has
        emitted ``after`` tokens.  Both are admitted together, each group in a batch.
        """
        leader, *rest = first
        record = self._expect(leader.pop("script", None), leader.pop("then", "stop"))
        record.hold_at = after
        record.release = lambda: self.generator.requests.qsize() >= len(second)
        self.recorder.admit_together(len(first))
        with ThreadPoolExecutor(len(first) + len(second)) as pool:
            jobs = [pool.submit(self.chat, record=record, **leader)]
            jobs += [pool.submit(self.chat, **request) for request in rest]
            if _held(record, jobs[0]):
                jobs += [pool.submit(self.chat, **request) for request in second]
            out = [_outcome(job) for job in jobs]
        for item in out:
            if isinstance(item, BaseException):
                raise item
        return out

    def cancel(
        self, messages: Any, *, after: int, endpoint: str = "chat", **kw: Any
    ) -> Reply:
        """Stream, hang up once ``after`` tokens were emitted; see the module's text.

        The row stands at that token until it is cancelled, and the handler waits for it:
        stock loses a hang-up that meets the handler in a write.  A draft model's rounds
        may have a few more tokens.
        """
        path, name, budget = ENDPOINTS[endpoint]
        record = self._expect(kw.pop("script", None), kw.pop("then", "stop"))
        record.hold_at = after
        generator = self.generator
        cancelled = threading.Event()

        def is_cancelled() -> bool:
            if record.uid in generator._cancelled:
                cancelled.set()
            return cancelled.is_set()

        record.release = is_cancelled
        body = self._body({name: messages}, record, True, {budget: 64, **kw})
        with self.host.client.stream("POST", path, json=body) as answer:
            _checked_status(answer)
            if not record.held.wait(REQUEST_SECONDS):
                raise RequestFailed(0, f"ended before {after} tokens were emitted")
            wait_for(lambda: record.asked >= after, "the handler asks for no token")
        if not cancelled.wait(HOLD_SECONDS):
            raise RequestFailed(0, "the hang-up has cancelled no row")
        self.wait_idle()
        return _with_record(Reply(), record)

    def wait_idle(self, seconds: float = 20.0) -> None:
        """Return when no row is active and the loop has come round once more."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            tick = self.recorder.ticks
            if not self.recorder.active and self.generator.requests.empty():
                while self.recorder.ticks < tick + 2 and time.monotonic() < deadline:
                    time.sleep(0.005)
                if not self.recorder.active:
                    return
            time.sleep(0.005)
        raise RequestFailed(0, "the server did not become idle")

    # -- the cold run --------------------------------------------------------
    def cold(self, prompt_ids: Sequence[int], n: int, **kw: Any) -> ColdRun:
        """Return the greedy ids of a cold run (own copy of the model, empty cache)."""
        return self.host.cold_model().run(prompt_ids, n, **kw)

    def cold_ids(self, prompt_ids: Sequence[int], n: int) -> list[int]:
        """Return the ids alone of ``cold``."""
        return self.cold(prompt_ids, n).ids

    def assert_cold(self, reply: Reply, near_tie: float | None = None) -> None:
        """Check that a reply has a cold run's greedy ids.

        A first difference is accepted only where the cold run's top two logits are a
        near tie: 1e-3 in float32 (chunk boundaries differ), 0.25 in bfloat16.
        """
        assert reply.ids, "no emitted ids were recorded for this reply"
        if near_tie is None:
            near_tie = 1e-3 if self.settings.dtype == "float32" else 0.25
        raw = reply.record.raw_inputs if reply.record else {}
        pictures = raw if raw.get("pixel_values") is not None else None
        cold = self.cold(reply.prompt_ids, len(reply.ids), raw_inputs=pictures)
        found = first_difference(reply.ids, cold)
        assert found is None or found[1] < near_tie, (
            f"token {found[0]} of the reply differs from the cold run "
            f"(its top-2 gap there is {found[1]:.3g}): {reply.ids} != {cold.ids}"
        )


def wait_for(condition: Callable[[], bool], otherwise: str) -> None:
    """Return when it is true; raise RequestFailed if it is not for REQUEST_SECONDS."""
    deadline = time.monotonic() + REQUEST_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RequestFailed(0, otherwise)
        time.sleep(0.002)


def user(text: Any) -> dict[str, Any]:
    """Return a user message."""
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    """Return a system message."""
    return {"role": "system", "content": text}


def _with_record(reply: Reply, record: Record) -> Reply:
    reply.record = record
    reply.prompt_ids = list(record.prompt_ids)
    reply.ids = list(record.ids)
    reply.prefilled = record.prefilled
    reply.forwards = list(record.forwards)
    return reply


def _held(record: Record, job: Any) -> bool:
    """Wait until the row stands at its token; False where it ended before."""
    deadline = time.monotonic() + REQUEST_SECONDS
    while not record.held.wait(0.01) and time.monotonic() < deadline:
        if job.done():
            break
    return record.held.is_set()


def _outcome(job: Any) -> Any:
    try:
        return job.result(timeout=REQUEST_SECONDS * 2)
    except Exception as error:
        return error


def _checked_status(answer: httpx.Response) -> None:
    if answer.status_code != 200:
        answer.read()
        _checked(answer)


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.status_code != 200:
        raise RequestFailed(answer.status_code, answer.text)
    return answer
