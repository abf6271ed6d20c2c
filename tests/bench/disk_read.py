"""What it costs to read a conversation back from disk: bytes, seconds of the thread that reads, and of arrays.

    python -m tests.bench.disk_read                        12 turns of 700 tokens, 48 MiB of end states behind each
    python -m tests.bench.disk_read --tokens 8 --state-mib 1   the mechanics

The folder is one as a hybrid model leaves it: an entry a turn, with the turn's keys and values and its end states.  The
last turn's prompt is asked for, as after a restart; *read* is what was read of the files for that, *reader* is from the
question to the answer, and *arrays* what the thread that computes does with it afterwards.  Cold means that the system
was asked to drop the files from memory before (where it can be asked).  Each is the median of so many runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from mlx_vlm_cacheplus.core.disk_arrays import to_segment
from mlx_vlm_cacheplus.core.disk_folder import ENTRIES
from mlx_vlm_cacheplus.core.disk_format import path_name, to_file
from mlx_vlm_cacheplus.core.disk_index import SPAN, New
from mlx_vlm_cacheplus.core.disk_reader import DiskReader, Load, layout_text
from mlx_vlm_cacheplus.core.disk_segment import HostArray, HostSegment, HostState
from mlx_vlm_cacheplus.core.disk_store import DiskStore
from tests.bench import gpu_tables

MIB = 1 << 20
LAYERS, HEADS, DIM = 8, 4, 256
STATE_LAYERS = 24
SECONDS = 120.0
LAYOUT = (("kv",), ("state",))
PLAN = {
    "module": "mlx_vlm.models.cache",
    "class": "ArraysCache",
    "explicit": False,
    "content": {
        "dict": [["state", {"list": [{"array": 0}]}], ["meta_state", {"value": ""}]]
    },
}


def segment(start: int, tokens: int, state_mib: int) -> HostSegment:
    """A turn's keys and values in bfloat16, [1, heads, tokens, dim] a layer, and its end states in float32."""
    random = np.random.default_rng(start)
    shape = (1, HEADS, tokens, DIM)
    sides = [
        HostArray(random.integers(0, 1 << 16, shape, np.uint16), "BF16")
        for _ in range(2 * LAYERS)
    ]
    spans = list(zip(sides[::2], sides[1::2], strict=True))
    numbers = state_mib * MIB // STATE_LAYERS // 4
    states = [
        HostState(PLAN, [HostArray(random.random((1, numbers), np.float32), "F32")])
        for _ in range(STATE_LAYERS)
    ]
    return HostSegment(start, start + tokens, spans, states)


def fill(store: DiskStore, turns: int, tokens: int, state_mib: int) -> list[int]:
    """An entry a turn; returns the conversation's token ids."""
    text = layout_text(LAYOUT)
    root = store.root("weights", 0, text)
    ids = [n % 1000 for n in range(turns * tokens)]
    parent = 0
    for start in range(0, len(ids), tokens):
        stop = start + tokens
        path = path_name(ids[:stop], repr(("weights", 0, text)))
        content, nbytes = to_file([segment(start, tokens, state_mib)], path)
        new = New(
            *(store.reserve(), root, parent, SPAN, start, stop, ids[start:stop]),
            *(content, nbytes),
            has_state=True,
        )
        (entry,) = store.add([new])
        parent = entry.number
    return ids


def forget(folder: Path) -> None:
    """Have the system drop the files from memory."""
    for path in (folder / ENTRIES).iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ask(store: DiskStore, ids: list[int]) -> tuple[float, float, float]:
    """Bytes that were read, seconds of the reader, seconds for the arrays."""
    failed = threading.Event()
    reader = DiskReader(
        *(store, "weights", lambda nbytes, tokens: True, lambda name: False),
        *(lambda entry: failed.set(), failed.set, 1 << 40),
    )
    load = Load((*ids, 0), 0, 0, 0)
    began = time.perf_counter()
    reader.ask(load)
    assert load.done.wait(SECONDS) and load.length == len(ids) and not failed.is_set()
    read = time.perf_counter()
    for place, found in enumerate(load.entries):
        at_end = place in (0, len(load.entries) - 1)
        to_segment(found.segment, lambda *part: None, at_end)
    made = time.perf_counter()
    nbytes = load.nbytes
    reader.release(load)
    reader.close()
    return nbytes, read - began, made - read


def rows_of(folder: Path, options: argparse.Namespace) -> list[list[str]]:
    store = DiskStore(folder)
    store.open()
    ids = fill(store, options.turns, options.tokens, options.state_mib)
    ways = ["warm", "cold"] if hasattr(os, "posix_fadvise") else ["warm"]
    rows = []
    for way in ways:
        runs = []
        for _ in range(options.runs):
            if way == "cold":
                forget(folder)
            runs.append(ask(store, ids))
        nbytes, reader, arrays = map(statistics.median, zip(*runs, strict=True))
        rate = nbytes / reader / 1e9
        row = [store.nbytes / 1e6, nbytes / 1e6, reader, rate, arrays]
        digits = (0, 0, 3, 2, 3)
        rows.append([way, *(f"{v:.{d}f}" for v, d in zip(row, digits, strict=True))])
    store.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--state-mib", type=int, default=48)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(Path(folder) / "disk", options)
    header = ["files", "stored, MB", "read, MB", "reader, s", "GB/s", "arrays, s"]
    print(gpu_tables.table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
