"""A compressed prefix tree over token ids; what a node stores is not its business.

A node is one *segment*: the span of tokens that one prefill or one reply added.  The
tree finds, adds, splits, joins and removes spans.  It knows neither arrays nor
policies: a payload brings ``split``, ``join`` and ``nbytes`` (see ``segments``), and
``eviction`` decides what goes.

Invariants, checked by :meth:`SegmentTree.check_invariants`:

1. A node's span is not empty, and starts where its parent's ends.
2. No two children of a node start with the same token, so a prompt has one path.
3. A node's payload covers exactly its span.
4. ``nbytes`` of the tree is the sum over its nodes, each counted once.
5. A leased node and its ancestors stay: only a leaf without leases can be removed.

Worked example::

    tree = SegmentTree()
    tree.insert((1, 2, 3, 4), payload)        # root -> [1 2 3 4]
    tree.insert((1, 2, 9), payload)           # root -> [1 2] -> [3 4]
                                              #             \\-> [9]
    tree.match((1, 2, 3, 7)).length           # 3: all of [1 2], one token of [3 4]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


class Node:
    """One segment: a span of token ids and the payload that covers it.

    Attributes:
        ids: the span's token ids; empty only for the root.
        start: tokens before the span on the path from the root.
        payload: owned; None for the root.
        leases: how many requests stand on this node.
        last_use: logical time of the last match or commit that passed here.
        born: logical time at which the branch that starts here was added.
        turns: places in the span at which a prompt was answered, in tokens of the
            path, ascending.
        sessions: numbers of the sessions that went this way; see ``session_table``.
        stored: what a slower tier has of the path down to here, or None; its business.
    """

    __slots__ = (
        "parent",
        "children",
        "ids",
        "start",
        "payload",
        "leases",
        "last_use",
        "born",
        "turns",
        "sessions",
        "stored",
    )

    def __init__(self, parent: Node | None, ids: tuple[int, ...], payload: Any):
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.ids = ids
        self.start = 0 if parent is None else parent.end
        self.payload = payload
        self.leases = 0
        self.last_use = 0
        self.born = 0
        self.turns: tuple[int, ...] = ()
        self.sessions: frozenset[int] = frozenset()
        self.stored: Any = None

    @property
    def end(self) -> int:
        """Tokens on the path up to and including this span."""
        return self.start + len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return 0 if self.payload is None else self.payload.nbytes

    def path(self) -> list[Node]:
        """Nodes from below the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True)
class Match:
    """How far a prompt follows the tree.

    Attributes:
        nodes: the path; every node but the last is matched whole.
        length: tokens that the prompt shares with the path.
    """

    nodes: tuple[Node, ...]
    length: int

    def whole_nodes(self) -> list[Node]:
        """Nodes of which no token is missing."""
        return [node for node in self.nodes if node.end <= self.length]


class Lease:
    """Keeps a path from removal while a request uses it; releases once."""

    def __init__(self, node: Node):
        self._node: Node | None = node
        node.leases += 1

    def release(self) -> None:
        """Give the path up; further calls do nothing."""
        if self._node is not None:
            self._node.leases -= 1
            self._node = None

    def __del__(self) -> None:
        self.release()


