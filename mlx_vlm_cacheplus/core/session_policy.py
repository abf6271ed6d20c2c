"""Who goes first when bytes are short and several sessions share the cache.

Pure functions over nodes: no arrays, no clock of their own, no locks.

The order; within a class what was used least recently goes first:

1. *Superseded end states* (see ``eviction``): no conversation needs them.
2. *Segments that nobody can resume*: leaves that hold nothing or, where layers need an
   end state, have none.  Losing one costs nobody a token.
3. *Dead branches*: a turn that was rewritten.  Each session that went this way has
   since begun another branch at the same place, inside a conversation, and has not
   come back.
4. *Prompts that nobody extended*, such as requests for a title or a topic.
5. Segments of no session, or of *idle* ones.
6. Sessions above their *fair share*, the one that was used least recently first.
7. Sessions within it, in the same order.
8. Segments on which several live sessions stand.
9. What is *pinned* stays, and so does a segment that a request stands on.

The fair share is one level for all: each session has what it asks for, up to the level
at which the budget is used up.  So what one does not use is lent to others, and is called
back from those above the level when it asks.  A session asks with what it holds and
with the bytes for which room is made on its behalf.

What is promised:

- With a budget of at least the working set, what live conversations stand on and the
  request in flight, nobody reads a token again: classes 1 to 5 hold all the rest.
- Below it, a session that asks for no more than the level loses nothing to one that
  asks for more: room for a session above the level is never taken from classes 7 and
  8.  What does not fit then is not stored, and is its own loss.
- Where one prompt that is not extended fits beside what the others stand on, any number
  of them displaces nobody else.

What is not: a conversation's first prompt is no different from one that will not be
extended, until its second turn; and who names himself anew in each conversation counts
as many.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from .eviction import Loss, may_go, single_way_up, superseded
from .segment_tree import Node, SegmentTree

USELESS, DEAD, UNEXTENDED, IDLE, ABOVE, WITHIN, SHARED = range(7)
Key = tuple[int, int, int, int]


@dataclass
class Claim:
    """What the policy knows of a session.

    Attributes:
        last_use: logical time of its last request.
        live: whether it has a share; idle sessions have none.
        pinned: whether what it stands on stays.
        nbytes: what it asks for, filled in by the policy.
    """

    last_use: int
    live: bool = True
    pinned: bool = False
    nbytes: float = 0.0


@dataclass
class _Plan:
    """What one walk over all nodes has found out."""

    claims: Mapping[int, Claim]
    budget: int
    level: float = -1.0
    settled: bool = False
    dead: set[int] = field(default_factory=set)
    turns: dict[int, int] = field(default_factory=dict)

    def live(self, node: Node) -> list[Claim]:
        """The live sessions that stand on a node."""
        found = (self.claims.get(number) for number in node.sessions)
        return [claim for claim in found if claim is not None and claim.live]

    def may_go(self, node: Node) -> bool:
        """A leaf without leases and pins."""
        return may_go(node) and not any(
            self.claims[n].pinned for n in node.sessions if n in self.claims
        )

    def key(self, tree: SegmentTree, node: Node) -> Key:
        """Class and age of a leaf; while others go, it changes to a later one at most.

        Before the level is drawn, a session counts as above it.
        """
        if not node.nbytes or tree.needs_states and node.payload.states is None:
            return USELESS, 0, node.last_use, -node.end
        if id(node) in self.dead:
            return DEAD, 0, node.last_use, -node.end
        live = self.live(node)
        if len(live) > 1:
            return SHARED, 0, node.last_use, -node.end
        if self.turns[id(node)] <= 1:
            return UNEXTENDED, 0, node.last_use, -node.end
        if not live:
            return IDLE, 0, node.last_use, -node.end
        place = ABOVE if live[0].nbytes > self.level else WITHIN
        return place, live[0].last_use, node.last_use, -node.end

    def give_back(self, node: Node, nbytes: int) -> None:
        """So many bytes of a node have gone: its sessions hold less."""
        live = self.live(node)
        for claim in live:
            claim.nbytes -= nbytes / len(live)

    def settle(self) -> None:
        """Draw the level at what the sessions ask for now; once."""
        live = [claim.nbytes for claim in self.claims.values() if claim.live]
        self.level = fair_level(live, self.budget)
        self.settled = True

    def asks_too_much(self, session: int | None) -> bool:
        """Whether a session is above the level."""
        claim = None if session is None else self.claims.get(session)
        return claim is not None and claim.nbytes > self.level


def losses(
    trees: Collection[SegmentTree],
    claims: Mapping[int, Claim],
    budget: int,
    asking: int | None = None,
    wanted: int = 0,
) -> Iterator[Loss]:
    """What to lose, the cheapest first: ("state" or "leaf", its tree, its node).

    One walk over all nodes, then a logarithm of their number a loss.  The caller
    applies each loss before it asks for the next one.

    Args:
        claims: the sessions by number; their ``nbytes`` are overwritten.
        budget: bytes that all sessions share.
        asking: the session on whose behalf room is made, or None.
        wanted: bytes that it is about to add.
    """
    plan = _survey(trees, claims, budget, asking, wanted)
    number = itertools.count()
    nodes = [(tree, node) for tree in trees for node in tree]
    states = [
        ((n.last_use, -n.end), next(number), t, n) for t, n in nodes if superseded(n)
    ]
    leaves = [(plan.key(t, n), next(number), t, n) for t, n in nodes if plan.may_go(n)]
    heapify(states)
    heapify(leaves)
    while states or leaves:
        if states:
            _, _, tree, node = heappop(states)
            # What superseded it may have gone since.
            if superseded(node):
                before = node.nbytes
                yield "state", tree, node
                plan.give_back(node, before - node.nbytes)
            continue
        known, _, tree, node = heappop(leaves)
        if known[0] >= ABOVE and not plan.settled:
            # What nobody needs has gone; what is left is what the sessions ask for.
            plan.settle()
        key = plan.key(tree, node)
        if key > known:
            heappush(leaves, (key, next(number), tree, node))
            continue
        if key[0] >= WITHIN and plan.asks_too_much(asking):
            return
        parent = node.parent
        plan.give_back(node, node.nbytes)
        yield "leaf", tree, node
        if parent is not None and plan.may_go(parent):
            heappush(leaves, (plan.key(tree, parent), next(number), tree, parent))
        for above in single_way_up(parent):
            if superseded(above):
                age = (above.last_use, -above.end)
                heappush(states, (age, next(number), tree, above))


def fair_level(asked: Iterable[float], budget: float) -> float:
    """The most that each may have, so that together they have ``budget``.

    Who asks for less has what it asks for, and the rest is shared by the others.
    Infinite where all that is asked for fits.
    """
    rest = budget
    ascending = sorted(asked)
    for place, nbytes in enumerate(ascending):
        share = rest / (len(ascending) - place)
        if nbytes > share:
            return max(0.0, share)
        rest -= nbytes
    return float("inf")


def _survey(
    trees: Iterable[SegmentTree],
    claims: Mapping[int, Claim],
    budget: int,
    asking: int | None,
    wanted: int,
) -> _Plan:
    plan = _Plan(claims, budget)
    for claim in claims.values():
        claim.nbytes = 0.0
    for tree in trees:
        plan.turns[id(tree.root)] = 0
        for node in tree:
            parent = node.parent
            assert parent is not None
            before = plan.turns[id(parent)]
            plan.turns[id(node)] = before + len(node.turns)
            if id(parent) in plan.dead:
                plan.dead.add(id(node))
            if len(node.children) > 1 and plan.turns[id(node)]:
                plan.dead.update(map(id, _left_for_good(node)))
            live = plan.live(node)
            for claim in live:
                claim.nbytes += node.nbytes / len(live)
    if asking is not None and asking in claims:
        claims[asking].nbytes += wanted
    return plan


def _left_for_good(fork: Node) -> list[Node]:
    """The branches of a fork that each of their sessions left for a newer one."""
    children = fork.children.values()
    newest: dict[int, int] = {}
    for child in children:
        for number in child.sessions:
            newest[number] = max(newest.get(number, 0), child.born)
    anybody = max(child.born for child in children)
    return [
        child
        for child in children
        if child.last_use < min((newest[n] for n in child.sessions), default=anybody)
    ]
