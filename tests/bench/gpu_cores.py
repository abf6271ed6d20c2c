"""Which cores belong together, so that client and servers share none of their parts."""

from __future__ import annotations

import os
from pathlib import Path

CPU = Path("/sys/devices/system/cpu")


def parse(text: str) -> set[int]:
    """Cores of a list such as ``0-3,8``."""
    out: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        out |= set(range(int(first), int(last or first) + 1))
    return out


def siblings(core: int) -> set[int]:
    """All threads of this physical core, itself among them."""
    file = CPU / f"cpu{core}" / "topology" / "thread_siblings_list"
    try:
        return parse(file.read_text()) | {core}
    except (OSError, ValueError):
        return {core}


def halves(cores: set[int]) -> tuple[list[int], list[int]]:
    """Two halves of whole physical cores, in order."""
    groups = sorted({tuple(sorted(siblings(core) & cores)) for core in cores})
    middle = len(groups) // 2
    first, second = (
        sorted(core for group in half for core in group)
        for half in (groups[:middle], groups[middle:])
    )
    return first, second


def keep_apart() -> None:
    """Client on one half of the cores, servers (see ``gpu_server``) on the other."""
    if hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) >= 8:
        server, client = halves(os.sched_getaffinity(0))
        os.environ["BENCH_CORES"] = ",".join(map(str, server))
        os.sched_setaffinity(0, client)
