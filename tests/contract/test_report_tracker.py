"""Every way that a request can end leaves one record; stock is played by plain objects here."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_vlm_cacheplus.reports import reasons
from mlx_vlm_cacheplus.reports.cache_view import MEDIA_BEFORE, MEDIA_FOLLOWS
from mlx_vlm_cacheplus.reports.flight import NOT_READ, ONLY_PROMPT
from mlx_vlm_cacheplus.reports.seams import ROW_FAILED
from mlx_vlm_cacheplus.reports.tracker import forget_all

from .report_stage import STOP, Stage


def test_a_turn_that_reads_only_what_is_new():
    stage = Stage()
    first = stage.run(0, [1, 2, 3, 4], [5, 6, STOP])
    assert (first["prefilled"], first["new"], first["generated"]) == (4, 4, 3)
    assert (first["finish"], first["committed"], first["source"]) == ("stop", 4, "none")
    assert (first["id"], first["endpoint"], first["model"]) == ("r0", "/chat", "tiny")
    second = stage.run(1, [1, 2, 3, 4, 5, 6, STOP, 7, 8], [9] * 8, restored=7)
    assert (second["restored"], second["prefilled"], second["new"]) == (7, 2, 2)
    assert (second["re_read"], second["common"], second["divergence"]) == (0, 7, None)
    assert (second["finish"], second["source"]) == ("length", "ram")
    assert second["shortfall"] is None
    # The second request contains the first.
    assert stage.tracker.history_size()["sequences"] == 1


def test_a_reset_of_all_forgets_the_ids_and_keeps_the_counts():
    stage = Stage()
    stage.run(0, [1, 2, 3, 4], [5, 6, STOP])
    assert stage.tracker.history_size()["bytes"] > 0
    forget_all()
    size = stage.tracker.history_size()
    assert (size["sequences"], size["bytes"]) == (0, 0)
    again = stage.run(1, [1, 2, 3, 4], [STOP])
    assert (again["new"], again["seq"]) == (4, 2)


def test_the_place_of_divergence():
    stage = Stage()
    stage.run(0, [1, 2, 3, 4], [5, 6, STOP])
    out = stage.run(1, [1, 2, 3, 4, 5, 8, 8], [STOP], restored=5)
    assert (out["common"], out["divergence"], out["new"]) == (5, 5, 2)
    assert stage.tracker.history_size()["sequences"] == 2


def test_a_stop_token_at_the_limit_is_a_stop():
    stage = Stage()
    assert stage.run(0, [1, 2], [5] * 7 + [STOP])["finish"] == "stop"


def test_a_prefix_from_disk():
    stage = Stage()

    def hit(stats: Any) -> None:
        stats.disk_hits += 1

    out = stage.run(0, [1, 2, 3, 4, 5], [STOP], restored=4, lookup=hit)
    assert out["source"] == "disk"
    # Restored tokens were seen in an earlier life of the server.
    assert (out["new"], out["prefilled"]) == (1, 1)


def test_without_ledgers_the_reply_is_known_and_only_the_prompt_is_kept():
    stage = Stage()
    first = stage.run(0, [1, 2, 3, 4, 5], [6, 7, STOP], ledgers=False)
    assert (first["generated"], first["committed"]) == (3, 4)
    assert first["reason"] == ONLY_PROMPT and first["finish"] == "stop"
    second = stage.run(1, [1, 2, 3, 4, 5, 6, 7, STOP, 8], [STOP], restored=3)
    assert (second["new"], second["prefilled"], second["re_read"]) == (1, 6, 5)
    assert second["shortfall"] == {"tokens": 5, "reason": ONLY_PROMPT}


def test_a_reply_that_could_not_be_kept_says_so_now_and_next_time():
    stage = Stage(whole_states=True)
    first = stage.run(0, [1, 2, 3, 4], [5, STOP], committed=False)
    assert (first["committed"], first["reason"]) == (0, "layers disagree")
    second = stage.run(1, [1, 2, 3, 4, 5, STOP, 6], [STOP], restored=3)
    assert second["shortfall"]["reason"] == "layers disagree"


def test_cancelled_in_the_queue():
    stage = Stage()
    stage.queue(0, [1, 2, 3])
    stage.cancel(0)
    stage.remove(0)
    out = stage.last()
    assert (out["finish"], out["prefilled"], out["new"]) == ("cancel", 0, 0)
    assert (out["committed"], out["reason"]) == (0, NOT_READ)
    assert stage.run(1, [1, 2, 3], [STOP])["new"] == 3


def test_cancelled_while_its_prompt_is_read():
    stage = Stage()
    stage.queue(0, [1, 2, 3, 4, 5, 6])
    batch = stage.prefill((0, 2))
    batch._processed_prompt_columns = 3
    stage.cancel(0)
    stage.remove(0)
    out = stage.last()
    assert (out["finish"], out["prefilled"], out["restored"]) == ("cancel", 3, 2)
    assert (out["new"], out["generated"]) == (3, 0)
    # Only what was read counts as seen.
    assert stage.run(1, [1, 2, 3, 4, 5, 6], [STOP])["new"] == 1


def test_cancelled_while_it_writes():
    stage = Stage()
    for uid in (0, 1):
        stage.queue(uid, [uid, 2, 3])
    batch = stage.decode(stage.prefill((0, 0), (1, 0)))
    stage.step(batch, 7, 8)
    stage.cancel(1)
    leave = lambda uid: stage.filter(batch, [0]) or True  # noqa: E731
    stage.seams.remove(leave, stage.batch_generator, (1,), {})
    out = stage.last()
    assert (out["uid"], out["finish"], out["generated"]) == (1, "cancel", 1)
    assert out["committed"] == 4 and stage.count() == 1


def test_a_cancel_that_is_tried_again_leaves_no_record_yet():
    stage = Stage()
    stage.queue(0, [1, 2, 3])
    stage.cancel(0)
    stage.remove(0, removed=False)
    assert stage.count() == 0
    stage.remove(0)
    assert stage.last()["finish"] == "cancel"


def test_a_reply_that_a_collection_finds_is_cancelled_wherever_it_happens():
    """Its finalizer runs in the thread that allocates, also while that holds the lock."""
    stage = Stage()

    def compare():
        stage.queue(0, [1, 2, 3, 4])
        match = stage.tracker.history.match

        def collecting(*args):
            stage.cancel(7)
            return match(*args)

        stage.tracker.history.match = collecting
        stage.prefill((0, 0))

    thread = threading.Thread(target=compare, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the thread waits for itself"
    assert stage.tracker._cancelled == {(threading.get_ident(), 7)}


def test_a_row_that_fails_by_itself():
    stage = Stage()
    stage.queue(0, [1, 2, 3])
    batch = stage.decode(stage.prefill((0, 0)))
    stage.step(batch, 7)
    stage.remove(0, removed=False)
    out = stage.last()
    assert (out["finish"], out["error"], out["generated"]) == ("error", ROW_FAILED, 1)


def test_an_error_that_ends_every_request():
    stage = Stage()
    requests = [stage.queue(uid, [uid, 2, 3]) for uid in (0, 1)]
    queues = [request.rqueue for request in requests]
    told: list[Any] = []
    error = RuntimeError("out of memory")
    stage.seams.notify_queues(
        lambda *a: told.append(a), None, (queues, error, None), {}
    )
    assert stage.count() == 2 and stage.last()["error"] == "RuntimeError: out of memory"
    assert told == [(queues, error, None)]


def test_a_request_that_cannot_be_queued():
    stage = Stage()

    def refuse(*args: Any) -> None:
        raise ValueError("bad grammar")

    request = SimpleNamespace(request_id="r", prompt_tokens=5, args=None)
    stage.seams.prefill_started(lambda *a, **k: {}, stage.server, (request,), {})
    with pytest.raises(ValueError, match="bad grammar"):
        stage.seams.insert(refuse, stage.batch_generator, ([[1]],), {})
    out = stage.last()
    assert (out["finish"], out["prompt"], out["prefilled"]) == ("error", 5, 0)
    assert out["error"] == "ValueError: bad grammar"


@pytest.mark.parametrize("late", [False, True], ids=["stock", "row-errors"])
def test_a_request_that_fails_before_it_is_a_row(late):
    stage = Stage()
    request = SimpleNamespace(request_id="r", prompt_tokens=5, args=None)
    stage.seams.prefill_started(lambda *a, **k: {}, stage.server, (request,), {})

    def embed() -> Any:
        if not late:
            raise ValueError("bad picture")
        return SimpleNamespace(_error=ValueError("bad picture")), {}

    with contextlib.suppress(ValueError):
        stage.seams.prepare(embed, stage.server, (), {})
    assert stage.count() == 1
    assert stage.last()["error"] == "ValueError: bad picture"


def test_rows_without_a_request_leave_no_record():
    stage = Stage()
    stage.seams.insert(lambda *a: [0], stage.batch_generator, ([[1, 2]],), {})
    stage.decode(stage.prefill())
    assert stage.count() == 0 and not stage.tracker.flights


def test_a_row_that_is_read_twice_is_seen_once():
    stage = Stage()
    stage.queue(0, [1, 2, 3])
    stage.prefill((0, 0))
    stage.prefill((0, 0))
    stage.tracker.history.check_invariants()
    assert stage.tracker.history_size()["sequences"] == 1
    assert stage.tracker.flights[0].match.length == 0


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        ({"tenant": "b"}, reasons.OTHER_TENANT),
        ({"salt": 5}, reasons.OTHER_MEDIA),
        ({"skips": 1}, reasons.NO_MEMORY),
        ({"evicted": 1}, reasons.DROPPED),
        ({"media after": 1}, MEDIA_FOLLOWS),
        ({"media before": 1}, MEDIA_BEFORE),
        ({"off": "no manager"}, "the prefix cache is off"),
        ({"off": "layers"}, "this model's layers cannot be restored"),
        ({}, reasons.NOT_KEPT),
    ],
)
def test_the_reason_of_a_shortfall(prepare, reason):
    stage = Stage()
    stage.run(0, [1, 2, 3, 4, 5, 6, 7, 8], [STOP])
    if "off" in prepare:
        stage.batch_generator.apc = None
        if prepare["off"] == "no manager":
            stage.server.apc_manager = None
    follows, before = "media after" in prepare, "media before" in prepare
    stage.batch_generator._apc_suffix_is_text_only = lambda ids, n: not follows
    stage.batch_generator._apc_prefix_has_media_tokens = lambda ids, n: before
    stage.manager.stats.evictions += prepare.get("evicted", 0)

    def lookup(stats: Any) -> None:
        stats.memory_skips += prepare.get("skips", 0)

    out = stage.run(
        1,
        [1, 2, 3, 4, 5, 6, 7, 8, 9],
        [STOP],
        tenant=prepare.get("tenant"),
        salt=prepare.get("salt", 0),
        lookup=lookup,
    )
    assert out["shortfall"] == {"tokens": 8, "reason": reason}


def test_a_prefix_below_the_minimum():
    stage = Stage(whole_states=True)
    stage.run(0, [1, 2], [STOP])
    out = stage.run(1, [1, 2, 3, 4], [STOP])
    assert out["shortfall"]["reason"] == "below the minimum of 3 tokens"


def test_an_earlier_request_that_has_not_ended():
    stage = Stage()
    stage.queue(2, [4, 5, 6, 7, 8, 9])
    stage.prefill((2, 0))
    out = stage.run(3, [4, 5, 6, 7, 8, 9], [STOP])
    assert out["shortfall"]["reason"] == reasons.STILL_RUNNING


def test_a_whole_block_may_be_missing_and_a_repeat_computes_one_token():
    stage = Stage(block=4)
    stage.run(0, [1, 2, 3, 4, 5, 6, 7, 8], [STOP])
    out = stage.run(1, [1, 2, 3, 4, 5, 6, 7, 8], [STOP], restored=4)
    assert out["shortfall"] is None and (out["new"], out["re_read"]) == (0, 4)


def test_a_fault_in_the_record_never_reaches_the_request(monkeypatch, caplog):
    stage = Stage()
    monkeypatch.setattr(stage.tracker, "insert", lambda *a: 1 / 0)
    stage.queue(0, [1, 2, 3])
    assert stage.count() == 0


def test_threads_do_not_meet():
    stage = Stage()
    stage.queue(0, [1, 2, 3])
    other = threading.Thread(target=lambda: stage.run(0, [4, 5], [STOP]))
    other.start()
    other.join()
    assert stage.last()["prompt"] == 2
    assert stage.tracker.flights[0].prompt == 3
