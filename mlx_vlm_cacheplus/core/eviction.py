"""Which part of a segment tree goes first when bytes are short.

Pure functions over nodes: no arrays, no clock of their own, no locks.

What is promised: what a request read or wrote last is what is kept, and no segment
that a request stands on goes.  The order:

1. *Superseded end states*: a newer state further down the same conversation covers
   the same text.  A node where conversations part is not superseded, since each
   branch may come back to it.  The sliceable layers of such a node stay.
2. *Leaves*, the least recently used first.  Their parents follow once they are
   leaves themselves, so a shared prefix outlives everything that stands on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from heapq import heapify, heappop, heappush

from .segment_tree import Match, Node, SegmentTree

# End states that one conversation keeps: the end of the system text, the last user
# message, the ends of the last prompts and replies, and places where it was left.
STATES_PER_PATH = 8
# Of these, how many of the newest stay however many places were left.
NEWEST = 4

Loss = tuple[str, SegmentTree, Node]
Queue = list[tuple[tuple[bool, int, int], int, SegmentTree, Node]]


class Policy:
    """What a segment cache tells whoever decides what goes first, and what it asks.

    This one decides by use alone, and needs to know nothing else.
    """

    def asks(self, salt: int, match: Callable[[], Match]) -> None:
        """A prompt is looked up; ``match`` says how far it follows the trees."""

    def restores(self, salt: int, length: int) -> None:
        """So many tokens of it are restored."""

    def wants(
        self, salt: int, match: Match, nbytes: int
    ) -> AbstractContextManager[None]:
        """Room for so many bytes is made on its behalf while this is open."""
        return nullcontext()

    def stands(self, salt: int, path: Sequence[Node]) -> None:
        """It has read this path, and the cache holds it."""

    def cleared(self) -> None:
        """The cache holds nothing any more."""

    def losses(self, trees: Collection[SegmentTree], budget: int) -> Iterator[Loss]:
        """What to lose until ``budget`` bytes are left, the cheapest first."""
        return losses(trees)


def losses(trees: Iterable[SegmentTree]) -> Iterator[Loss]:
    """What to lose, the cheapest first: ("state" or "leaf", its tree, its node).

    One walk over all nodes, then a logarithm of their number a loss.  The caller
    applies each loss before it asks for the next one.
    """
    number = itertools.count()
    entries = [(_age(n), next(number), tree, n) for tree in trees for n in tree]
    states: Queue = [e for e in entries if superseded(e[3])]
    leaves: Queue = [e for e in entries if may_go(e[3])]
    heapify(states)
    heapify(leaves)
    while states or leaves:
        if states:
            _, _, tree, node = heappop(states)
            # What superseded it may have gone since.
            if superseded(node):
                yield "state", tree, node
            continue
        _, _, tree, node = heappop(leaves)
        parent = node.parent
        yield "leaf", tree, node
        if parent is not None and may_go(parent):
            heappush(leaves, (_age(parent), next(number), tree, parent))
        for above in single_way_up(parent):
            if superseded(above):
                heappush(states, (_age(above), next(number), tree, above))


def surplus_states(path: list[Node], keep: int = STATES_PER_PATH) -> list[Node]:
    """Nodes of one path whose end states are beyond what a conversation keeps.

    The first state of the path, the newest ones and those where conversations part
    stay; of what lies between the shallowest go.
    """
    holding = [node for node in path if _has_state(node)]
    between = [node for node in holding[1:-NEWEST] if len(node.children) == 1]
    return between[: max(0, len(holding) - keep)]


def _has_state(node: Node) -> bool:
    return node.payload is not None and node.payload.states is not None


def may_go(node: Node) -> bool:
    return node.parent is not None and not node.children and not node.leases


def superseded(node: Node) -> bool:
    """A state with exactly one way on, and a newer state on that way."""
    return _has_state(node) and any(_has_state(n) for n in _single_way_down(node))


def _single_way_down(node: Node) -> Iterator[Node]:
    """The nodes below, as long as the way does not part."""
    while len(node.children) == 1:
        node = next(iter(node.children.values()))
        yield node


def single_way_up(node: Node | None) -> Iterator[Node]:
    """This node and those above it, as long as each has one child."""
    while node is not None and node.parent is not None and len(node.children) == 1:
        yield node
        node = node.parent


def _age(node: Node) -> tuple[bool, int, int]:
    """Least recently used first, of equals the deeper one; before all what is bare."""
    return node.nbytes > 0, node.last_use, -node.end
