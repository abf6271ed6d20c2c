"""Where a thread spends its time: samples of its Python stack.

Code that waits in native code (an evaluation, a copy to the host) counts for the line
that called it.  Sampling asks for the interpreter every few milliseconds, which costs
all sides the same.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

EVERY = 0.004  # seconds
WRITTEN_EVERY = 5.0
DEEP = 40  # frames of a sample


class Profiler:
    """Samples one thread, and writes what it saw every few seconds, so that what never
    ends is seen too.

    Args:
        folder: gets a file each time.
        more: adds to what is written; called in a thread of its own.
    """

    def __init__(self, folder: Path, more: Callable[[], dict[str, Any]]):
        self._folder = folder
        self._more = more
        self._stacks: Counter[tuple[str, ...]] = Counter()
        self._ident = 0

    def watch(self, ident: int) -> None:
        """Sample the thread of this identity from now on; call once."""
        self._ident = ident
        self._folder.mkdir(parents=True, exist_ok=True)
        for work in (self._sample, self._write):
            threading.Thread(target=work, daemon=True).start()

    def _sample(self) -> None:
        while True:
            time.sleep(EVERY)
            frame = sys._current_frames().get(self._ident)
            if frame is not None:
                self._stacks[stack_of(frame)] += 1

    def _write(self) -> None:
        for number in itertools.count():
            time.sleep(WRITTEN_EVERY)
            stacks, self._stacks = self._stacks, Counter()
            text = json.dumps({**self._more(), **shares(stacks)}, indent=1)
            file = self._folder / f"profile-{number:03d}.json"
            file.write_text(text, encoding="utf-8")


def stack_of(frame: FrameType | None) -> tuple[str, ...]:
    """The frames of a stack, the innermost first, each as file:line function."""
    frames: list[str] = []
    while frame is not None and len(frames) < DEEP:
        code = frame.f_code
        name = "/".join(Path(code.co_filename).parts[-2:])
        frames.append(f"{name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return tuple(frames)


def shares(stacks: Counter[tuple[str, ...]]) -> dict[str, Any]:
    """Samples, and how many of them each line ended, each function was in."""
    lines: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for stack, count in stacks.items():
        lines[stack[0]] += count
        for function in {_function(frame) for frame in stack}:
            functions[function] += count
    return {
        "samples": sum(stacks.values()),
        "lines": lines.most_common(40),
        "functions": functions.most_common(80),
        "stacks": [(count, stack[:14]) for stack, count in stacks.most_common(40)],
    }


def _function(frame: str) -> str:
    where, name = frame.split(" ", 1)
    return f"{where.rsplit(':', 1)[0]} {name}"
