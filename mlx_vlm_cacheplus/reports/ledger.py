"""The last records and the totals, for any thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from .record import ReuseRecord, Totals

# Stock's own logger decides the level (`--log-level`), so a user sees these lines where stock's are.
logger = logging.getLogger("mlx_vlm.server.cacheplus")

KEPT = 1000


class Ledger:
    """Keeps, logs and publishes records. A fault in a listener never reaches the request."""

    def __init__(
        self,
        publish: Callable[[Mapping[str, Any]], None] | None = None,
        kept: int = KEPT,
    ) -> None:
        self._publish = publish
        self._records: deque[dict[str, Any]] = deque(maxlen=kept)
        self._totals = Totals()
        self._lock = threading.Lock()

    def add(self, record: ReuseRecord) -> None:
        with self._lock:
            self._totals.add(record)
            row = {"seq": self._totals.requests, **record.as_dict()}
            self._records.append(row)
        logger.info(record.line())
        if self._publish is not None:
            try:
                self._publish(row)
            except Exception as problem:
                logger.warning(
                    "cacheplus: a listener failed: %s: %s",
                    type(problem).__name__,
                    problem,
                )

    def last(self, count: int | None = None) -> list[dict[str, Any]]:
        """The newest records, oldest first; all that are kept by default."""
        with self._lock:
            rows = list(self._records)
        return rows if count is None else rows[max(0, len(rows) - count) :]

    def totals(self) -> dict[str, Any]:
        with self._lock:
            return self._totals.as_dict()
