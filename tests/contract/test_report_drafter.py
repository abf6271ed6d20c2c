"""What the record of a request says of a draft model; stock is played by plain objects here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlx_vlm_cacheplus.reports.drafter_view import NOT_READ_BY_DRAFTER, PRIMING_OFF
from mlx_vlm_cacheplus.reports.flight import ONLY_PROMPT, ONLY_PROMPT_DRAFT

from .report_stage import STOP, Stage


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
