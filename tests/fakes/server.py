"""An in-process stock server on 127.0.0.1 for behaviour tests.

    def test_reply_is_kept(make_server):
        server = make_server("hybrid")                 # float32, cache on and empty
        one = server.chat([user("copy: fox yak")], max_tokens=24)
        two = server.chat([user("copy: fox yak"), one.message(), user("again")])
        assert two.cached_tokens >= len(one.prompt_ids) + len(one.ids) - 1
        server.assert_cold(two)                        # same greedy ids as a cold run

What a test has
    make_server(model, **settings)   a TinyServer; model is a bundled name or a path.
        Settings: see ``Settings``.  The same settings give the same loaded model again,
        with an empty prefix cache; ``reload()`` loads it anew (a fresh model object).
    server.chat / responses / messages(..., stream=False, script=None, **body) -> Reply
        greedy (temperature 0) unless said otherwise; ``body`` goes into the request.
        script: the *puppet*: ids (or text) that the reply will be, then the stop token
        (then="stop") or free choice (then="free").  With a draft model only the first
        token can be scripted (stock applies processors to no other).
    server.cancel(messages, after=k)  streams, hangs up once k tokens were emitted, and
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

import importlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import httpx

from tests.fakes import replies
from tests.fakes.cold import ColdModel, ColdRun, first_difference
from tests.fakes.models import NAMES, model_dir
from tests.fakes.recorder import KEY, Recorder, Record
from tests.fakes.replies import Reply, RequestFailed

REQUEST_SECONDS = float(os.environ.get("CACHEPLUS_REQUEST_SECONDS", "60"))
Script = Union[str, Sequence[int], None]


@dataclass(frozen=True)
class Settings:
    """What a loaded model depends on.

    dtype: parameters are cast to it after loading; None keeps the file's.
    draft_model, draft_kind, kv_bits, max_kv_size: as the server's options.
    apc: prefix cache on or off; the apc_* fields are stock's settings of that name.
    disk: directory for the disk tier; None turns it off.
    env: further environment variables, as (name, value) pairs, set while it is current
        (MLX_VLM_MAX_NUM_SEQS, PREFILL_STEP_SIZE, APC_HASH, ...).
    adapter: adapter path.
    """

    model: str
    dtype: Optional[str] = "float32"
    draft_model: Optional[str] = None
    draft_kind: Optional[str] = None
    kv_bits: Optional[float] = None
    max_kv_size: Optional[int] = None
    apc: bool = True
    apc_block_size: int = 16
    apc_num_blocks: int = 2048
    apc_memory_max_gb: Optional[float] = None
    apc_checkpoint_entries: int = 2
    apc_checkpoint_interval_tokens: int = 2048
    apc_checkpoint_guard_tokens: int = 1
    disk: Optional[str] = None
    env: Tuple[Tuple[str, str], ...] = field(default_factory=tuple)
    adapter: Optional[str] = None

    def knobs(self) -> Dict[str, Any]:
        """Return the runtime settings (stock's PATCH /v1/settings names)."""
        skip = ("model", "dtype", "apc", "disk", "env", "adapter")
        out = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skip}
        out["apc_enabled"] = self.apc
        out["apc_disk_enabled"] = self.disk is not None
        out["apc_disk_path"] = self.disk
        return out


