"""Requests that begin alike read what they share once.

Agents that start together send one system text and the same tools, and the prefix cache
holds none of it yet: each of them would read it.  Here the first one reads it, the
*leader*.  The others, its *followers*, wait before their prompts are embedded, so that
they hold no device memory, and restore what the leader has read.

Invariants:

1. A follower waits for one leader at a time.  A leader is a row that the generator has
   already, or a request that goes there now: it waits for nobody, so there is no circle.
2. It waits until the leader's prompt is read, is cancelled or has failed, whatever comes
   first, and is then looked at again, before whatever came later.  What a cancelled
   leader has read stays in the cache, and the next one goes on from there.
3. It would not be read earlier without waiting: a generator prefills one batch at a
   time, and takes the shortest prompts first.  So a prompt that has not begun leads
   none that is shorter.
4. Nobody else waits.  Followers take no place of ``max_num_seqs``, and prompts that
   share less than :data:`~shared_prefixes.WORTH_WAITING` are admitted as they come.
5. Where the cache can be resumed at few places only (recurrent layers), the leader's
   prefill stops where its followers leave it, and keeps an end state there.

What is shared is looked for under one salt: never across tenants, nor across pictures.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import ref

from .shared_prefixes import Prompt, Row, best_leader

logger = logging.getLogger(__name__)


# -- the server's queue ----------------------------------------------------------------
def note_rows_at_work(server: Any, batch_gen: Any, active: dict[int, dict]) -> None:
    """Tell a server which rows are at work; call before each of its steps.

    Args:
        active: requests in flight by uid, each with its ``request_id``; borrowed.
    """
    server.rows_at_work = ref(batch_gen), active


def admit(
    server: Any,
    receive: Callable[..., tuple[list, bool]],
    *,
    active: bool,
    capacity: int | None,
    **options: Any,
) -> tuple[list, bool]:
    """Receive requests, and hold back those that follow another one.

    Args:
        server: the response generator; ``followers`` holds those that wait.
        receive: takes requests from the queue, at most ``capacity``; waits for one
            if not ``active``.
        active: whether rows are in flight.
        capacity: how many requests may be admitted; None for any number.
        options: passed on to ``receive``.

    Returns:
        The requests to be admitted in the order of their arrival, and whether to stop.
    """
    if not _can_share(server):
        return receive(active=active, capacity=capacity, **options)
    door = _Door(server, capacity)
    if door.waiting:
        door.let_in_followers()
    arrived: list[Any] = []
    should_stop = False
    room = door.room_beside(arrived)
    while room != 0:
        received, stop = receive(
            active=active or bool(door.admitted or arrived), capacity=room, **options
        )
        should_stop |= stop
        arrived += received
        if room is None or not received:
            break
        room = door.room_beside(arrived)  # those that wait leave it to others
        options.pop("coalesce_s", None)
    door.let_in(arrived)
    if server._stop and door.waiting:
        server.requests.put(None)  # the server's loop must not end without them
    return door.admitted, should_stop and not door.admitted and not door.waiting


def _can_share(server: Any) -> bool:
    return (
        getattr(server, "apc_mode", None) is not None
        and getattr(server.apc_manager, "segments", None) is not None
    )


class _Door:
    """One round of admission.

    Attributes:
        waiting: the server's followers, in order.
        admitted: requests that go to the generator now.
    """

    def __init__(self, server: Any, capacity: int | None):
        self._server = server
        self._capacity = capacity
        self.waiting: list[Prompt] = server.__dict__.setdefault("followers", [])
        self.admitted: list[Any] = []
        self._prompts: dict[int, Prompt] = {}
        self._line: list[tuple[Prompt, tuple[str, int] | None]] = []

    @functools.cached_property
    def _rows(self) -> dict[str, Row]:
        """By request id, what newcomers could follow."""
        return _rows_at_work(self._server)

    def let_in_followers(self) -> None:
        """Admit those whose leader is done, in order, or give them another leader."""
        for prompt in list(self.waiting):
            if self._capacity is not None and len(self.admitted) >= self._capacity:
                return
            if prompt.leader in self._rows and not self._server._stop:
                continue
            self.waiting.remove(prompt)
            self._seat(prompt, self._leader_of(prompt, self._rows))

    def room_beside(self, arrived: Sequence[Any]) -> int | None:
        """How many more may be received; None for any number."""
        if self._capacity is None:
            return None
        leading = sum(leader is None for _, leader in self._line_up(arrived))
        return max(0, self._capacity - len(self.admitted) - leading)

    def let_in(self, arrived: Sequence[Any]) -> None:
        """Admit requests that arrived together, but for those that follow another."""
        for prompt, leader in self._line_up(arrived):
            self._seat(prompt, leader)

    def _line_up(
        self, arrived: Sequence[Any]
    ) -> list[tuple[Prompt, tuple[str, int] | None]]:
        """Each of these requests and its leader: the shortest of a kind leads.

        A request that came alone is not looked at.  The same ones are lined up once.

        Args:
            arrived: in order; in one round it only grows.
        """
        if len(arrived) > len(self._line):
            self._line = self._lined_up(arrived)
        return self._line

    def _lined_up(
        self, arrived: Sequence[Any]
    ) -> list[tuple[Prompt, tuple[str, int] | None]]:
        prompts = [
            self._prompts.setdefault(id(request), _prompt_of(request))
            for request in arrived
        ]
        if len(prompts) == 1 and not self._rows:
            return [(prompts[0], None)]
        rows = dict(self._rows)
        leaders = {}
        for prompt in sorted(prompts, key=lambda p: p.request.prompt_tokens):
            leaders[id(prompt)] = leader = self._leader_of(prompt, rows)
            if leader is None:
                rows[_name(prompt)] = Row(prompt)
        return [(prompt, leaders[id(prompt)]) for prompt in prompts]

    def _seat(self, prompt: Prompt, leader: tuple[str, int] | None) -> None:
        if leader is None:
            self._rows[_name(prompt)] = Row(prompt)
            self.admitted.append(prompt.request)
            return
        prompt.leader, saved = leader
        self.waiting.append(prompt)
        logger.info(
            "Prefill waits: request=%s for request=%s, which reads %d of its %d tokens",
            _name(prompt),
            prompt.leader,
            saved,
            len(prompt.ids),
        )

    def _leader_of(
        self, prompt: Prompt, rows: dict[str, Row]
    ) -> tuple[str, int] | None:
        """The request that this one should wait for; a fault here holds nobody up."""
        from mlx_vlm.apc import multimodal_token_ids_from_config

        server = self._server
        if server._stop:
            return None
        try:
            model = getattr(server.model, "language_model", server.model)
            media = multimodal_token_ids_from_config(model.config)
            return best_leader(server.apc_manager, prompt, rows, media)
        except Exception as error:
            logger.warning("Nothing is shared: %s", error, exc_info=True)
            return None


def _prompt_of(request: Any) -> Prompt:
    return Prompt(
        lambda: request.raw_inputs["input_ids"].reshape(-1).tolist(),
        request.apc_semantic_hash,
        request,
    )


def _name(prompt: Prompt) -> str:
    return prompt.request.request_id


def _rows_at_work(server: Any) -> dict[str, Row]:
    """By request id, the rows whose prompts have not been read yet."""
    if not hasattr(server, "rows_at_work"):
        return {}
    generator_of, active = server.rows_at_work
    generator = generator_of()
    if getattr(generator, "apc", None) is None:
        return {}
    return {
        str(active[uid].get("request_id")): row
        for uid, row in _rows_of(generator)
        if uid in active
    }


def _rows_of(generator: Any) -> Iterator[tuple[int, Row]]:
    """Rows of a generator that are not decoding, by uid."""
    for entry in generator._unprocessed_sequences:
        yield entry[0], Row(_queued(entry))
    batch = generator._prompt_batch
    if batch is None:
        return
    for index, (uid, meta) in enumerate(zip(batch.uids, batch._apc_meta, strict=False)):
        if meta is not None:
            ids = functools.partial(meta.get, "full_input_ids")
            done = batch._row_real_tokens_processed(index)
            stops = (
                meta.get("checkpoint_lengths")
                if batch._apc_uses_checkpoints()
                else None
            )
            yield uid, Row(Prompt(ids, meta.get("extra_hash")), done, stops)


def _queued(entry: tuple) -> Prompt:
    """The prompt of a generator's queue entry."""
    salt = (entry[3] or {}).get("_apc_semantic_hash")
    return Prompt(lambda: entry[1], salt)


