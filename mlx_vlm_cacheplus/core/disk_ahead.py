"""Files are read in a few threads, since a medium gives more to several than to one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

THREADS = 4
# Less than this is read sooner than a thread is there.
BYTES_A_THREAD = 8 << 20

Item = TypeVar("Item")
Result = TypeVar("Result")


class Ahead(Generic[Item, Result]):
    """Does the same with each of some items; who wants the results takes them in order.

    Its threads end with the last item, or when it is stopped, and hold no process back.

    Args:
        work: called with an item, in any thread.
        nbytes: about how much is read for all of them.
    """

    def __init__(
        self, work: Callable[[Item], Result], items: Sequence[Item], nbytes: int
    ):
        self._work, self._items = work, items
        self._futures: list[Future[Result]] = [Future() for _ in items]
        self._numbers = iter(range(len(items)))
        self._lock = threading.Lock()
        self._stopped = False
        self.threads = 0
        wanted = min(THREADS, len(items), nbytes // BYTES_A_THREAD)
        for _ in range(wanted if wanted > 1 else 0):
            thread = threading.Thread(target=self._run, name="disk-ahead", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break  # the system gives no more
            self.threads += 1

    def take(self, number: int) -> Result:
        """What came of an item, once; raises what was raised for it."""
        if not self.threads:
            return self._work(self._items[number])
        try:
            return self._futures[number].result()
        finally:
            self._futures[number] = Future()  # what it held is the caller's alone

    def stop(self) -> None:
        """Begin nothing more; nothing is taken any more."""
        self._stopped = True

    def _run(self) -> None:
        while not self._stopped:
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            future = self._futures[number]
            try:
                future.set_result(self._work(self._items[number]))
            except BaseException as fault:
                future.set_exception(fault)
            del future