class SegmentTree:
    """The tree of one identity; see the module's text for its invariants.

    Args:
        needs_states: whether a path can be resumed only where a payload has ``states``.
    """

    def __init__(self, needs_states: bool = False) -> None:
        self.root = Node(None, (), None)
        self.nbytes = 0
        self.needs_states = needs_states

    def __iter__(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def match(self, ids: Sequence[int]) -> Match:
        """Follow ``ids`` from the root; a walk over integers."""
        ids = tuple(ids)
        nodes: list[Node] = []
        length = 0
        node = self.root
        while length < len(ids):
            child = node.children.get(ids[length])
            if child is None:
                break
            nodes.append(child)
            shared = common_prefix(child.ids, ids[length : length + len(child.ids)])
            length += shared
            if shared < len(child.ids):
                break
            node = child
        return Match(tuple(nodes), length)

    def node_at(self, ids: Sequence[int]) -> Node | None:
        """The node that ends exactly where ``ids`` end; splits a span if it must."""
        found = self.match(ids)
        if found.length < len(ids) or not found.nodes:
            return None
        node = found.nodes[-1]
        return node if node.end == len(ids) else self.split(node, len(ids) - node.start)

    def insert(self, ids: Sequence[int], payload: Any) -> Node:
        """Add the span of ``ids`` that the tree lacks.

        Args:
            ids: the whole path; at least one token of it is new.
            payload: covers the new span; the tree takes it.

        Returns:
            The new leaf.
        """
        found = self.match(ids)
        new = tuple(ids[found.length :])
        if not new:
            raise ValueError("nothing to insert: the tree has this path")
        parent = found.nodes[-1] if found.nodes else self.root
        if parent.end > found.length:
            parent = self.split(parent, found.length - parent.start)
        leaf = Node(parent, new, payload)
        parent.children[new[0]] = leaf
        self.nbytes += leaf.nbytes
        return leaf

    def split(self, node: Node, at: int) -> Node:
        """Cut a span after ``at`` of its tokens.

        Returns:
            The new node that covers the head.  ``node`` itself keeps the tail, its
            children and its leases, so that whoever stands on it stands where it did.
        """
        if not 0 < at < len(node.ids) or node.parent is None:
            raise ValueError(f"cannot split a span of {len(node.ids)} tokens at {at}")
        before = node.nbytes
        head_payload, node.payload = node.payload.split(at)
        head = Node(node.parent, node.ids[:at], head_payload)
        head.last_use, head.born = node.last_use, node.born
        head.sessions, head.stored = node.sessions, node.stored
        head.turns = tuple(turn for turn in node.turns if turn <= head.end)
        node.turns = node.turns[len(head.turns) :]
        node.parent.children[head.ids[0]] = head
        node.ids = node.ids[at:]
        node.parent, node.start = head, head.end
        head.children[node.ids[0]] = node
        self.nbytes += head.nbytes + node.nbytes - before
        return head

    def join(self, node: Node) -> None:
        """Let a node take over the span of its parent, whose only child it is."""
        parent = node.parent
        if parent is None or parent.parent is None or len(parent.children) != 1:
            raise ValueError("only the single child of a node below the root can join")
        before = parent.nbytes + node.nbytes
        node.payload = parent.payload.join(node.payload)
        node.ids = parent.ids + node.ids
        node.parent, node.start = parent.parent, parent.start
        node.leases += parent.leases
        node.turns = parent.turns + node.turns
        node.born = parent.born
        node.stored = node.stored or parent.stored
        node.parent.children[node.ids[0]] = node
        self.nbytes += node.nbytes - before

    def remove(self, node: Node) -> int:
        """Remove a leaf that nobody stands on; returns the bytes it held."""
        if node.children or node.leases or node.parent is None:
            raise ValueError("only a leaf without leases can be removed")
        freed = node.nbytes
        del node.parent.children[node.ids[0]]
        node.parent = None
        self.nbytes -= freed
        return freed

    def clear(self) -> None:
        """Remove every node.

        The way down is cut, so that arrays are freed with the last reference and not
        by the next collection of cycles; whoever stands on a node keeps its path.
        """
        for node in list(self):
            node.children.clear()
        self.root.children.clear()
        self.nbytes = 0

    def update(self, node: Node, change: Callable[[Any], None]) -> int:
        """Change a node's payload in place; returns by how many bytes it grew."""
        before = node.nbytes
        change(node.payload)
        self.nbytes += node.nbytes - before
        return node.nbytes - before

    def check_invariants(self) -> None:
        """Raise AssertionError where an invariant of the module's text is broken."""
        total = 0
        for node in self:
            parent = node.parent
            assert parent is not None and node.ids, "1: empty span"
            assert node.start == parent.end, "1: span does not follow its parent"
            assert parent.children.get(node.ids[0]) is node, "2: two paths"
            assert node.payload.tokens == len(node.ids), "3: payload covers its span"
            assert node.leases >= 0, "5: released twice"
            assert all(node.start < t <= node.end for t in node.turns), "turn outside"
            total += node.nbytes
        assert total == self.nbytes, f"4: {self.nbytes} bytes counted, {total} held"


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix, in tokens; halves it with whole compares."""
    a, b = tuple(a), tuple(b)
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def should_join(upper: Node, lower: Node) -> bool:
    """Whether a node and its parent are better one: for nobody else stops between."""
    return (
        upper.parent is not None
        and len(upper.children) == 1
        and upper.payload.states is None
        and upper.payload.may_join(lower.payload)
        and not upper.leases
        and (len(upper.ids) < 2 * len(lower.ids) or not upper.nbytes)
    )
