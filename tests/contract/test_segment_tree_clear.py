"""A cleared tree gives its arrays back at once, without waiting for the cycle collector."""

from __future__ import annotations

import gc
import weakref

from mlx_vlm_cacheplus.core.segment_tree import SegmentTree


class _Payload:
    nbytes = 1

    def __init__(self, tokens: int):
        self.tokens = tokens

    def split(self, at: int):
        return _Payload(at), _Payload(self.tokens - at)


def test_clear_frees_payloads_without_the_collector():
    tree = SegmentTree()
    tree.insert((1, 2, 3, 4), _Payload(4))
    leaf = tree.insert((1, 2, 9), _Payload(1))
    seen = [weakref.ref(node.payload) for node in tree]
    on_path = [weakref.ref(node.payload) for node in leaf.path()]
    gc.disable()
    try:
        tree.clear()
        # Who still stands on a node keeps its whole path, and nothing else.
        alive = {ref() for ref in seen} - {None}
        assert alive == {ref() for ref in on_path}
        del leaf, alive
        assert [ref() for ref in seen] == [None] * len(seen)
    finally:
        gc.enable()
    assert tree.nbytes == 0
    tree.check_invariants()
