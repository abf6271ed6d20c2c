"""The flag on the stock server's own parser, so that stock accepts it and its help text lists it.

Stock's main() builds its parser from the name `argparse` in `mlx_vlm.server.cli`. That one name is given a stand-in whose
ArgumentParser adds our options; argparse itself and every other user of it stay untouched. The values are not read here:
activation has read them before main() runs.
"""

from __future__ import annotations

import argparse
from typing import Any

from .change import Option, Target
from .patching import Patcher
from .settings import add_options

TARGET = Target("mlx_vlm.server.cli", "argparse")


class ServerParser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        add_options(self.add_argument_group("mlx-vlm-cacheplus"), _options())


def _options() -> list[Option]:
    """Those of all changes. Where they cannot be loaded, activation has said so, and the flag alone is accepted: the
    server then starts as stock instead of stumbling over its own command line."""
    try:
        from .plugins import all_changes

        return [option for change in all_changes() for option in change.options]
    except Exception:
        return []


class _Argparse:
    """argparse, with another ArgumentParser."""

    ArgumentParser = ServerParser

    def __getattr__(self, name: str) -> Any:
        return getattr(argparse, name)


def open_door(patcher: Patcher, owner: str) -> None:
    patcher.for_change(owner, (TARGET,)).set(
        TARGET.module, TARGET.qualname, _Argparse()
    )
