"""Which part of a segment tree goes first when bytes are short.

Pure functions over nodes: no arrays, no clock of their own, no locks.

What is promised: what a request read or wrote last is what is kept, and nothing that
a request stands on goes.  The order:

1. *Superseded end states*: a newer state further down the same conversation covers
   the same text.  A node where conversations part is not superseded, since each
   branch may come back to it.  The sliceable layers of such a node stay.
2. *Leaves*, the least recently used first.  Their parents follow once they are
   leaves themselves, so a shared prefix outlives everything that stands on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .segment_tree import Node

# End states that one conversation keeps: the end of the system text, the last user
# message, the ends of the last prompts and replies, and places where it was left.
STATES_PER_PATH = 8


def next_to_go(nodes: Iterable[Node]) -> tuple[str, Node] | None:
    """The cheapest loss: ("state", node), ("leaf", node), or None if all is in use."""
    states: list[Node] = []
    leaves: list[Node] = []
    for node in nodes:
        if node.children:
            if _superseded(node):
                states.append(node)
        elif not node.leases:
            leaves.append(node)
    if states:
        return "state", min(states, key=_age)
    if leaves:
        return "leaf", min(leaves, key=_age)
    return None


def surplus_states(path: list[Node], keep: int = STATES_PER_PATH) -> Iterator[Node]:
    """Nodes of one path whose end states are beyond what a conversation keeps.

    The first state of the path and the newest ones stay; what lies between goes, the
    shallowest first.
    """
    holding = [node for node in path if _has_state(node)]
    surplus = len(holding) - keep
    between = [node for node in holding[1:] if len(node.children) == 1]
    yield from between[: max(0, surplus)]


def _has_state(node: Node) -> bool:
    return node.payload is not None and bool(node.payload.states)


def _superseded(node: Node) -> bool:
    """A state with exactly one way on, and a newer state on that way."""
    if not _has_state(node) or len(node.children) != 1:
        return False
    below: Node | None = next(iter(node.children.values()))
    while below is not None:
        if _has_state(below):
            return True
        below = (
            next(iter(below.children.values())) if len(below.children) == 1 else None
        )
    return False


def _age(node: Node) -> tuple[int, int]:
    """Least recently used first; of equals the deeper one."""
    return node.last_use, -node.end
