"""The cache survives: a second tier on disk, whole, private and named by content."""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any

from ..change import Change, Option, Target

AR = "mlx_vlm.generate.ar"
APC = "mlx_vlm.apc"
APP = "mlx_vlm.server.app"
SERVER = "mlx_vlm.server.generation"
FOLDER = "MLX_VLM_CACHEPLUS_DISK"
LIMIT = "MLX_VLM_CACHEPLUS_DISK_GB"
SYNC = "MLX_VLM_CACHEPLUS_DISK_SYNC"


def check_folder(text: str) -> None:
    """Raise ValueError for a folder that cannot be meant."""
    if not text.strip():
        raise ValueError("name a folder, or off")


def check_gb(text: str) -> None:
    """Raise ValueError for what is no size."""
    try:
        fits = 0 <= float(text) * (1 << 30) < float("inf")
    except ValueError:
        fits = False
    if not fits:
        raise ValueError("a number of GB of at least 0; 0 is no limit")


def check_sync(text: str) -> None:
    """Raise ValueError for what is neither never nor reply."""
    from ..core.disk_settings import is_sync

    is_sync(text)


def settings(overrides: Any) -> Any:
    """What options, variables and the stock's settings say together; None for no disk tier."""
    from ..core.disk_settings import settings_of

    return settings_of(
        overrides,
        folder=os.environ.get(FOLDER),
        max_gb=os.environ.get(LIMIT),
        sync=os.environ.get(SYNC),
    )


def describe_disk(overrides: Any) -> str:
    """Folder, limit and what waits for it, for the start-up line, or off."""
    from ..core.disk_settings import size_text

    found = settings(overrides)
    if found is None:
        return "off"
    size = size_text(found.max_bytes) if found.max_bytes else "no limit"
    line = f"{found.folder}, {size}{', ends of replies wait' if found.sync else ''}"
    refused = reason_refused(found.folder)
    return f"{line}, not used: {refused}" if refused else line


def reason_refused(folder: Any) -> str | None:
    """Why nothing would be kept in a folder, and what to do; nothing is made there."""
    from ..core.disk_folder import Folder
    from ..core.disk_index import INDEX

    return Folder(folder, INDEX).reason_refused()


class DurableDisk(Change):
    name = "durable-disk"
    summary = (
        "The prefix cache survives restarts: one file a segment, written once, behind the requests, checked when it is "
        "read, and never used for other weights"
    )
    targets = (
        Target(APC, "from_env"),
        Target(APC, "APCManager.close"),
        Target(APC, "APCManager.stats_snapshot"),
        Target(AR, "BatchGenerator.insert"),
        Target(AR, "BatchGenerator.next"),
        Target(AR, "PromptProcessingBatch.prompt_step"),
        Target(AR, "PromptProcessingBatch.generate"),
        Target(SERVER, "ResponseGenerator._initialize_model"),
        Target(SERVER, "ResponseGenerator._collect_pending_requests"),
        Target(SERVER, "ResponseGenerator._step"),
        Target(SERVER, "_TokenIterator.__next__"),
        Target(APP, "app"),
    )
    why = (
        "Stock's disk tier knows a model by its path, so other weights under that path are served the old ones' keys and "
        "values. It writes a hybrid model's whole state again with every turn, checks nothing that it reads, forces nothing "
        "to the medium, lets other users read it, and makes requests wait for its writes."
    )
    upstream = "no issue yet; related: https://github.com/Blaizzy/mlx-vlm/issues/1629"
    remove_when = "the segment tree has a disk tier"
    requires = ("segment-tree",)
    patch_requires = ("reply-ids", "draft-state", "session-partitions")
    marks = ("mlx_vlm.disk_tier:DiskTier",)
    options = (
        Option(
            "--cacheplus-disk",
            FOLDER,
            "Folder in which the prefix cache survives restarts, or off. Default: segments in MLX_VLM_CACHE_HOME.",
            "DIR",
            check_folder,
            # Stock's disk tier would keep it where this change is left out or cannot be applied.
            {"off": {"APC_DISK_ENABLED": "0"}},
        ),
        Option(
            "--cacheplus-disk-gb",
            LIMIT,
            "What that folder may take, in GB of 2**30 bytes; 0 is no limit. Default: APC_DISK_MAX_GB, or 20.",
            "GB",
            check_gb,
        ),
        Option(
            "--cacheplus-disk-sync",
            SYNC,
            "Whether the end of a reply waits, for 1 s at most, until the reply is written there: never or reply. Default: "
            "APC_DISK_SYNC, or never.",
            "WHEN",
            check_sync,
        ),
    )
    # Another change turns stock's own disk tier off, which stays so: it is not made here.
    env_defaults = {"APC_DISK_ENABLED": "1"}

    def apply(self, patcher: Any) -> None:
        from ..core import disk_coordination as core

        _apply_to_manager(patcher, core)
        _apply_to_generator(patcher, core)
        _apply_to_server(patcher, core)
        _apply_to_ends(patcher, core)


