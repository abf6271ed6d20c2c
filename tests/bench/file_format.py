"""What a file of the disk tier costs to make and to read: with our header, and with the safetensors library.

    python -m tests.bench.file_format             64 MiB in 64 arrays, in one piece and in four
    python -m tests.bench.file_format --mib 2     the mechanics

Each way makes, hashes and writes the same arrays, or reads them; both files hold the same.  *Memory* is what Python holds
at the peak beyond the arrays, *stall* the longest time in which another thread did not get its turn: the server's
threads are such.  Times are the best of five.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import TensorSpec, deserialize, serialize

from mlx_vlm_cacheplus.core.disk_format import from_file, to_file
from mlx_vlm_cacheplus.core.disk_segment import HostArray, HostSegment
from tests.bench import gpu_tables

MIB = 1 << 20
LAYERS, HEADS, DIM = 32, 8, 128


def segments(mib: int, pieces: int) -> list[HostSegment]:
    """Keys and values in bfloat16, [1, heads, tokens, dim] a layer, so many segments one behind the other."""
    tokens = mib * MIB // (2 * LAYERS * HEADS * DIM * 2) // pieces
    content = np.random.default_rng(0).integers(0, 1 << 16, (1, HEADS, tokens, DIM))
    made = [
        [(content + layer).astype(np.uint16), (content - layer).astype(np.uint16)]
        for layer in range(LAYERS)
    ]
    spans = [tuple(HostArray(a, "BF16") for a in sides) for sides in made]
    return [
        HostSegment(n * tokens, (n + 1) * tokens, list(spans)) for n in range(pieces)
    ]


def ours(parts: list[HostSegment], file: Path) -> None:
    content, _ = to_file(parts, "path")
    with open(file, "wb", buffering=0) as out:
        for chunk in content:  # the first, its head, has the digests of the others
            out.write(chunk)


def library(parts: list[HostSegment], file: Path) -> None:
    named = [dict(part.named()) for part in parts]
    whole = {name: a.data for name, a in named[0].items()}
    if len(parts) > 1:
        for name in whole:
            whole[name] = np.concatenate([n[name].data for n in named], axis=2)
    specs = {
        name: TensorSpec(
            dtype="bfloat16",
            shape=list(a.shape),
            data_ptr=a.ctypes.data,
            data_len=a.nbytes,
        )
        for name, a in whole.items()
    }
    content = serialize(specs, metadata={"path": "path"})
    xxhash.xxh3_128(content)
    file.write_bytes(content)


class Stalls(threading.Thread):
    """Notes how long it was kept waiting."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest, self.over = 0.0, False

    def run(self) -> None:
        last = time.perf_counter()
        while not self.over:
            time.sleep(0.0002)
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last), now


def measured(work: Callable[[], Any]) -> list[str]:
    """Milliseconds, MiB and milliseconds."""
    seconds, stalls = [], []
    for _ in range(5):
        watching = Stalls()
        watching.start()
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
        watching.over = True
        watching.join()
        stalls.append(watching.longest)
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return [
        f"{1000 * min(seconds):.1f}",
        f"{peak / MIB:.1f}",
        f"{1000 * min(stalls):.1f}",
    ]


def rows_of(mib: int, pieces: int, folder: Path) -> list[list[str]]:
    parts, file, other = segments(mib, pieces), folder / "ours", folder / "library"
    ways: dict[str, Callable[[], Any]] = {
        "make: ours": lambda: ours(parts, file),
        "make: serialize": lambda: library(parts, other),
        "read: ours": lambda: from_file(memoryview(content)),
        "read: deserialize": lambda: deserialize(bytes(content)),
    }
    for way in ("make: ours", "make: serialize"):
        ways[way]()
    content = bytearray(file.read_bytes())
    same = dict(deserialize(bytes(content)))
    for name, array in deserialize(other.read_bytes()):
        assert same[name]["data"] == array["data"], f"{name} differs"
    return [[way, str(pieces), *measured(work)] for way, work in ways.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=64)
    options = parser.parse_args()
    rows = []
    for pieces in (1, 4):
        with tempfile.TemporaryDirectory() as folder:
            rows += rows_of(options.mib, pieces, Path(folder))
    header = ["way", "pieces", "ms", "memory, MiB", "stall of another thread, ms"]
    print(gpu_tables.table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
