"""Reading in several threads: in order, faults where they belong, and no thread for little."""

from __future__ import annotations

import threading

import pytest

from mlx_vlm_cacheplus.core.disk_ahead import BYTES_A_THREAD, THREADS, Ahead

MUCH = THREADS * BYTES_A_THREAD
SECONDS = 20.0


def test_several_are_worked_on_at_once_and_given_in_order():
    together = threading.Barrier(THREADS)

    def work(item):
        together.wait(SECONDS)
        return item * item

    ahead = Ahead(work, range(2 * THREADS), MUCH)
    assert ahead.threads == THREADS
    assert [ahead.take(n) for n in range(2 * THREADS)] == [
        n * n for n in range(2 * THREADS)
    ]


def test_who_takes_what_is_not_begun_waits_for_it():
    hold = threading.Event()

    def work(item):
        assert hold.wait(SECONDS)
        return item

    ahead = Ahead(work, range(2 * THREADS), MUCH)
    timer = threading.Timer(0.05, hold.set)
    timer.start()
    assert ahead.take(2 * THREADS - 1) == 2 * THREADS - 1
    assert ahead.take(0) == 0
    timer.join(SECONDS)


@pytest.mark.parametrize("nbytes", [0, MUCH])
def test_a_fault_is_its_items(nbytes):
    def work(item):
        if item == 1:
            raise OSError("of one")
        return item

    ahead = Ahead(work, range(3), nbytes)
    assert ahead.take(0) == 0
    with pytest.raises(OSError, match="of one"):
        ahead.take(1)
    assert ahead.take(2) == 2
    ahead.stop()


@pytest.mark.parametrize(
    ("items", "nbytes"), [(THREADS, 0), (THREADS, 2 * BYTES_A_THREAD - 1), (1, MUCH)]
)
def test_little_is_read_where_it_is_asked_for(items, nbytes):
    ahead = Ahead(lambda item: threading.current_thread(), range(items), nbytes)
    assert ahead.threads == 0
    assert all(ahead.take(n) is threading.current_thread() for n in range(items))


def test_nothing_more_is_begun_when_it_is_stopped():
    begun, hold = threading.Semaphore(0), threading.Event()
    count = []

    def work(item):
        count.append(item)
        begun.release()
        assert hold.wait(SECONDS)

    ahead = Ahead(work, range(100), MUCH)
    for _ in range(ahead.threads):
        assert begun.acquire(timeout=SECONDS)
    ahead.stop()
    hold.set()
    for thread in threading.enumerate():
        if thread.name == "disk-ahead":
            thread.join(SECONDS)
            assert not thread.is_alive()
    assert len(count) == THREADS


def test_where_the_system_gives_no_thread_it_is_done_without(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ahead = Ahead(lambda item: item, range(8), MUCH)
    assert [ahead.take(n) for n in range(8)] == list(range(8))
