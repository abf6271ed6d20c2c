"""From the seams of stock to records: keeps the requests in flight, and ends each of them once.

Every seam of one request is passed on the thread that owns its batch generator, so flights are kept per thread; two
servers' generators, whose uids both count from 0, never meet. Nothing here touches an array of the model;
the seams see to it that a fault costs the record, never the request.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from .cache_view import CacheView, media_in_the_way
from .drafter_view import NOT_READ_BY_DRAFTER, DrafterView, is_shorter_for
from .flight import Flight
from .history import Ids, Seen, TokenHistory, as_ids
from .ledger import Ledger
from .reasons import explain_shortfall
from .record import Drafter, Finish, ReuseRecord

logger = logging.getLogger("mlx_vlm.server.cacheplus")


# Every tracker of this process, for whoever resets all.
_trackers: weakref.WeakSet[Tracker] = weakref.WeakSet()


def forget_all() -> None:
    """Forget the token ids of earlier requests; counts and records hold none and stay."""
    for tracker in list(_trackers):
        tracker.forget()


class Tracker:
    """Owns the history and the flights; hands finished records to the ledger."""

    def __init__(self, ledger: Ledger, history: TokenHistory | None = None) -> None:
        self.ledger = ledger
        self.history = history or TokenHistory()
        # One that its owner may take again: a reply that a collection finds is cancelled
        # in whatever thread allocates, and this one allocates while it holds it.
        self._lock = threading.RLock()
        self._local = threading.local()
        # (thread of the batch generator, uid) of requests whose clients have gone.
        self._cancelled: set[tuple[int | None, int]] = set()
        _trackers.add(self)

    def forget(self) -> None:
        """Forget the token ids of earlier requests; called on any thread."""
        with self._lock:
            self.history.clear()

    @property
    def flights(self) -> dict[int, Flight]:
        """By uid, of the calling thread."""
        if not hasattr(self._local, "flights"):
            self._local.flights = {}
        return self._local.flights

    @property
    def _waiting(self) -> Flight | None:
        """The request that has begun on this thread and has no uid yet."""
        return getattr(self._local, "waiting", None)

    @property
    def leaving(self) -> int | None:
        """The row of this thread that is being removed; its end is recorded when it has left."""
        return getattr(self._local, "leaving", None)

    def cancel(self, thread: int | None, uid: int) -> None:
        """A client has gone. thread: the one that owns the row; called on any."""
        with self._lock:
            self._cancelled.add((thread, uid))

    def is_cancelled(self, uid: int) -> bool:
        return (threading.get_ident(), uid) in self._cancelled

    def begin(
        self, request: Any, model: str, endpoint: str | None, manager: Any
    ) -> None:
        """A queued request is taken up. manager: the server's prefix cache, None where it is off."""
        self.end_waiting("error")
        self._local.waiting = Flight.of(request, model, endpoint, manager)

    def insert(self, uid: int, ids: Sequence[int], batch_generator: Any) -> None:
        """The begun request has become row `uid`. A row that stock queues by itself has no request and no record."""
        flight, self._local.waiting = self._waiting, None
        if flight is None:
            return
        with self._lock:
            self._cancelled.discard((threading.get_ident(), uid))
        left = self.flights.pop(uid, None)
        if left is not None:
            self.end(left, "unknown")
        flight.uid = uid
        flight.ids = as_ids(ids)
        flight.cache = CacheView.of(batch_generator, flight.manager)
        flight.generator = weakref.ref(batch_generator)
        flight.draft_model = getattr(batch_generator, "draft_model", None)
        flight.draft_kind = getattr(batch_generator, "draft_kind", None)
        flight.draft_before = _draft_counts(flight.draft_model)
        self.flights[uid] = flight

    def history_size(self) -> dict[str, int]:
        with self._lock:
            return {
                "sequences": len(self.history),
                "bytes": self.history.bytes_held,
                "max_bytes": self.history.max_bytes,
            }

    def lookup_counts(self, uid: int) -> tuple[int, int]:
        """Before one row's lookup: the counters that tell what it did."""
        flight = self.flights.get(uid)
        return (
            (flight.cache.disk_hits, flight.cache.refusals)
            if flight is not None
            else (0, 0)
        )

    def looked_up(self, uid: int, before: tuple[int, int] | None) -> None:
        flight = self.flights.get(uid)
        if flight is not None and before is not None:
            generator = flight.generator() if flight.generator is not None else None
            taken: set[int] = getattr(generator, "rows_from_disk", set())
            flight.from_disk = flight.cache.disk_hits > before[0] or uid in taken
            taken.discard(uid)
            flight.refused = flight.cache.refusals > before[1]

    def prefill(self, prompt_batch: Any) -> None:
        """Rows are about to be read. Compares each with what the server has seen before it, and remembers it."""
        metas = prompt_batch._apc_meta
        for index, uid in enumerate(prompt_batch.uids):
            flight = self.flights.get(uid)
            if flight is not None and flight.ids is not None:
                flight.meta = metas[index] if index < len(metas) else None
                flight.prompt_batch = weakref.ref(prompt_batch)
                # The batch may draft with a copy; counts are those of the one that is loaded.
                if getattr(prompt_batch, "draft_model", flight.draft_model) is None:
                    flight.draft_model = None
                flight.restored = int(prompt_batch._cached_tokens_per_row[index])
                if flight.restored:
                    flight.source = "disk" if flight.from_disk else "ram"
                if flight.draft_model is not None:
                    flight.draft_view = DrafterView.of(
                        prompt_batch, index, flight.restored
                    )
                self._compare(flight, flight.ids)

    def _compare(self, flight: Flight, ids: Ids) -> None:
        salt = (flight.meta or {}).get("extra_hash")
        with self._lock:
            if flight.seen is not None:
                # The row is read a second time, by itself, after its batch failed.
                self.history.drop(flight.seen)
            flight.match = self.history.match(ids, flight.model)
            flight.seen = self.history.add(
                Seen(ids, flight.prompt, flight.model, flight.tenant, salt)
            )
        generator = flight.generator() if flight.generator is not None else None
        flight.shortfall = explain_shortfall(
            flight.match,
            restored=flight.restored,
            prompt=flight.prompt,
            tenant=flight.tenant,
            salt=salt,
            cache=flight.cache,
            refused=flight.refused,
            media_in_the_way=lambda length: media_in_the_way(
                generator, ids.tolist(), length, flight.cache.in_blocks
            ),
            shorter_for_drafter=lambda: is_shorter_for(
                flight.cache, ids.tolist(), salt, flight.restored
            ),
        )

    def decode(self, uids: Iterable[int], rows: dict[int, Any]) -> None:
        """Prompts have been read; rows are the ledgers of output-tokens, empty where there are none."""
        for uid in uids:
            flight = self.flights.get(uid)
            if flight is not None:
                flight.decoding = True
                flight.prompt_batch = None
                flight.row = rows.get(uid)

    def feed(self, uids: Iterable[int], tokens: Iterable[int | None]) -> None:
        """Tokens that were fed, for rows without a ledger."""
        flights = self.flights
        for uid, token in zip(uids, tokens, strict=False):
            flight = flights.get(uid)
            if flight is not None and flight.row is None and token is not None:
                flight.reply.append(int(token))

    def emit(self, uids: Iterable[int], tokens: Iterable[int | None]) -> None:
        """Tokens that a draft model helped to write. Where there is no ledger, they are what is known of the reply."""
        for uid, token in zip(uids, tokens, strict=True):
            flight = self.flights.get(uid)
            if flight is not None and token is not None:
                flight.emitted = (flight.emitted or 0) + 1
                if flight.row is None:
                    flight.reply.append(int(token))

    def draft(self, figures: dict[int, Any]) -> None:
        """Rows whose own drafting figures are kept, by speculative-turns; they count on."""
        for uid, own in figures.items():
            flight = self.flights.get(uid)
            if flight is not None:
                flight.draft_figures = own

    def leave(self, uid: int | None) -> None:
        """A row is being removed (None: it has been); its progress is gone from the batch afterwards."""
        self._local.leaving = uid
        flight = self.flights.get(uid) if uid is not None else None
        if flight is not None:
            flight.freeze_progress()

    def end_waiting(self, finish: Finish, error: str | None = None) -> None:
        flight, self._local.waiting = self._waiting, None
        if flight is not None:
            self.end(flight, finish, error=error)

    def end_row(
        self,
        uid: int,
        finish: Finish,
        *,
        generated: int | None = None,
        error: str | None = None,
    ) -> None:
        """A row has left its batch, and output-tokens has committed it; a second call finds nothing."""
        flight = self.flights.pop(uid, None)
        if flight is not None:
            with self._lock:
                self._cancelled.discard((threading.get_ident(), uid))
            self.end(flight, finish, generated=generated, error=error)

    def end_queues(self, queues: Iterable[Any], error: str) -> None:
        """An error has ended every request that waits on one of these queues."""
        ended = {id(queue) for queue in queues}
        for uid, flight in list(self.flights.items()):
            if id(flight.queue) in ended:
                self.end_row(uid, "error", error=error)
        self.end_waiting("error", error)

    def end(
        self,
        flight: Flight,
        finish: Finish,
        *,
        generated: int | None = None,
        error: str | None = None,
    ) -> ReuseRecord:
        read = flight.prompt_read()
        committed, reason = flight.commit_result()
        ids = flight.all_ids()
        if generated is None:
            generated = flight.emitted
        record = ReuseRecord(
            id=flight.id or str(flight.uid),
            uid=flight.uid,
            time=round(time.time(), 3),
            model=flight.model,
            endpoint=flight.endpoint,
            prompt=flight.prompt,
            restored=flight.restored,
            source=flight.source,
            prefilled=max(0, read - flight.restored),
            new=max(0, read - max(flight.match.length, flight.restored)),
            generated=(
                max(0, (ids.size if ids is not None else 0) - read)
                if generated is None
                else generated
            ),
            committed=committed,
            reason=reason,
            finish=finish,
            common=flight.match.length,
            divergence=flight.match.divergence,
            shortfall=flight.shortfall,
            error=error,
            drafter=_drafter(flight),
        )
        if flight.seen is not None and ids is not None:
            self._remember(flight, flight.seen, ids, committed, reason)
        self.ledger.add(record)
        return record

    def _remember(
        self, flight: Flight, seen: Seen, ids: Ids, committed: int, reason: str | None
    ) -> None:
        seen.running = False
        seen.committed, seen.reason = committed, reason
        seen.dropped = flight.cache.evictions
        with self._lock:
            self.history.replace(seen, ids)
            earlier = flight.match.sequence
            contained = (
                earlier is not None
                and flight.match.length == earlier.ids.size <= ids.size
            )
            if (
                earlier is not None
                and contained
                and not earlier.running
                and earlier.salt == seen.salt
            ):
                self.history.drop(earlier)


