"""One stock server process of our own: started on a free local port, waited for, and ended by its process id.

Its cache home is a folder that the caller gives, and settings of the user's environment that steer the cache are left
out, so that two servers differ in the plugin alone.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import httpx

_OURS = ("APC_", "MLX_VLM_")
_STOP_SECONDS = 15.0


class StartFailed(RuntimeError):
    """The server did not come up; the message ends with the tail of its log."""


@dataclass
class Server:
    """A context manager; owns the process and its log file."""

    model: str
    home: Path
    plus: bool = False
    arguments: tuple[str, ...] = ()
    wait_seconds: float = 180.0
    on_wait: Callable[[float], None] = lambda seconds: None
    base: str = field(default="", init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def log(self) -> Path:
        return self.home / "server.log"

    def command(self, port: int) -> list[str]:
        """The command line, as a user would type it."""
        command = [sys.executable, "-m", "mlx_vlm.server", "--model", self.model]
        command += ["--host", "127.0.0.1", "--port", str(port), *self.arguments]
        return [*command, "--cacheplus"] if self.plus else command

    def environment(self) -> dict[str, str]:
        """The caller's environment less its cache settings; prefix cache on, disk tier in ``home``."""
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(_OURS)
        }
        kept |= {
            "MLX_VLM_CACHE_HOME": str(self.home),
            "APC_DISK_PATH": str(self.home / "apc"),
        }
        kept |= {"APC_ENABLED": "1", "HF_HUB_OFFLINE": "1"}
        return kept if self.plus else {**kept, "MLX_VLM_CACHEPLUS": "0"}

    def __enter__(self) -> Server:
        self.home.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        self.base = f"http://127.0.0.1:{port}"
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                self.command(port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(),
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _wait(self) -> None:
        assert self._process is not None
        began = time.monotonic()
        while (waited := time.monotonic() - began) < self.wait_seconds:
            if self._process.poll() is not None:
                raise StartFailed(
                    f"the server ended with status {self._process.returncode}\n{self.tail()}"
                )
            if self._healthy():
                return
            self.on_wait(waited)
            time.sleep(0.2)
        raise StartFailed(
            f"the server was not ready after {self.wait_seconds:.0f} s\n{self.tail()}"
        )

    def _healthy(self) -> bool:
        try:
            answer = httpx.get(f"{self.base}/health", timeout=2.0)
            return answer.status_code == 200 and bool(answer.json().get("loaded_model"))
        except (httpx.HTTPError, ValueError):
            return False

    def tail(self, lines: int = 25) -> str:
        """The end of the server's log."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """Ask the process to end, and kill it when it does not."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