# -- the generator's queue -------------------------------------------------------------
@contextlib.contextmanager
def rows_that_share_nothing(generator: Any) -> Iterator[None]:
    """Let one step of a generator admit no row that follows another one of its batch.

    Rows reach its queue at different times, a shorter one behind a longer one: these
    have been embedded already, and wait here.

    Args:
        generator: a batch generator about to take a step; its queue is put in another
            order, and ``prefill_batch_size`` is changed for this step alone.
    """
    size = generator.prefill_batch_size
    queue = generator._unprocessed_sequences
    if len(queue) > 1 and size > 1 and _shares(generator):
        later = _followers_among(generator, queue[:size])
        if later:
            first = [entry for entry in queue[:size] if entry[0] not in later]
            behind = [entry for entry in queue[:size] if entry[0] in later]
            generator._unprocessed_sequences = [*first, *behind, *queue[size:]]
            generator.prefill_batch_size = len(first)
    try:
        yield
    finally:
        generator.prefill_batch_size = size


def _shares(generator: Any) -> bool:
    """Whether rows could be admitted, and restore what others have read."""
    manager = getattr(generator, "apc_manager", None)
    return (
        generator._prompt_batch is None
        and getattr(manager, "segments", None) is not None
    )


def _followers_among(generator: Any, entries: Sequence[tuple]) -> set[int]:
    """The uids of queue entries that share with another one of them.

    Found once for the same entries and the same content of the cache: rows may wait
    for many steps until there is room for them.
    """
    held = generator.apc_manager.segments
    state = [entry[0] for entry in entries], held.stored_tokens, held.evictions
    known = getattr(generator, "followers_among", None)
    if known is not None and known[0] == state:
        return known[1]
    media = generator._apc_media_token_ids()
    rows: dict[int, Row] = {}
    later = set()
    for entry in sorted(entries, key=lambda entry: len(entry[1])):
        prompt = _queued(entry)
        try:
            follows = best_leader(generator.apc_manager, prompt, rows, media)
        except Exception as error:
            logger.warning("Nothing is shared: %s", error, exc_info=True)
            follows = None
        if follows is None:
            rows[entry[0]] = Row(prompt)
        else:
            later.add(entry[0])
    generator.followers_among = state, later
    return later