def _draft_counts(draft_model: Any) -> tuple[int, float, int] | None:
    """Stock's life-time counters of a draft model: rounds, accepted, drafted."""
    if draft_model is None:
        return None
    return (
        int(getattr(draft_model, "speculative_total_rounds", 0)),
        float(getattr(draft_model, "speculative_total_accepted", 0.0)),
        int(getattr(draft_model, "speculative_total_drafted", 0)),
    )


def _drafter(flight: Flight) -> Drafter:
    now, before = _draft_counts(flight.draft_model), flight.draft_before
    if now is None:
        return Drafter()
    view, short = flight.draft_view, flight.shortfall
    reason = view.reason
    if reason is None and short is not None and short.reason == NOT_READ_BY_DRAFTER:
        reason = NOT_READ_BY_DRAFTER
    counts: tuple[int, int, int] | None = None
    own = flight.draft_figures
    if own is not None:
        counts = (own.rounds, own.drafted, own.accepted) if own.rounds else None
    elif before is not None and now[0] > before[0]:
        rounds, accepted, drafted = (
            after - earlier for after, earlier in zip(now, before, strict=True)
        )
        counts = (int(rounds), int(drafted), int(round(accepted)))
    rounds, drafted, accepted = counts or (None, None, None)
    return Drafter(
        loaded=True,
        kind=flight.draft_kind,
        restored=view.restored,
        primed=view.primed,
        reason=reason,
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        batching=getattr(own, "batching", None),
        batching_reason=getattr(own, "batching_reason", None),
    )
