"""The sessions of one segment cache: who they are, and what each stands on.

A request belongs, in this order, to the session that it names, if that is known; to
the one whose conversation it extends, if it names none or one that changes with every
request; and otherwise to a new one.  A name has proved that it stays once two requests
bore it.  A prompt extends a conversation if it contains a prompt that was answered
there, up to the place of the answer.

The table is bounded: beyond :data:`MOST` sessions the ones with a single request are
forgotten first, then the ones that were used least recently.  A forgotten session's
segments stay, and belong to nobody.

Who calls holds the cache's lock.  Names are those that clients sent; a session is
known by tenant and name, so that tenants cannot meet in one.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import session_policy
from .boundaries import message_starts
from .eviction import Loss, Policy
from .segment_tree import Match, Node, SegmentTree
from .session_policy import Claim

# Sessions that are remembered, and of these how many a segment remembers.
MOST = 256
MOST_PER_NODE = 64
# Requests of others after which a session has no share any more.
IDLE_AFTER = 128


@dataclass
class Session:
    """One conversation of an agent, or several under one name.

    Attributes:
        number: never used again; what nodes remember.
        name: as the client sent it; None where it sent none that stays.
        requests: how many it made, and ``named`` of them under its name.
        last_use: logical time of the last one, in requests of the server.
        last_time: the same in seconds since 1970.
        hits, restored: requests and tokens that the cache served.
    """

    number: int
    name: str | None
    tenant: str | None
    requests: int = 0
    named: int = 0
    last_use: int = 0
    last_time: float = 0.0
    hits: int = 0
    restored: int = 0
    pinned: bool = False

    @property
    def id(self) -> str:
        """What the endpoints call it."""
        return self.name or f"lineage-{self.number}"


@dataclass
class Request:
    """One request on its way from the server to the cache.

    Attributes:
        name, tenant: what its sender says.
        answered_at: the place in its prompt, in tokens, that a later prompt must
            contain to extend it; 0 while unknown.
        session: set at the first look-up.
        restored: tokens that the cache served.
    """

    name: str | None = None
    tenant: str | None = None
    answered_at: int = 0
    session: Session | None = None
    restored: int = 0


class Salt(int):
    """A salt that knows for which request it is used."""

    request: Request

    @classmethod
    def of(cls, salt: int, request: Request) -> Salt:
        """The same number, for this request."""
        own = cls(salt)
        own.request = request
        return own


class Sessions(Policy):
    """The policy of a segment cache that knows its sessions."""

    def __init__(self) -> None:
        self.table: dict[int, Session] = {}
        self._by_name: dict[tuple[str | None, str], Session] = {}
        self._numbers = itertools.count(1)
        self._clock = 0
        self._unnamed: tuple[int, Request] = (0, Request())
        self._asking: tuple[Session, int] | None = None

    # -- what the cache tells ----------------------------------------------------
    def asks(self, salt: int, match: Callable[[], Match]) -> None:
        """A prompt is looked up; a request that is looked up again counts once."""
        if not isinstance(salt, Salt):
            self._unnamed = (salt, Request())
        request = self._request(salt)
        if request.session is not None:
            return
        session = request.session = self._find(request, match())
        self._clock += 1
        session.requests += 1
        session.named += request.name is not None and request.name == session.name
        session.last_use, session.last_time = self._clock, time.time()

    def restores(self, salt: int, length: int) -> None:
        """So many tokens are restored for a request."""
        request = self._request(salt)
        session = request.session
        if session is not None:
            session.hits += not request.restored
            session.restored += length - request.restored
        request.restored = length

    @contextlib.contextmanager
    def wants(self, salt: int, match: Match, nbytes: int) -> Iterator[None]:
        """Room is made on behalf of a request's session while this is open."""
        self._asking = (self._session(salt, match), nbytes)
        try:
            yield
        finally:
            self._asking = None

    def stands(self, salt: int, path: Sequence[Node]) -> None:
        """A session has gone this way; its prompt was answered at one place of it."""
        number = self._session(salt, Match(tuple(path), path[-1].end)).number
        place = self._request(salt).answered_at
        for node in path:
            if number not in node.sessions:
                newest = sorted(node.sessions)[1 - MOST_PER_NODE :]
                node.sessions = frozenset((*newest, number))
            if node.start < place <= node.end and place not in node.turns:
                node.turns = tuple(sorted((*node.turns, place)))

    def cleared(self) -> None:
        """Nothing is held any more: nobody stands anywhere."""
        self.forget_all()

    def losses(self, trees: Collection[SegmentTree], budget: int) -> Iterator[Loss]:
        """See ``session_policy``."""
        session, wanted = self._asking or (None, 0)
        asking = None if session is None else session.number
        claims = self.claims(asking)
        return session_policy.losses(trees, claims, budget + wanted, asking, wanted)

    # -- what others ask ---------------------------------------------------------
    def claims(self, asking: int | None = None) -> dict[int, Claim]:
        """What the policy knows; a session has a share from its second request on."""
        return {
            number: Claim(s.last_use, number == asking or self.is_live(s), s.pinned)
            for number, s in self.table.items()
        }

    def is_live(self, session: Session) -> bool:
        """Whether it goes on, and was used lately."""
        idle = self._clock - session.last_use
        return session.requests > 1 and idle <= IDLE_AFTER

    def called(self, wanted: str) -> list[Session]:
        """The sessions with this id: of several tenants there may be several."""
        return [session for session in self.table.values() if session.id == wanted]

    def forget(self, session: Session) -> None:
        """Know this session no more."""
        self.table.pop(session.number, None)
        self._unname(session)

    def forget_all(self) -> None:
        """Know nobody any more."""
        self.table.clear()
        self._by_name.clear()
        self._unnamed = (0, Request())

    # -- whose a request is ------------------------------------------------------
    def _request(self, salt: int) -> Request:
        if isinstance(salt, Salt):
            return salt.request
        if self._unnamed[0] != salt:
            self._unnamed = (salt, Request())
        return self._unnamed[1]

    def _session(self, salt: int, match: Match) -> Session:
        """A request's session, also where it was not looked up, or forgotten since."""
        request = self._request(salt)
        if request.session is None or request.session.number not in self.table:
            request.session = self._find(request, match)
        return request.session

    def _find(self, request: Request, match: Match) -> Session:
        name, tenant = request.name, request.tenant
        known = self._by_name.get((tenant, name)) if name is not None else None
        if known is not None:
            return known
        # The same prompt under another name is another's, or a retry; a longer one goes on.
        before = match.length + 1 if name is None else request.answered_at
        extended = self._extended(match, before)
        if extended is None or extended.tenant != tenant:
            return self._open(name, tenant)
        if name is not None and extended.named > 1:
            return self._open(name, tenant)
        if name is not None:
            # A name that came once, and another that goes on with it: neither stays.
            self._unname(extended)
        return extended

    def _extended(self, match: Match, before: int) -> Session | None:
        """The session whose conversation a prompt goes on with, the last one there.

        before: places of answers count that are at most the match, and before this.
        """
        answered = any(
            turn <= match.length and turn < before
            for node in match.nodes
            for turn in node.turns
        )
        if not answered:
            return None
        here = (self.table.get(number) for number in match.nodes[-1].sessions)
        known = [session for session in here if session is not None]
        return max(known, key=lambda session: session.last_use, default=None)

    def _open(self, name: str | None, tenant: str | None) -> Session:
        while len(self.table) >= MOST:
            self.forget(min(self.table.values(), key=_dispensable))
        session = Session(next(self._numbers), name, tenant)
        session.last_use, session.last_time = self._clock, time.time()
        self.table[session.number] = session
        if name is not None:
            self._by_name[tenant, name] = session
        return session

    def _unname(self, session: Session) -> None:
        if session.name is not None:
            self._by_name.pop((session.tenant, session.name), None)
            session.name = None


def _dispensable(session: Session) -> tuple[bool, bool, int]:
    return session.pinned, session.requests > 1, session.last_use


def attach(manager: Any) -> None:
    """Let the segment cache of a storage manager know its sessions."""
    manager.segments.policy = Sessions()


def note_prompt(coordinator: Any, ids: Sequence[int], salt: int) -> None:
    """Say where in its prompt a request is answered: behind the last whole message."""
    if isinstance(salt, Salt):
        starts = message_starts(ids, getattr(coordinator, "special_ids", ()))
        salt.request.answered_at = starts[-1] if starts else len(ids)


def standing(
    trees: Collection[SegmentTree], known: Collection[int]
) -> dict[int, dict[str, float]]:
    """By session: tokens that it stands on, and bytes.

    Those of shared segments count in equal parts, so that all ``known`` sessions
    together hold what is there and has not been forgotten.
    """
    held = {number: {"tokens": 0, "bytes": 0.0, "shared": 0} for number in known}
    for tree in trees:
        for node in tree:
            here = [number for number in node.sessions if number in held]
            for number in here:
                held[number]["tokens"] += len(node.ids)
                held[number]["bytes"] += node.nbytes / len(here)
                held[number]["shared"] += node.nbytes if len(here) > 1 else 0
    return held
