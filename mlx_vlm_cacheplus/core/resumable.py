"""Where a prompt can be resumed, of what a match has found.

A length is restorable if the path to it holds every sliceable layer and, where the
model has other layers, the segment that ends there holds their end states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .companions import CompanionView
from .segment_layers import STATE
from .segment_tree import Lease, Match, Node


@dataclass
class Hit:
    """A prefix that can be restored.

    Attributes:
        node: the last segment that holds it, which may reach further.
        length: its length in tokens.
        layout: how each leaf of the cache is stored.
        states: the end states there, which the tree may drop meanwhile.
        lease: keeps the path until the request has taken in what it added.
    """

    node: Node
    length: int
    layout: tuple
    states: list[Any] | None
    lease: Lease

    def release(self) -> None:
        """Give the path up; further calls do nothing."""
        self.lease.release()


def _restorable(found: Match, layout: tuple) -> Iterator[tuple[int, Node]]:
    """Restorable lengths of a match with the nodes that hold them."""
    if STATE not in layout:
        if found.nodes:
            yield found.length, found.nodes[-1]
        return
    for node in found.whole_nodes():
        if node.payload.states is not None:
            yield node.end, node


def resumable(
    found: Match, layout: tuple, companion: CompanionView | None
) -> Iterator[tuple[int, Node]]:
    """Restorable lengths of a match that its companion can be resumed at as well."""
    for length, node in _restorable(found, layout):
        if companion is None:
            yield length, node
            continue
        exact = STATE in layout
        both = companion.resumable(node.path(), length, exact)
        if both > 0:
            yield both, node
