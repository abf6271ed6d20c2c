"""A batch of one gets the same caches whether it is warm or cold.

A cold row that is alone has the model's own caches.  A warm one was put into batch
caches, as if others were with it.  They cost a mask and an array of offsets at every
step, and ``Qwen3_5Model`` takes a single row out of them and puts it back with each
token, which copies the row's whole cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def stays_plain(
    coordinator: Any, picks: Sequence[dict | None], kv_quant_config: dict | None
) -> bool:
    """Whether a batch with these hits has the caches of its only row.

    Args:
        coordinator: its ``plain_rows`` tell whether a cold row that is alone has the
            model's own caches.  With a draft model it has not: rounds take tokens
            back, which is done on batch caches.
        picks: the hit of each row, or None.
    """
    plain = getattr(coordinator, "plain_rows", True)
    return len(picks) == 1 and plain and kv_quant_config is None
