"""The client: any number of sessions at once against one server, one row a request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from .history import History, recorded_reply
from .rows import REPORT, Row
from .session import Session, Turn
from .tokens import NewCounter
from .wire import PROTOCOLS, Ask, Protocol_, Received, ServerFault

REPORT_PATH = "/v1/cacheplus/report"


@dataclass
class Options:
    """How to replay; seconds and tokens."""

    base: str
    model: str | None = None
    api: str = "chat"
    stream: bool = True
    sessions: int = 1
    stagger: float = 0.0
    share: bool = False
    marker: str = ""
    max_tokens: int | None = None
    forced: bool = False
    api_key: str | None = None
    timeout: float = 600.0

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def session_marker(self, index: int) -> str:
        """What makes session ``index`` differ from its neighbours; empty when nothing has to."""
        number = "" if self.share or self.sessions == 1 else f"session {index + 1}"
        return (
            f"[{' '.join(part for part in (self.marker, number) if part)}]"
            if self.marker or number
            else ""
        )


@dataclass
class Replayed:
    """Rows in the order in which requests ended, and what was noticed on the way."""

    model: str = ""
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run(
    session: Session,
    options: Options,
    counter: NewCounter | None = None,
    on_row: Callable[[Row], None] | None = None,
    into: Replayed | None = None,
) -> Replayed:
    """Replay and wait.  ``into`` keeps the rows that there are when a fault ends the run early."""
    result = into if into is not None else Replayed()
    replay = _Replay(
        session, options, counter or NewCounter(), on_row or (lambda row: None), result
    )
    asyncio.run(replay.all())
    return result


@dataclass
class _Replay:
    session: Session
    options: Options
    counter: NewCounter
    on_row: Callable[[Row], None]
    result: Replayed
    start: float = 0.0

    async def all(self) -> None:
        options = self.options
        timeout = httpx.Timeout(options.timeout, connect=10.0)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=options.base,
            headers=options.headers(),
            timeout=timeout,
            limits=limits,
        ) as http:
            try:
                self.result.model = options.model or await loaded_model(http)
                self.counter.tools = self.session.tools
                self.counter.thinking = self.session.enable_thinking
                self.start = time.perf_counter()
                await _gather(
                    [self._one(http, index) for index in range(options.sessions)]
                )
                await self._read_report(http)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise ServerFault(
                    f"{options.base}: {type(error).__name__}: {error}"
                ) from error

    async def _one(self, http: httpx.AsyncClient, index: int) -> None:
        await asyncio.sleep(index * self.options.stagger)
        history = History(self.session, self.options.session_marker(index))
        for number, turn in enumerate(self.session.turns, 1):
            history.add_turn(turn)
            sent = self.counter.sent(history.messages)
            try:
                received, row = await self._ask(http, history.messages, turn)
            except ServerFault as error:
                raise ServerFault(
                    f"session {index + 1}, turn {number}: {error}"
                ) from None
            row.session, row.turn = index + 1, number
            self.counter.answered(row, sent)
            self.result.rows.append(row)
            self.on_row(row)
            forced = self.options.forced and turn.expected is not None
            history.add_reply(
                recorded_reply(turn, number) if forced else received.reply
            )

    async def _ask(
        self, http: httpx.AsyncClient, messages: list[dict[str, Any]], turn: Turn
    ) -> tuple[Received, Row]:
        session, options = self.session, self.options
        ask = Ask(
            model=self.result.model,
            tools=session.tools,
            max_tokens=session.reply_limit(turn, options.max_tokens),
            temperature=session.temperature,
            stream=options.stream,
            enable_thinking=session.enable_thinking,
        )
        try:
            out, times = await _exchange(http, PROTOCOLS[options.api], messages, ask)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            kind = type(error).__name__
            raise ServerFault(f"the answer is no reply: {kind}: {error}") from error
        return out, _row(out, times, self.start)

    async def _read_report(self, http: httpx.AsyncClient) -> None:
        """Take ``new`` from the server's own reuse records where it has them."""
        # Requests of others may lie between ours; more than are kept gives all that are kept.
        last = 2 * len(self.result.rows) + 100
        answer = await http.get(REPORT_PATH, params={"last": last})
        if answer.status_code != 200:
            return
        try:
            data = answer.json()
        except ValueError:
            return
        records = data.get("records") if isinstance(data, dict) else None
        apply_report(self.result, records if isinstance(records, list) else [])


