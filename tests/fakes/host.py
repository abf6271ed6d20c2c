"""The one stock server of a test process, and the model and settings it has now."""

from __future__ import annotations

import gc
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from tests.fakes.cold import ColdModel
from tests.fakes.models import DRAFTERS, NAMES, drafter_dir, model_dir
from tests.fakes.recorder import Recorder
from tests.fakes.stuck import Watchdog

REQUEST_SECONDS = float(os.environ.get("CACHEPLUS_REQUEST_SECONDS", "60"))


@dataclass(frozen=True)
class Settings:
    """What a loaded model depends on.

    dtype: parameters are cast to it after loading; None keeps the file's.
    draft_model, draft_kind, kv_bits, kv_group_size, max_kv_size: as the server's options
        (the bundled models need a group size of 32).
    apc: prefix cache on or off; the apc_* fields are stock's settings of that name.
    disk: directory for the disk tier; None turns it off.
    env: further environment variables, as (name, value) pairs, set while it is current
        (MLX_VLM_MAX_NUM_SEQS, PREFILL_STEP_SIZE, APC_HASH, ...).
    adapter: adapter path.
    """

    model: str
    dtype: str | None = "float32"
    draft_model: str | None = None
    draft_kind: str | None = None
    kv_bits: float | None = None
    kv_group_size: int | None = None
    max_kv_size: int | None = None
    apc: bool = True
    apc_block_size: int = 16
    apc_num_blocks: int = 2048
    apc_memory_max_gb: float | None = None
    apc_checkpoint_entries: int = 2
    apc_checkpoint_interval_tokens: int = 2048
    apc_checkpoint_guard_tokens: int = 1
    disk: str | None = None
    apc_disk_max_gb: float | None = None
    env: tuple[tuple[str, str], ...] = field(default_factory=tuple)
    adapter: str | None = None

    def knobs(self) -> dict[str, Any]:
        """Return the runtime settings (stock's PATCH /v1/settings names)."""
        skip = ("model", "dtype", "apc", "disk", "env", "adapter")
        out = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in skip
        }
        out["apc_enabled"] = self.apc
        out["apc_disk_enabled"] = self.disk is not None
        out["apc_disk_path"] = self.disk
        return out


class Host:
    """The one HTTP server of the process, and the recorder on its seams."""

    def __init__(self) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self.app_module = importlib.import_module("mlx_vlm.server.app")
        self.generation = importlib.import_module("mlx_vlm.server.generation")
        self.runtime = importlib.import_module("mlx_vlm.server.runtime").runtime
        self.recorder = Recorder()
        self.recorder.install()
        self.keys = count(1)
        self.current: Settings | None = None
        self._env_before: dict[str, str | None] = {}
        self._cold: dict[tuple[str, str | None], ColdModel] = {}
        self._cast_loaded_models()
        self._serve()
        self.watchdog = Watchdog(self, after=REQUEST_SECONDS * 0.75)
        # Stock collects garbage after every request: what is imported by now need not
        # be walked through each time.
        gc.collect()
        gc.freeze()

    def _cast_loaded_models(self) -> None:
        drafters = importlib.import_module("mlx_vlm.speculative.drafters")

        def cast(model: Any) -> None:
            import mlx.core as mx

            dtype = self.current.dtype if self.current else None
            if dtype and model is not None:
                model.set_dtype(getattr(mx, dtype))

        def load_model_resources(original: Callable[..., Any]) -> Callable[..., Any]:
            def load(*args: Any, **kwargs: Any) -> Any:
                out = original(*args, **kwargs)
                cast(out[0])
                return out

            return load

        def load_drafter(original: Callable[..., Any]) -> Callable[..., Any]:
            def load(*args: Any, **kwargs: Any) -> Any:
                out = original(*args, **kwargs)
                cast(out[0])
                return out

            return load

        self.recorder._wrap(
            self.generation, "load_model_resources", load_model_resources
        )
        self.recorder._wrap(drafters, "load_drafter", load_drafter)

    def _serve(self) -> None:
        import uvicorn

        # The client lets a connection go that has been idle for five seconds.  The server
        # must not be the one that closes it: a request may be on its way.
        config = uvicorn.Config(
            self.app_module.app,
            host="127.0.0.1",
            port=0,
            log_level="error",
            timeout_keep_alive=3600,
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        deadline = time.monotonic() + 30
        while not self.server.started:
            if time.monotonic() > deadline or not self.thread.is_alive():
                raise RuntimeError("the in-process server did not start")
            time.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=REQUEST_SECONDS
        )

    def close(self) -> None:
        """Stop serving, unload, and put every wrapped seam back."""
        self.client.close()
        self.server.should_exit = True
        self.thread.join(timeout=20)
        self.app_module.unload_model_sync()
        self.recorder.uninstall()
        self._environment(())

    def _environment(self, pairs: Sequence[tuple[str, str]]) -> None:
        for name, before in self._env_before.items():
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before
        self._env_before = {name: os.environ.get(name) for name, _ in pairs}
        os.environ.update(dict(pairs))

    def use(self, settings: Settings) -> None:
        """Make these settings and this model the current ones; the cache is emptied."""
        if settings != self.current:
            self._environment(settings.env)
            self.current = settings
            config = self.runtime.config
            _, rejected = config.apply_changes(
                {
                    # Before 0.7.8 some had another name.
                    name if hasattr(config, name) else f"spec_{name}": value
                    for name, value in settings.knobs().items()
                }
            )
            if rejected:
                raise ValueError(f"stock rejected settings: {rejected}")
            self.app_module.unload_model_sync()
        self.load()
        self.clear_cache()
        self.recorder.forget()

    def settle(self, seconds: float = 10.0) -> None:
        """Return when no request is answered and no row decoded: what a test has left.

        What does not end in time is dropped, with the model that it waits for.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            generator = self.runtime.response_generator
            queued = generator is not None and not generator.requests.empty()
            tasks = self.server.server_state.tasks
            if not (tasks or queued or self.recorder.active):
                return
            time.sleep(0.005)
        self.app_module.unload_model_sync()
        self.recorder.active = None

    def load(self) -> None:
        """Load the current model, if it is not loaded."""
        assert self.current is not None
        get_cached_model = importlib.import_module("mlx_vlm.server").get_cached_model
        get_cached_model(self.current.model, self.current.adapter)

    def clear_cache(self) -> None:
        """Empty the prefix cache in RAM."""
        if self.runtime.apc_manager is not None:
            self.runtime.apc_manager.clear()

    def cold_model(self) -> ColdModel:
        """Return the reference copy of the current model (loaded once)."""
        assert self.current is not None
        key = (self.current.model, self.current.dtype)
        if key not in self._cold:
            self._cold[key] = ColdModel(*key)
        return self._cold[key]


def resolve_model(model: str | Path) -> str:
    """Return the path of a bundled model or drafter, or the path given."""
    name = str(model)
    if name in DRAFTERS:
        return str(drafter_dir(name))
    return str(model_dir(name)) if name in NAMES else name


@contextmanager
def serving() -> Iterator[Host]:
    """Serve while the block runs."""
    host = Host()
    try:
        yield host
    finally:
        host.close()
