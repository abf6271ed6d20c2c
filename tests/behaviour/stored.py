"""What a storage manager holds, on stock's storage and on segment trees alike."""

from __future__ import annotations

from typing import Any


def stored(manager: Any) -> list[tuple[list[int], set[int]]]:
    """Key of each stored state or segment, and the lengths that its layers state."""
    segments = getattr(manager, "segments", None)
    if segments is None:
        return [
            (list(entry.token_ids), _offsets(entry.prompt_cache))
            for entry in manager._exact_cache.values()
        ]
    segments.check_invariants()
    out = []
    for tree in segments._trees.values():
        for node in tree:
            key = [i for part in node.path() for i in part.ids]
            held = {sum(part.payload.tokens for part in node.path())}
            out.append((key, held | _offsets(node.payload.states or ())))
    return out


def sessions(manager: Any) -> dict[str, Any]:
    """The sessions that a storage manager knows, by id: none where it knows of none."""
    policy = getattr(getattr(manager, "segments", None), "policy", None)
    return {session.id: session for session in getattr(policy, "table", {}).values()}


def leases(manager: Any) -> int:
    """Leases that requests hold."""
    segments = getattr(manager, "segments", None)
    blocks = sum(block.ref_cnt for block in getattr(manager, "pool", ()))
    return blocks + (segments.statistics()["leases"] if segments else 0)


def _offsets(layers: Any) -> set[int]:
    return {
        layer.offset
        for layer in layers
        if isinstance(getattr(layer, "offset", None), int)
    }