def apply_report(result: Replayed, records: list[dict[str, Any]]) -> None:
    """Match reuse records to rows by prompt and generated tokens, newest first, and take their ``new``."""
    left = [record for record in records if isinstance(record, dict)]
    for row in reversed(result.rows):
        for record in reversed(left):
            if (
                record.get("prompt") == row.prompt
                and record.get("generated") == row.generated
            ):
                left.remove(record)
                if record.get("new") is not None:
                    row.new, row.new_from, row.note = int(record["new"]), REPORT, ""
                break


async def _gather(tasks: list[Any]) -> None:
    """Wait for all; the first fault cancels the others and is raised."""
    running = [asyncio.ensure_future(task) for task in tasks]
    try:
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@dataclass
class _Times:
    """Seconds on one clock; first and last are of what the model wrote, None without streaming."""

    sent: float
    first: float | None = None
    last: float = 0.0
    ended: float = 0.0


async def _exchange(
    http: httpx.AsyncClient,
    protocol: Protocol_,
    messages: list[dict[str, Any]],
    ask: Ask,
) -> tuple[Received, _Times]:
    out, body = Received(), protocol.body(messages, ask)
    times = _Times(time.perf_counter())
    if ask.stream:
        async for event in _events(http, protocol.path, body):
            if protocol.event(event, out):
                times.last = time.perf_counter()
                times.first = times.first or times.last
    else:
        protocol.whole(await _post(http, protocol.path, body), out)
    times.ended = time.perf_counter()
    return out, times


def _row(out: Received, times: _Times, start: float) -> Row:
    if out.prompt is None or out.generated is None:
        raise ServerFault("the reply came without usage (prompt and completion tokens)")
    row = Row(0, 0, out.prompt, out.restored or 0, out.generated)
    row.started, row.seconds = times.sent - start, times.ended - times.sent
    row.request_id, row.finish_reason = out.id, out.reply.finish_reason
    row.text = out.reply.text()
    if times.first is not None:
        row.ttft = times.first - times.sent
        row.decode_seconds = times.last - times.first
    elif out.server_speed and out.generated > 1:
        row.decode_seconds = (out.generated - 1) / out.server_speed
    return row


async def loaded_model(http: httpx.AsyncClient) -> str:
    """Name of the model that the server has loaded."""
    answer = await http.get("/health")
    if answer.status_code != 200:
        raise ServerFault(f"GET /health: HTTP {answer.status_code}")
    try:
        name = answer.json().get("loaded_model")
    except (ValueError, AttributeError):
        raise ServerFault("GET /health: not a JSON object") from None
    if not name:
        raise ServerFault("the server has no model loaded; name one with --model")
    return str(name)


async def _post(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> dict[str, Any]:
    answer = await http.post(path, json=body)
    if answer.status_code != 200:
        raise ServerFault(f"HTTP {answer.status_code}: {answer.text[:300]}")
    data = answer.json()
    if not isinstance(data, dict):
        raise ServerFault(f"not a JSON object: {answer.text[:300]}")
    return data


async def _events(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Data of each server-sent event; raises ServerFault for an error event."""
    async with http.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            text = (await answer.aread()).decode("utf-8", "replace")
            raise ServerFault(f"HTTP {answer.status_code}: {text[:300]}")
        async for line in answer.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line[len("data:") :].strip()
            if data == "[DONE]":
                return
            event = json.loads(data)
            if event.get("error") or event.get("type") in ("error", "response.failed"):
                raise ServerFault(f"error in the stream: {data[:300]}")
            yield event