def _apply_to_manager(patcher: Any, core: Any) -> None:
    def from_env(original: Any) -> Any:
        def wrapper(model_namespace: Any = None, overrides: Any = None) -> Any:
            found = settings(overrides)
            manager = original(
                model_namespace, {**(overrides or {}), "disk_enabled": False}
            )
            if manager is not None:
                manager.disk_settings = found
            return manager

        return wrapper

    def close(original: Any) -> Any:
        def wrapper(self: Any) -> None:
            core.close(self)
            original(self)

        return wrapper

    def snapshot(original: Any) -> Any:
        return lambda self: {**original(self), **core.statistics(self)}

    patcher.replace_method(APC, "from_env", from_env)
    patcher.replace_method(APC, "APCManager.close", close)
    patcher.replace_method(APC, "APCManager.stats_snapshot", snapshot)


def _apply_to_generator(patcher: Any, core: Any) -> None:
    def insert(original: Any) -> Any:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            uids = original(self, *args, **kwargs)
            core.ask_ahead(self, uids)
            return uids

        return wrapper

    patcher.replace_method(AR, "BatchGenerator.insert", insert)
    patcher.surround(AR, "BatchGenerator.next", core.rows_being_read_wait)
    patcher.surround(AR, "PromptProcessingBatch.prompt_step", core.reading_prompt)
    patcher.surround(AR, "PromptProcessingBatch.generate", core.reading_prompt)


def _apply_to_server(patcher: Any, core: Any) -> None:
    def initialize(original: Any) -> Any:
        def wrapper(self: Any) -> None:
            original(self)
            core.open_tier(self)

        return wrapper

    def collect(original: Any) -> Any:
        def wrapper(self: Any, **kwargs: Any) -> Any:
            core.tick(self)
            return original(self, **kwargs)

        return wrapper

    patcher.replace_method(SERVER, "ResponseGenerator._initialize_model", initialize)
    patcher.replace_method(
        SERVER, "ResponseGenerator._collect_pending_requests", collect
    )
    server = importlib.import_module(APP)
    before = server.app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> Any:
        async with before(app) as state:
            try:
                yield state
            finally:
                await core.flush_at_end(server.runtime)

    patcher.set_within(APP, "app", "router.lifespan_context", lifespan)


def _apply_to_ends(patcher: Any, core: Any) -> None:
    """Between a row's end in the generator's step and the word of it, in the server's."""

    def step(original: Any) -> Any:
        def wrapper(self: Any, batch_gen: Any, active: Any, *args: Any) -> None:
            batch_gen.replies_in_flight = active
            original(self, batch_gen, active, *args)

        return wrapper

    def advance(original: Any) -> Any:
        def wrapper(self: Any, **kwargs: Any) -> Any:
            prompts, tokens = original(self, **kwargs)
            for token in tokens if core.ends_wait(self) else ():
                reply = self.__dict__.get("replies_in_flight", {}).get(token.uid)
                if reply is not None and token.finish_reason is not None:
                    core.promise_end(self, reply["rqueue"])
            return prompts, tokens

        return wrapper

    def read(original: Any) -> Any:
        def wrapper(self: Any) -> Any:
            token = original(self)
            if getattr(token, "finish_reason", None):
                core.hold_end(self._rqueue)
            return token

        return wrapper

    patcher.replace_method(SERVER, "ResponseGenerator._step", step)
    patcher.replace_method(AR, "BatchGenerator.next", advance)
    patcher.replace_method(SERVER, "_TokenIterator.__next__", read)


CHANGE = DurableDisk()
