"""What goes first where a disk store is full: others' paths, then what the policy of RAM says.

The policy is :mod:`session_policy`, unchanged.  It is asked about a shadow of the rows: a
node for each span, with what belongs to it, and with the sessions that stand on it or
above it.  All that it goes by is in the index: whose an entry is, where prompts were
answered, and when it was written and used, on a clock that goes on after a restart.

A state inside a span's file cannot go without it, one that was kept later can.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from . import session_policy
from .disk_eviction import foreign_first, least_recently_used
from .disk_index import SPAN, STATE, Entry, split
from .session_policy import Claim
from .session_table import IDLE_AFTER

# What the store's clock counts in a turn: a look-up, a prompt, a reply, its spelling.
TICKS = 4

# Salt and session: a name belongs to whoever's salt it came with.
Owner = tuple[int, str]


@dataclass(frozen=True)
class Root:
    """What is known of a root that is served: its salt, and whether layers have states."""

    salt: int
    needs_states: bool


@dataclass(frozen=True)
class Asking:
    """On whose behalf room is made, for how many bytes, and on which entries they stand."""

    owner: Owner
    nbytes: int
    stands: Collection[int] = ()


@dataclass
class _Payload:
    states: list[int] | None


@dataclass(eq=False)
class _Node:
    """A span and what belongs to it, as the policy sees a segment."""

    parent: _Node | None = None
    numbers: list[int] = field(default_factory=list)
    nbytes: int = 0
    end: int = 0
    last_use: int = 0
    born: int = 0
    turns: tuple[int, ...] = ()
    sessions: frozenset[int] = frozenset()
    children: dict[int, _Node] = field(default_factory=dict)
    leases: int = 0
    payload: _Payload = field(default_factory=lambda: _Payload(None))
    # States that were kept later, by number: their bytes.
    later: dict[int, int] = field(default_factory=dict)
    keeps_state: bool = False


class _Tree:
    """The spans of one root; parents come before what stands on them."""

    def __init__(self, needs_states: bool):
        self.needs_states = needs_states
        self.root = _Node()
        self.nodes: dict[int, _Node] = {}

    def __iter__(self) -> Iterator[_Node]:
        return iter(list(self.nodes.values()))

    def add(self, entry: Entry) -> None:
        """Take in a span, or what belongs to one that is here."""
        if entry.kind == SPAN:
            parent = self.nodes.get(entry.parent, self.root)
            node = self.nodes[entry.number] = _Node(parent, end=entry.stop)
            parent.children[entry.number] = node
            node.born, node.turns = entry.born, tuple(split(entry.turns))
            node.keeps_state = bool(entry.has_state)
        elif (found := self.nodes.get(entry.parent)) is not None:
            node = found
            if entry.kind == STATE:
                node.later[entry.number] = entry.nbytes
        else:
            return
        node.numbers.insert(0, entry.number)
        node.nbytes += entry.nbytes
        node.last_use = max(node.last_use, entry.last_use)
        if node.keeps_state or node.later:
            node.payload.states = [node.end]

    def stand(self, number: int, session: int) -> None:
        """A session stands on this span and on all that is below it."""
        node: _Node | None = self.nodes.get(number)
        while node is not None and session not in node.sessions:
            node.sessions |= {session}
            node = node.parent

    def lose(self, kind: str, node: _Node) -> list[int]:
        """Apply a loss; returns the entries that go, the span last."""
        if kind == "state":
            gone = list(node.later)
            node.nbytes -= sum(node.later.values())
            node.later = {}
            node.numbers = [n for n in node.numbers if n not in gone]
            if not node.keeps_state:
                node.payload.states = None
            return gone
        assert node.parent is not None
        del node.parent.children[node.numbers[-1]]
        return node.numbers


def order(
    entries: Iterable[Entry],
    roots: Mapping[int, Root],
    budget: int,
    clock: int,
    asking: Asking | None = None,
    pinned: frozenset[str] = frozenset(),
) -> Iterator[int]:
    """Numbers of what goes first, children before their parents.

    Where nobody says what an answer is, prompts that nobody extended go first, and then
    what was used least recently.

    Args:
        roots: those that are served, by number; paths of others go before all else.
        budget: bytes that all share.
        clock: the store's time.
        asking: where its session is above its share, it takes none from those within.
        pinned: names of sessions that stay.
    """
    rows = sorted(entries, key=lambda entry: entry.number)
    yield from least_recently_used([e for e in rows if e.root not in roots])
    own = [entry for entry in rows if entry.root in roots]
    if not any(entry.turns for entry in own):
        yield from foreign_first(own, roots)
        return
    trees = {number: _Tree(root.needs_states) for number, root in roots.items()}
    numbers: dict[Owner, int] = {}
    for entry in own:
        trees[entry.root].add(entry)
        if entry.session:
            owner = roots[entry.root].salt, entry.session
            session = numbers.setdefault(owner, len(numbers))
            trees[entry.root].stand(entry.number, session)
    for number in asking.stands if asking else ():
        for nodes in (tree.nodes for tree in trees.values()):
            if number in nodes:
                nodes[number].leases += 1
    found = _claims(own, roots, numbers, clock, asking, pinned)
    wanted = 0 if asking is None else asking.nbytes
    who = None if asking is None else numbers.get(asking.owner)
    # The policy asks of trees and nodes what these have.
    shadow = cast(Any, list(trees.values()))
    for kind, tree, node in session_policy.losses(shadow, found, budget, who, wanted):
        yield from cast(Any, tree).lose(kind, node)


def _claims(
    own: Iterable[Entry],
    roots: Mapping[int, Root],
    numbers: dict[Owner, int],
    clock: int,
    asking: Asking | None,
    pinned: frozenset[str],
) -> dict[int, Claim]:
    """What the policy knows of the sessions, whose numbers these are."""
    if asking is not None and asking.owner[1]:
        numbers.setdefault(asking.owner, len(numbers))
    used: dict[int, int] = {}
    answers = dict.fromkeys(numbers.values(), 0)
    for entry in own:
        session = numbers.get((roots[entry.root].salt, entry.session))
        if session is not None:
            used[session] = max(used.get(session, 0), entry.last_use)
            if entry.turns and entry.kind == SPAN:
                answers[session] += 1 + entry.turns.count(",")
    claims = {}
    for owner, session in numbers.items():
        last_use = used.get(session, clock)
        live = answers[session] > 1 and clock - last_use <= TICKS * IDLE_AFTER
        asks = asking is not None and asking.owner == owner
        claims[session] = Claim(last_use, live or asks, owner[1] in pinned)
    return claims
