"""Where the bundled tiny models are.

The models answer from records in their prompt; see docs/MODELS.md.
"""

from __future__ import annotations

from pathlib import Path

NAMES: tuple[str, ...] = ("dense", "hybrid", "window", "vlm")


def model_dir(name: str) -> Path:
    """Return the folder of a bundled model, to be given to stock's loader or server."""
    if name not in NAMES:
        raise ValueError(f"unknown tiny model {name!r}: one of {', '.join(NAMES)}")
    return Path(__file__).resolve().parent / "models" / name
