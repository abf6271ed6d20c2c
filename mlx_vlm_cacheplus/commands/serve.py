"""The door for an installation whose start-up file is not read, and for those who prefer a command."""

from __future__ import annotations

import os
import sys

from .. import activate
from .._startup import ENV, SERVER
from ..settings import FLAG, UsageError, exit_with


def run(words: list[str]) -> int:
    """Become the stock server: its main(), with its name and its arguments."""
    asked = any(word == FLAG or word.startswith(FLAG + "=") for word in words)
    if not asked and not os.environ.get(ENV, "").strip():
        words = [FLAG, *words]
    sys.argv = [SERVER, *words]
    try:
        activate(defer=True)
        from mlx_vlm.server import main
    except UsageError as problem:
        exit_with(problem)
    except ImportError as problem:
        exit_with(UsageError(f"the stock server cannot be imported: {problem}"))
    return main() or 0
