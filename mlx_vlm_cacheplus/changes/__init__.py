"""One module a change; each has `CHANGE`, an instance of a subclass of change.Change.

The order is the order of application. A name is its module's name with dashes.
"""

from __future__ import annotations

import importlib

from ..change import Change

ORDER: tuple[str, ...] = (
    # First: upstream can take it by itself.
    "warm-single-row",
    "row-positions",
    "recurrent-rows",
    "row-errors",
    "output-tokens",
    "reply-ids",
    "volatile-lines",
    "segment-tree",
    "drafted-replies",
    "draft-priming",
    "draft-state",
    "session-partitions",
    "shared-prefill",
    "undrafted-requests",
    "row-samplers",
    "tenant-isolation",
    "waiting-streams",
    "speculative-turns",
    "speculative-merge",
    "fair-queue",
    "durable-disk",
    # Last: it reads what the others leave behind.
    "reuse-record",
)


def module_name(name: str) -> str:
    return f"{__name__}.{name.replace('-', '_')}"


def load_changes() -> list[Change]:
    """Ours, in order. Imports no mlx."""
    return [importlib.import_module(module_name(name)).CHANGE for name in ORDER]
