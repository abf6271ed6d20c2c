"""What the first use of a length of keys costs in MLX's fused attention.

    python -m tests.bench.gpu_attention
    python -m tests.bench.gpu_attention --many 600   # are plans kept, and is that all?

``mx.fast.scaled_dot_product_attention`` in bfloat16 with 32 heads, 8 key/value heads,
causal where there are several queries.  Keys are the front part of a buffer whose size
is a multiple of 256 tokens, as in stock's caches.  Each length is used twice; the first
figure is the median of the first uses, the second that of the second uses.  A length
just below the first has been used before, so kernels are loaded.

``--many`` uses so many lengths with four queries, then the first and the last again, and
says with which error it ended, if with one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from importlib.metadata import version
from statistics import median

import mlx.core as mx

HEADS, KV_HEADS, STEP = 32, 8, 256
DIMS, QUERIES, LENGTHS, EACH = (128, 256), (1, 2, 4), (20, 7000), 6


def timed(queries: int, keys: int, dim: int) -> float:
    """Milliseconds of one evaluated attention."""
    room = -(-keys // STEP) * STEP
    q = mx.zeros((1, HEADS, queries, dim), mx.bfloat16)
    k = mx.zeros((1, KV_HEADS, room, dim), mx.bfloat16)
    v = mx.zeros((1, KV_HEADS, room, dim), mx.bfloat16)
    mx.eval(q, k, v)
    mx.synchronize()
    began = time.perf_counter()
    mask = "causal" if queries > 1 else None
    out = mx.fast.scaled_dot_product_attention(
        q, k[:, :, :keys], v[:, :, :keys], scale=dim**-0.5, mask=mask
    )
    mx.eval(out)
    mx.synchronize()
    return 1000 * (time.perf_counter() - began)


def table() -> None:
    """Print one line for each number of queries and length of keys."""
    for dim in DIMS:
        for queries in QUERIES:
            for length in LENGTHS:
                timed(queries, length - 1, dim)
                lengths = range(length, length + EACH)
                uses = [
                    median(timed(queries, keys, dim) for keys in lengths)
                    for _ in range(2)
                ]
                print(
                    f"dim {dim}, {queries} queries, {length} to {lengths[-1]} keys: "
                    f"first {uses[0]:.3f} ms, again {uses[1]:.3f} ms"
                )


def many(count: int) -> None:
    """Print what old and new lengths take after so many."""
    for used in range(count):
        try:
            timed(4, LENGTHS[0] + used, DIMS[0])
        except RuntimeError as error:
            print(f"length {used + 1}: {error}")
            return
    for name, keys in (("first", LENGTHS[0]), ("last", LENGTHS[0] + count - 1)):
        again = timed(4, keys, DIMS[0])
        print(f"after {count} lengths, the {name} one again: {again:.3f} ms")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    words = argparse.ArgumentParser(prog="gpu_attention", description=__doc__)
    words.formatter_class = argparse.RawDescriptionHelpFormatter
    words.add_argument("--many", type=int, default=0, help="so many lengths")
    options = words.parse_args(arguments)
    print(f"MLX {version('mlx')}, {mx.default_device()}", flush=True)
    many(options.many) if options.many else table()


if __name__ == "__main__":
    main()
