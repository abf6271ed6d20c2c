"""Which cores belong together, so that two programs share none of their parts.

taskset -c $(python -m tests.bench.gpu_cores 1/2) ...    # the first half
taskset -c $(python -m tests.bench.gpu_cores 2/2) ...    # the second half
"""

from __future__ import annotations

import os
import sys
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


def share(cores: set[int], number: int, of: int) -> list[int]:
    """The ``number``-th of so many shares (from 1), whole physical cores in order."""
    groups = sorted({tuple(sorted(siblings(core) & cores)) for core in cores})
    begin = (number - 1) * len(groups) // of
    end = number * len(groups) // of
    return sorted(core for group in groups[begin:end] for core in group)


if __name__ == "__main__":
    number, _, of = sys.argv[1].partition("/")
    print(*share(os.sched_getaffinity(0), int(number), int(of)), sep=",")
