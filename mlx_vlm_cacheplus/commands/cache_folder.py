"""Which folder on disk a `cache` command works on, and how much it may take: checked before anything is opened."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..changes.durable_disk import FOLDER, LIMIT, check_folder, check_gb
from ..core.disk_folder import ENTRIES
from ..core.disk_index import INDEX
from ..core.disk_settings import settings_of
from ..settings import UsageError, check_prefix_cache

# Of the stock's variables those that say where the folder is and how large; the others are the server's business.
ENABLED, PATH = "APC_DISK_ENABLED", "APC_DISK_PATH"
STOCKS = (ENABLED, PATH, "APC_DISK_MAX_GB", "MLX_VLM_CACHE_HOME")
ADVICE = "name a cache's folder with --disk DIR"


@dataclass(frozen=True)
class Place:
    """A folder that was asked for, and what it may take in bytes; None for no limit."""

    folder: Path
    max_bytes: int | None


def place_of(options: argparse.Namespace) -> Place:
    """What a server with the same settings would use.

    Raises:
        UsageError: a setting cannot be meant, in the words in which a server refuses it, or nothing is kept on disk.
    """
    stocks = {name: os.environ[name] for name in STOCKS if name in os.environ}
    check_prefix_cache(stocks, "the cache on disk")
    folder, named_by = _given("--disk", options.disk, FOLDER, check_folder)
    limit, _ = _given("--gb", options.gb, LIMIT, check_gb)
    try:
        found = settings_of(None, stocks, folder=folder, max_gb=limit)
    except RuntimeError:  # a "~name" that is no user's
        where = f"{named_by}={folder!r}" if folder else f"{PATH}={stocks.get(PATH)!r}"
        raise UsageError(f"{where}: there is no such user here: {ADVICE}") from None
    if found is not None:
        return Place(found.folder, found.max_bytes)
    if folder is None:
        named_by, folder = (
            (PATH, "") if stocks.get(PATH) == "" else (ENABLED, stocks.get(ENABLED))
        )
    raise UsageError(f"{named_by}={folder!r} keeps nothing on disk: {ADVICE}")


def _given(
    flag: str, value: str | None, variable: str, check: Callable[[str], None]
) -> tuple[str | None, str]:
    """The value and who gave it; the flag wins."""
    source = flag if value is not None else variable
    value = os.environ.get(variable) if value is None else value
    if value is not None:
        try:
            check(value)
        except ValueError as problem:
            raise UsageError(f"{source}={value!r}: {problem}") from None
    return value, source


def what_is_wrong(folder: Path) -> str:
    """Why there is nothing to look at, and what to do; empty where there is.

    Opening a store makes one, so that what only looks has to ask before.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        names = []
    except NotADirectoryError:
        return f"{folder} is not a folder: {ADVICE}"
    except OSError as fault:
        return f"{folder} cannot be looked into ({fault.strerror}): {ADVICE}"
    if INDEX in names or ENTRIES in names:
        return ""
    return f"there is no disk cache at {folder}: {ADVICE}; a server with --cacheplus makes one"
