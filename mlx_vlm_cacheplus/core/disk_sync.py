"""The end of a reply waits until the reply is on disk, where that is asked for.

A client that has seen the end of a reply is then never read that reply again, however
early the server is killed.  Who waits is the thread that reads the reply's queue for its
client.  The thread that computes makes a receipt and goes on; the one that writes tells it.

1. A receipt stands for everything that waited to be written when it was made.  It is told
   once: what is told later is ignored.
2. A reply's end waits for ``SYNC_SECONDS`` at most, and not at all where nothing waits to
   be written or the disk does not take anything.
3. Nothing but the reply's queue, and the path that it waits for, holds a receipt.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

# How long the end of a reply waits for the disk.
SYNC_SECONDS = 1.0
# Waits that the statistics are made of, the newest ones.
MOST_WAITS = 1024


class Receipt:
    """Says what became of all that waited to be written when it was made."""

    def __init__(self, sync: ReplySync):
        self.sync = sync
        self.made_at = time.monotonic()
        self.written = False
        self._lock = threading.Lock()
        self._told = threading.Event()

    def tell(self, written: bool) -> None:
        """It is on disk, or will not be soon; the first word counts."""
        with self._lock:
            if not self._told.is_set():
                self.written = written
                self._told.set()

    @property
    def is_told(self) -> bool:
        """Whether anything was said yet."""
        return self._told.is_set()

    def hold(self) -> None:
        """Return when it is told, or time is up; call where a client's reply is read."""
        began = time.monotonic()
        left = self.made_at + self.sync.seconds - began
        told = self._told.wait(max(0.0, left))
        self.sync.count(time.monotonic() - began, told, told and self.written)


class ReplySync:
    """Receipts that wait for what was noted to be handed over, and what became of all."""

    def __init__(self) -> None:
        self.seconds = SYNC_SECONDS
        self.synced = self.unsynced = 0
        self._waits: deque[float] = deque(maxlen=MOST_WAITS)
        self._waiting: deque[Receipt] = deque()
        self._said = False
        self._lock = threading.Lock()

    def receipt(self) -> Receipt:
        """A new one, which nobody has yet."""
        return Receipt(self)

    def after_hand_over(self, receipt: Receipt) -> None:
        """Keep it until what was noted is handed over."""
        self._waiting.append(receipt)

    def handed_over(self, then: Callable[[Receipt], None]) -> None:
        """What was noted is handed over, or is not going to be: go on with those that waited."""
        # Somebody else may do the same at this moment.
        with contextlib.suppress(IndexError):
            while True:
                then(self._waiting.popleft())

    def count(self, seconds: float, told: bool, written: bool) -> None:
        """A reply's end leaves after so long."""
        with self._lock:
            self._waits.append(seconds)
            self.synced += written
            self.unsynced += not written
            say = not (told or self._said)
            self._said |= say
        if say:
            logger.warning(
                "A reply was not on disk %.1f s after its end, which waits no longer: if "
                "the server is killed it is read again; see disk_unsynced_replies",
                self.seconds,
            )

    def statistics(self) -> dict[str, Any]:
        """Counts, and how long ends of replies waited, in milliseconds."""
        with self._lock:
            waits = [1000 * seconds for seconds in self._waits]
        return {
            "disk_synced_replies": self.synced,
            "disk_unsynced_replies": self.unsynced,
            "disk_sync_median_ms": statistics.median(waits) if waits else None,
            "disk_sync_most_ms": max(waits, default=None),
        }
