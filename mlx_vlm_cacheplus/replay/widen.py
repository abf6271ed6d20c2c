"""A float32 copy of a small model that is stored in bfloat16.

In bfloat16 two tokens can be so near that the order of additions decides between them, and a restored prefix adds in
another order than a prefill in chunks.  In float32 greedy replies are compared exactly.  A bfloat16 number is the upper
half of a float32, so no array library is needed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

_DTYPE_KEYS = ("dtype", "torch_dtype")


def widened_copy(source: Path, target: Path) -> Path:
    """Copy a model directory, weights and configuration in float32; returns ``target``."""
    target.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.suffix == ".safetensors":
            (target / file.name).write_bytes(widen(file.read_bytes()))
        elif file.name == "config.json":
            config = _float32(json.loads(file.read_text(encoding="utf-8")))
            (target / file.name).write_text(json.dumps(config, indent=2))
        elif file.is_file():
            shutil.copyfile(file, target / file.name)
    return target


def _float32(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {
        key: "float32" if key in _DTYPE_KEYS and value else _float32(value)
        for key, value in config.items()
    }


def widen(data: bytes) -> bytes:
    """A safetensors file with every BF16 tensor as F32; others stay as they are."""
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), memoryview(data)[8 + size :]
    parts, place = [], 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        part = bytes(body[begin:end])
        if entry["dtype"] == "BF16":
            part, entry["dtype"] = _upper_halves(part), "F32"
        entry["data_offsets"] = [place, place + len(part)]
        place += len(part)
        parts.append(part)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def _upper_halves(part: bytes) -> bytes:
    wide = bytearray(2 * len(part))
    wide[2::4], wide[3::4] = part[0::2], part[1::2]
    return bytes(wide)