class Host:
    """The one HTTP server of the process, and the recorder on its seams."""

    def __init__(self) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self.app_module = importlib.import_module("mlx_vlm.server.app")
        self.generation = importlib.import_module("mlx_vlm.server.generation")
        self.runtime = importlib.import_module("mlx_vlm.server.runtime").runtime
        self.recorder = Recorder()
        self.recorder.install()
        self.keys = count(1)
        self.current: Optional[Settings] = None
        self._env_before: Dict[str, Optional[str]] = {}
        self._cold: Dict[Tuple[str, Optional[str]], ColdModel] = {}
        self._cast_loaded_models()
        self._serve()

    def _cast_loaded_models(self) -> None:
        drafters = importlib.import_module("mlx_vlm.speculative.drafters")

        def cast(model: Any) -> None:
            import mlx.core as mx

            dtype = self.current.dtype if self.current else None
            if dtype and model is not None:
                model.set_dtype(getattr(mx, dtype))

        def load_model_resources(original: Callable[..., Any]) -> Callable[..., Any]:
            def load(*args: Any, **kwargs: Any) -> Any:
                out = original(*args, **kwargs)
                cast(out[0])
                return out

            return load

        def load_drafter(original: Callable[..., Any]) -> Callable[..., Any]:
            def load(*args: Any, **kwargs: Any) -> Any:
                out = original(*args, **kwargs)
                cast(out[0])
                return out

            return load

        self.recorder._wrap(self.generation, "load_model_resources", load_model_resources)
        self.recorder._wrap(drafters, "load_drafter", load_drafter)

    def _serve(self) -> None:
        import uvicorn

        config = uvicorn.Config(
            self.app_module.app, host="127.0.0.1", port=0, log_level="error"
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        deadline = time.monotonic() + 30
        while not self.server.started:
            if time.monotonic() > deadline or not self.thread.is_alive():
                raise RuntimeError("the in-process server did not start")
            time.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=REQUEST_SECONDS
        )

    def close(self) -> None:
        """Stop serving, unload, and put every wrapped seam back."""
        self.client.close()
        self.server.should_exit = True
        self.thread.join(timeout=20)
        self.app_module.unload_model_sync()
        self.recorder.uninstall()
        self._environment(())

    def _environment(self, pairs: Sequence[Tuple[str, str]]) -> None:
        for name, before in self._env_before.items():
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before
        self._env_before = {name: os.environ.get(name) for name, _ in pairs}
        os.environ.update(dict(pairs))

    def use(self, settings: Settings) -> None:
        """Make these settings and this model the current ones; the cache is emptied."""
        if settings != self.current:
            self._environment(settings.env)
            self.current = settings
            _, rejected = self.runtime.config.apply_changes(settings.knobs())
            if rejected:
                raise ValueError(f"stock rejected settings: {rejected}")
            self.app_module.unload_model_sync()
        self.load()
        self.clear_cache()
        self.recorder.forget()

    def load(self) -> None:
        """Load the current model, if it is not loaded."""
        assert self.current is not None
        get_cached_model = importlib.import_module("mlx_vlm.server").get_cached_model
        get_cached_model(self.current.model, self.current.adapter)

    def clear_cache(self) -> None:
        """Empty the prefix cache in RAM."""
        if self.runtime.apc_manager is not None:
            self.runtime.apc_manager.clear()

    def cold_model(self) -> ColdModel:
        """Return the reference copy of the current model (loaded once)."""
        assert self.current is not None
        key = (self.current.model, self.current.dtype)
        if key not in self._cold:
            self._cold[key] = ColdModel(*key)
        return self._cold[key]


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

    def encode(self, text: str) -> List[int]:
        """Return the ids of a text, without special tokens."""
        return list(self.generator.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return self.generator.tokenizer.decode(list(ids))

    # -- requests ------------------------------------------------------------
    def get(self, path: str, **kwargs: Any) -> Any:
        """Return the JSON of a GET."""
        return _checked(self.host.client.get(path, **kwargs)).json()

    def post(self, path: str, body: Dict[str, Any], **kwargs: Any) -> Any:
        """Return the JSON of a POST."""
        return _checked(self.host.client.post(path, json=body, **kwargs)).json()

    def chat(self, messages: List[Dict[str, Any]], **kw: Any) -> Reply:
        """POST /v1/chat/completions."""
        return self._ask("/v1/chat/completions", "chat", {"messages": messages}, **kw)

    def responses(self, input: Any, **kw: Any) -> Reply:
        """POST /v1/responses."""
        if "max_tokens" in kw:
            kw["max_output_tokens"] = kw.pop("max_tokens")
        return self._ask("/v1/responses", "responses", {"input": input}, **kw)

    def messages(self, messages: List[Dict[str, Any]], **kw: Any) -> Reply:
        """POST /v1/messages (Anthropic's form)."""
        return self._ask("/v1/messages", "messages", {"messages": messages}, **kw)

    def _expect(self, script: Script, then: str) -> Record:
        key = f"t{next(self.host.keys)}"
        ids = self.encode(script) if isinstance(script, str) else script
        return self.recorder.expect(
            key, script=None if ids is None else [int(i) for i in ids], then=then
        )

    def _ask(
        self,
        path: str,
        kind: str,
        body: Dict[str, Any],
        *,
        stream: bool = False,
        script: Script = None,
        then: str = "stop",
        headers: Optional[Dict[str, str]] = None,
        record: Optional[Record] = None,
        **more: Any,
    ) -> Reply:
        record = record or self._expect(script, then)
        body = self._body(body, record, stream, more)
        if kind == "chat" and stream:
            body.setdefault("stream_options", {"include_usage": True})
        try:
            if stream:
                events = list(self._events(path, body, headers))
                reply = getattr(replies, f"{kind}_stream")(events)
            else:
                answer = self.host.client.post(path, json=body, headers=headers)
                reply = getattr(replies, f"{kind}_reply")(_checked(answer).json())
        except httpx.HTTPError as error:
            raise RequestFailed(0, f"{type(error).__name__}: {error}") from error
        return _with_record(reply, record)

    def _body(
        self, body: Dict[str, Any], record: Record, stream: bool, more: Dict[str, Any]
    ) -> Dict[str, Any]:
        budget = {} if "max_output_tokens" in more else {"max_tokens": 16}
        return {
            "model": self.settings.model,
            "temperature": 0,
            **budget,
            **body,
            "stream": stream,
            KEY: record.key,
            **more,
        }

    def _events(
        self, path: str, body: Dict[str, Any], headers: Optional[Dict[str, str]]
    ) -> Iterator[Dict[str, Any]]:
        with self.host.client.stream(
            "POST", path, json=body, headers=headers
        ) as answer:
            if answer.status_code != 200:
                answer.read()
                _checked(answer)
            yield from replies.sse_events(answer.iter_lines())

    # -- several at once, and hanging up -------------------------------------
    def together(self, requests: List[Dict[str, Any]]) -> List[Reply]:
        """Send chat requests at once, admitted together; replies in order.

        Any request that fails raises, after all have ended; with ``settled`` one
        gets the exceptions instead.
        """
        out = self.settled(requests)
        for item in out:
            if isinstance(item, BaseException):
                raise item
        return [item for item in out if isinstance(item, Reply)]

    def settled(self, requests: List[Dict[str, Any]]) -> List[Any]:
        """As ``together``, with the exception in the place of a reply that failed."""
        self.recorder.admit_together(len(requests))
        with ThreadPoolExecutor(len(requests)) as pool:
            jobs = [pool.submit(self.chat, **request) for request in requests]
            return [_outcome(job) for job in jobs]

    def staggered(self, requests: List[Tuple[int, Dict[str, Any]]]) -> List[Reply]:
        """Send the first; each other joins when the first has emitted that many tokens.

        The generation thread is held there until the newcomer is queued.
        """
        (_, first), *others = requests
        with ThreadPoolExecutor(len(requests)) as pool:
            record = self._expect(first.pop("script", None), first.pop("then", "stop"))
            jobs: List[Any] = []
            for after, _ in others[:1]:
                record.hold_at = after
                record.release = lambda: self.generator.requests.qsize() > 0
            jobs.append(pool.submit(self.chat, record=record, **first))
            for i, (_, request) in enumerate(others):
                if not record.held.wait(REQUEST_SECONDS):
                    break
                record.held.clear()
                if i + 1 < len(others):
                    record.hold_at = others[i + 1][0]
                jobs.append(pool.submit(self.chat, **request))
            out = [_outcome(job) for job in jobs]
        for item in out:
            if isinstance(item, BaseException):
                raise item
        if len(out) != len(requests):
            raise RequestFailed(0, "the first request ended before the others joined")
        return out

    def cancel(
        self, messages: List[Dict[str, Any]], *, after: int, **kw: Any
    ) -> Reply:
        """Stream a chat, hang up once ``after`` tokens were emitted; see the module's text."""
        record = self._expect(kw.pop("script", None), kw.pop("then", "stop"))
        record.hold_at = after
        generator = self.generator
        record.release = lambda: bool(generator._cancelled)
        body = self._body({"messages": messages}, record, True, {"max_tokens": 64, **kw})
        reply = Reply()
        with self.host.client.stream(
            "POST", "/v1/chat/completions", json=body
        ) as answer:
            _checked_status(answer)
            if not record.held.wait(REQUEST_SECONDS):
                raise RequestFailed(0, f"ended before {after} tokens were emitted")
        self.wait_idle()
        return _with_record(reply, record)

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

    def cold_ids(self, prompt_ids: Sequence[int], n: int) -> List[int]:
        """Return the ids alone of ``cold``."""
        return self.cold(prompt_ids, n).ids

    def assert_cold(self, reply: Reply, near_tie: Optional[float] = None) -> None:
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


def user(text: Any) -> Dict[str, Any]:
    """Return a user message."""
    return {"role": "user", "content": text}


def system(text: str) -> Dict[str, Any]:
    """Return a system message."""
    return {"role": "system", "content": text}


def resolve_model(model: Union[str, Path]) -> str:
    """Return the path of a bundled model, or the path given."""
    return str(model_dir(str(model))) if str(model) in NAMES else str(model)


def _with_record(reply: Reply, record: Record) -> Reply:
    reply.record = record
    reply.prompt_ids = list(record.prompt_ids)
    reply.ids = list(record.ids)
    reply.prefilled = record.prefilled
    reply.forwards = list(record.forwards)
    return reply


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


@contextmanager
def serving() -> Iterator[Host]:
    """Serve while the block runs."""
    host = Host()
    try:
        yield host
    finally:
        host.close()
