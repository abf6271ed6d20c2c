"""Where a server's prefix cache survives restarts, and how much it may take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_GB = 20.0
OWN_FOLDER = "segments"
TRUE = ("1", "true", "yes")
QUEUE_BYTES = 1 << 30
# When something waits until it is written.
SYNC = ("never", "reply")


@dataclass(frozen=True)
class DiskSettings:
    """Where a disk tier is.

    Attributes:
        folder: its own; nothing else is in it.
        max_bytes: what its files may take; None for no limit.
        queue_bytes: what may wait to be written.
        sync: whether the end of a reply waits until the reply is written.
    """

    folder: Path
    max_bytes: int | None
    queue_bytes: int
    sync: bool = False


def settings_of(
    overrides: Mapping[str, Any] | None,
    environ: Mapping[str, str] = os.environ,
    folder: str | None = None,
    max_gb: str | None = None,
    sync: str | None = None,
) -> DiskSettings | None:
    """What the server's settings say; None for no disk tier.

    Args:
        overrides: live settings by their names; None stands for the default.
        folder: names the tier's own folder, or "off"; it wins over the settings.
        max_gb: the same for the limit.
        sync: the same for what waits until it is written, one of ``SYNC``.
    """

    def value(key: str, variable: str) -> Any:
        if overrides is not None and key in overrides:
            return overrides[key]
        return environ.get(variable)

    enabled = value("disk_enabled", "APC_DISK_ENABLED")
    path = value("disk_path", "APC_DISK_PATH")
    if folder is None:
        if not (enabled is None or str(enabled).lower() in TRUE) or path == "":
            return None
        own = Path(path).expanduser() / OWN_FOLDER if path else default_folder(environ)
    elif folder.lower() == "off":
        return None
    else:
        own = Path(folder).expanduser()
    given = value("disk_max_gb", "APC_DISK_MAX_GB") if max_gb is None else max_gb
    cap = DEFAULT_GB if given in (None, "") else float(given)
    waiting = value("disk_queue_max_gb", "APC_DISK_QUEUE_MAX_GB")
    queue = QUEUE_BYTES if waiting in (None, "") else int(float(waiting) * (1 << 30))
    limit = int(cap * (1 << 30)) if cap > 0 else None
    chosen = value("disk_sync", "APC_DISK_SYNC") if sync is None else sync
    return DiskSettings(own, limit, queue, is_sync(chosen or SYNC[0]))


def is_sync(text: str) -> bool:
    """Whether the end of a reply waits until the reply is written.

    Raises:
        ValueError: it says neither.
    """
    if text not in SYNC:
        raise ValueError(f"never or reply, not {text!r}")
    return text == "reply"


def size_text(nbytes: float) -> str:
    """A size for people; a GB is of 2**30 bytes, as in APC_DISK_MAX_GB."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1024 or unit == "GB":
            break
        nbytes /= 1024
    return f"{round(nbytes, 2):g} {unit}"


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the tier is if nobody says: beside what the server keeps else."""
    home = environ.get("MLX_VLM_CACHE_HOME")
    return Path(home or Path.home() / ".cache" / "mlx-vlm") / OWN_FOLDER
