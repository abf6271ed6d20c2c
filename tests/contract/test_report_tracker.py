"""Every way that a request can end leaves one record; stock is played by plain objects here."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_vlm_cacheplus.reports import reasons
from mlx_vlm_cacheplus.reports.cache_view import MEDIA_BEFORE, MEDIA_FOLLOWS
from mlx_vlm_cacheplus.reports.drafter_view import NOT_READ_BY_DRAFTER, PRIMING_OFF
from mlx_vlm_cacheplus.reports.flight import NOT_READ, ONLY_PROMPT, ONLY_PROMPT_DRAFT
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


class Drafter:
    speculative_total_rounds = 10
    speculative_total_accepted = 20.0
    speculative_total_drafted = 40


def test_with_a_draft_model_tokens_come_in_rounds():
    draft = Drafter()
    stage = Stage(draft=draft)
    stage.queue(0, [1, 2, 3, 4])
    a_copy = Drafter()
    batch = stage.decode(stage.prefill((0, 0), draft_model=a_copy), ledgers=False)
    rounds = [[(7, None)], [(8, None), (9, None), (STOP, "stop")]]

    def emit(tokens: list[tuple[int, str | None]]) -> Any:
        replies = [SimpleNamespace(uid=0, token=t, finish_reason=f) for t, f in tokens]
        return stage.seams.speculative_next(lambda _: replies)(batch)

    emit(rounds[0])
    draft.speculative_total_rounds += 1
    draft.speculative_total_accepted += 2
    draft.speculative_total_drafted += 3
    assert len(emit(rounds[1])) == 3
    out = stage.last()
    assert (out["generated"], out["finish"]) == (4, "stop")
    assert (out["committed"], out["reason"]) == (4, ONLY_PROMPT_DRAFT)
    drafter = out["drafter"]
    assert (drafter["loaded"], drafter["kind"]) == (True, "mtp")
    assert (drafter["restored"], drafter["reason"]) == (False, PRIMING_OFF)
    counts = (drafter["rounds"], drafter["drafted"], drafter["accepted"])
    assert counts == (1, 3, 2)


@pytest.mark.parametrize(("rounds", "counts"), [(2, (2, 6, 5)), (0, (None,) * 3)])
def test_what_was_drafted_for_others_is_not_counted(rounds, counts):
    """Where speculative-turns keeps figures of each row."""
    draft = Drafter()
    stage = Stage(draft=draft)
    stage.queue(0, [1, 2, 3, 4])
    batch = stage.decode(stage.prefill((0, 0), draft_model=draft), ledgers=False)
    own = SimpleNamespace(
        rounds=rounds, drafted=6, accepted=5, batching="turns", batching_reason="why"
    )
    batch.draft_figures = {0: own, 5: SimpleNamespace()}
    draft.speculative_total_rounds += 9
    replies = [SimpleNamespace(uid=0, token=7, finish_reason="length")]
    stage.seams.speculative_next(lambda _: replies)(batch)
    drafter = stage.last()["drafter"]
    assert (drafter["rounds"], drafter["drafted"], drafter["accepted"]) == counts
    assert (drafter["batching"], drafter["batching_reason"]) == ("turns", "why")


def drafted_row(
    restored: int, *, whole: bool | None, reason: str | None = None, **coordinator: Any
) -> dict[str, Any]:
    """The drafter of one record. whole: of its primed row; None where the drafter is not primed."""
    stage = Stage(draft=Drafter())
    stage.queue(0, [1, 2, 3, 4])
    batch = stage.prefill(
        (0, restored),
        _speculative_prefill=(
            None
            if whole is None
            else SimpleNamespace(rows=[SimpleNamespace(whole=whole)])
        ),
        draft_reason=reason,
        _apc_coordinator=SimpleNamespace(**coordinator),
    )
    stage.decode(batch, ledgers=False)
    reply = SimpleNamespace(uid=0, token=STOP, finish_reason="stop")
    stage.seams.speculative_next(lambda _: [reply])(batch)
    out: dict[str, Any] = stage.last()["drafter"]
    return out


@pytest.mark.parametrize(
    ("row", "restored", "primed", "reason"),
    [
        ({"restored": 0, "whole": True}, False, True, None),
        ({"restored": 3, "whole": True, "companion": object()}, True, True, None),
        ({"restored": 3, "whole": False}, False, False, "draft-state is off"),
        (
            {
                "restored": 3,
                "whole": False,
                "companion": None,
                "companion_reason": "windows",
            },
            False,
            False,
            "windows",
        ),
        (
            {"restored": 3, "whole": False, "companion": object()},
            False,
            False,
            "its state could not be restored; the server's log says why",
        ),
        (
            {"restored": 0, "whole": None, "reason": "no forward pass"},
            False,
            False,
            "no forward pass",
        ),
    ],
)
def test_what_the_drafter_had_read(row, restored, primed, reason):
    out = drafted_row(**row)
    assert (out["restored"], out["primed"]) == (restored, primed)
    assert out["reason"] == reason


@pytest.mark.parametrize(("known", "short"), [(5, False), (9, True)])
def test_a_prefix_that_is_shorter_for_the_drafter(known, short):
    stage = Stage(block=1, draft=Drafter())
    stage.batch_generator.apc.companion = object()
    stage.manager.segments = SimpleNamespace(peek=lambda ids, salt: known)
    stage.run(0, list(range(1, 10)), [STOP])
    ids = [*range(1, 10), 77]
    primer = SimpleNamespace(rows=[SimpleNamespace(whole=True)])
    primed = {"_speculative_prefill": primer}
    out = stage.run(1, ids, [STOP], restored=4, prompt_batch=primed)
    assert out["shortfall"]["tokens"] == 5
    assert (out["shortfall"]["reason"] == NOT_READ_BY_DRAFTER) == short
    assert (out["drafter"]["reason"] == NOT_READ_BY_DRAFTER) == short


class DraftedStage:
    """One row that a draft model writes, with the ledger that drafted-replies keeps."""

    def __init__(self, prompt: list[int], **kwargs: Any):
        self.stage = Stage(draft=Drafter(), **kwargs)
        self.stage.queue(0, prompt)
        prompt_batch = self.stage.prefill((0, 0))
        self.row = SimpleNamespace(ids=list(prompt), committed=0, reason=None)
        self.batch = SimpleNamespace(
            uids=[0], drafted=SimpleNamespace(rows={0: self.row})
        )
        self.stage.seams.finish_prompt_batch(lambda: self.batch, prompt_batch, (), {})

    def emit(self, processed: list[int], tokens: list[int], finish: str | None = None):
        """A round: what the target has taken in, and what came out of it."""

        def stock(batch: Any) -> list:
            self.row.ids.extend(processed)
            if finish is not None:
                self.commit()
            last = len(tokens) - 1
            return [
                SimpleNamespace(
                    uid=0, token=t, finish_reason=finish if i == last else None
                )
                for i, t in enumerate(tokens)
            ]

        return self.stage.seams.speculative_next(stock)(self.batch)

    def commit(self) -> None:
        self.batch.drafted.rows.clear()
        self.row.committed = len(self.row.ids)


@pytest.mark.parametrize(("last", "finish"), [(STOP, "stop"), (9, "length")])
def test_a_drafted_reply_counts_what_came_out_and_keeps_what_was_processed(
    last, finish
):
    drafted = DraftedStage([1, 2, 3, 4], block=1)
    drafted.emit([], [5])
    drafted.emit([5, 6, 7], [6, 7, 8])
    drafted.emit([8], [last], finish)
    out = drafted.stage.last()
    assert (out["generated"], out["finish"]) == (5, finish)
    assert (out["committed"], out["reason"]) == (8, None)
    # The newest token was not processed, so the next turn reads it for the first time.
    again = drafted.stage.run(1, [1, 2, 3, 4, 5, 6, 7, 8, last, 3], [STOP], restored=8)
    assert (again["new"], again["prefilled"], again["re_read"]) == (2, 2, 0)


def test_a_drafted_reply_whose_client_hangs_up_inside_a_round():
    drafted = DraftedStage([1, 2, 3, 4], block=1)
    drafted.emit([], [5])
    drafted.emit([5, 6, 7], [6])
    drafted.stage.cancel(0)
    leave = lambda uid: drafted.commit() or True  # noqa: E731
    stage = drafted.stage
    stage.seams.remove(leave, stage.batch_generator, (0,), {})
    out = stage.last()
    assert (out["finish"], out["generated"], out["committed"]) == ("cancel", 2, 7)
    assert out["reason"] is None


def test_a_drafted_reply_of_one_token_keeps_its_prompt():
    drafted = DraftedStage([1, 2, 3, 4, 5])
    drafted.row.reason = "no token was processed after the prompt"
    drafted.emit([], [STOP], "stop")
    out = drafted.stage.last()
    assert (out["generated"], out["finish"], out["committed"]) == (1, "stop", 4)
    assert out["reason"] == "no token was processed after the prompt"


def test_a_drafted_row_that_was_forgotten_says_why():
    drafted = DraftedStage([1, 2, 3, 4], block=1)
    drafted.emit([], [5])
    drafted.emit([5], [6])
    drafted.row.reason = "an error broke the round off"
    drafted.stage.remove(0, removed=False)
    out = drafted.stage.last()
    assert (out["finish"], out["generated"], out["committed"]) == ("error", 2, 0)
    assert out["reason"] == "an error broke the round off"


def test_a_request_that_is_decoded_without_the_draft_model_has_none():
    draft = Drafter()
    stage = Stage(draft=draft)
    stage.queue(0, [1, 2, 3, 4])
    batch = stage.decode(stage.prefill((0, 0), draft_model=None), ledgers=False)
    draft.speculative_total_rounds += 1  # for others, while this one waited
    stage.step(batch, STOP)
    stage.filter(batch, [])
    out = stage.last()
    assert out["drafter"]["loaded"] is False and out["drafter"]["rounds"] is None
    assert out["reason"] == ONLY_PROMPT


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
