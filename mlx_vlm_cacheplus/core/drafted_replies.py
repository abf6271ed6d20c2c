"""The cache keeps replies that were written with a draft model.

Under speculation a verify step feeds several tokens at once and keeps those that the
target agrees with.  A reply can end anywhere inside such a block: at a stop token, at
its row's budget, or because the client is gone.  The caches then run ahead of the
reply, and a recurrent state that has run ahead cannot be taken back.

Here a round is cut where a row ends, before the verify step is committed, and each row
keeps the ledger that ``output_tokens`` keeps for rows without a drafter.

Invariants:

1. A round's cut happens before its commit, so no layer ever holds a token behind a
   row's end, and rejected tokens leave no trace.
2. The ledger grows by what a round has committed: the token that the round fed first,
   and the accepted ones.  The newest token of a reply is emitted, but not processed;
   so a reply of n tokens is kept up to its token n - 1.
3. A round that raises makes the batch forget its ledgers.
4. Nothing is added to a round but integers: no array operation, no host sync.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlx_vlm.speculative.common import _requires_uniform_batch_acceptance

from .output_tokens import OutputRow, commit_row
from .reply_ids import reply_ids_of

_current = threading.local()


class DraftedRows:
    """What the round loop of one speculative batch does to its rows.

    Rows are numbered as in the batch's ``_all_uids``.

    Attributes:
        rows: the ledgers of the rows that have not ended, by uid.
        active: the rows that the caches hold, in their order there.
        gone: rows that the round loop drops when it goes on.
        bonus: the newest token of each row, emitted but not processed.
        round: what the running round has decided: (row, accepted, new tokens).
        newest: the same of the newest round, kept when ``round`` is entered.
        accepted: the newest round's accepted draft tokens of each row.
        beside: entered while a row is committed, with (batch, row, place in the
            caches, tokens that were processed); for whoever keeps more of a row.
        apart: whether the running round of the batch that it is given may leave rows at
            unequal lengths though the target asks for equal ones.
        shown: of the batch's cache entries, those that a row is committed from.
    """

    def __init__(self, uids: Sequence[int], rows: dict[int, OutputRow]):
        self.rows = rows
        self.active = list(range(len(uids)))
        self.gone: set[int] = set()
        self.bonus: dict[int, int] = {}
        self.round: list[tuple[int, int, list[int]]] | None = None
        self.newest: list[tuple[int, int, list[int]]] = []
        self.accepted: dict[int, int] = {}
        self.beside: Callable[[Any, int, int, int], Any] = _alone
        self.apart: Callable[[Any], bool] = _never
        self.shown: Callable[[Sequence[Any]], Sequence[Any]] = list

    def forget(self, reason: str) -> None:
        """Keep nothing of this batch."""
        for row in self.rows.values():
            row.reason = reason
        self.rows.clear()
        self.round = None


def current_batch() -> Any:
    """The speculative batch whose round is running on this thread, or None."""
    return getattr(_current, "batch", None)


def _alone(batch: Any, row: int, place: int, tokens: int) -> Any:
    return contextlib.nullcontext()


def _never(batch: Any) -> bool:
    return False


def attach_drafted_rows(batch: Any, rows: dict[int, OutputRow]) -> None:
    """Hand the ledgers to a speculative batch; it owns them from here."""
    if getattr(batch, "is_speculative", False):
        batch.drafted = DraftedRows(batch._all_uids, rows)


@contextlib.contextmanager
def recorded_round(batch: Any) -> Iterator[None]:
    """Run one call of ``SpeculativeGenerationBatch.next`` with its rows at hand."""
    drafted: DraftedRows | None = getattr(batch, "drafted", None)
    _current.batch = batch if drafted is not None else None
    try:
        yield
    except Exception:
        if drafted is not None:
            drafted.forget("an error broke the round off")
        raise
    finally:
        _current.batch = None


def cut_at_row_ends(
    accepted: Sequence[int], new_tokens: Sequence[list[int]]
) -> tuple[list[int], list[list[int]]]:
    """Shorten a round's acceptance so that no row runs ahead of its reply.

    Where the caches need the same acceptance for all rows, one row's end cuts all.
    Call after the walk and before anything is committed; a second call on what the
    first returned changes nothing.

    Args:
        accepted: accepted draft tokens of each active row.
        new_tokens: what each row is about to emit: the accepted tokens and the
            target's own next one.

    Returns:
        Both, cut; outside a recorded round as they came.
    """
    accepted, new_tokens = list(accepted), list(new_tokens)
    batch = current_batch()
    if batch is None:
        return accepted, new_tokens
    drafted: DraftedRows = batch.drafted
    drafted.active = [row for row in drafted.active if row not in drafted.gone]
    if len(drafted.active) != len(accepted):
        drafted.forget("the round loop has other rows than expected")
        return accepted, new_tokens
    for place, row in enumerate(drafted.active):
        end = _end_of_row(batch, row, new_tokens[place])
        if end is not None:
            new_tokens[place] = new_tokens[place][:end]
            accepted[place] = min(accepted[place], end - 1)
    target = getattr(batch.model, "language_model", batch.model)
    if rows_accept_alike(batch.draft_model, target):
        least = min(accepted)
        new_tokens = [tokens[: least + 1] for tokens in new_tokens]
        accepted = [least] * len(accepted)
    drafted.round = list(zip(drafted.active, accepted, new_tokens, strict=True))
    drafted.newest = drafted.round
    return accepted, new_tokens


def rows_accept_alike(draft_model: Any, target: Any = None) -> bool:
    """Whether the running round must be clamped to the row that accepts least.

    Args:
        draft_model, target: either may ask for it, because its caches cannot hold rows of
            unequal age.
    """
    asked = _requires_uniform_batch_acceptance(draft_model, target)
    batch = current_batch()
    return bool(asked) and (batch is None or not batch.drafted.apart(batch))


def _end_of_row(batch: Any, row: int, tokens: Sequence[int]) -> int | None:
    """How many of these tokens the row still emits; None if it goes on."""
    if batch._finished[row]:
        return None
    room = batch.max_tokens[row] - batch._num_tokens[row]
    for number, token in enumerate(tokens, start=1):
        if batch.stop_criteria(token) or number >= room:
            return number
    return None


def watched_stop_check(
    stop_check: Callable[[int, int], bool],
) -> Callable[[int, int], bool]:
    """A stop check that also tells which rows the round loop is about to drop.

    In a batch of several rows it is asked before a token is emitted, and then says of
    a row's last token that it is the last, so that the row is not verified once more.
    """
    batch = current_batch()
    if batch is None:
        return stop_check
    several = len(batch._all_uids) > 1

    def check(row: int, token: int) -> bool:
        last = several and batch._num_tokens[row] + 1 >= batch.max_tokens[row]
        ended = stop_check(row, token) or last
        if ended:
            batch.drafted.gone.add(row)
        return ended

    return check


def commit_drafted_rows(batch: Any) -> None:
    """Commit the rows that have ended, before the batch lets go of its caches.

    Call where the batch refreshes its rows: between rounds, or while a round is
    emitted, so that what was decided is committed and what ended is still there.
    """
    drafted: DraftedRows | None = getattr(batch, "drafted", None)
    if drafted is None or not batch.prompt_cache:
        return
    _settle(batch, drafted)
    in_cache = drafted.active
    if getattr(batch._rounds_iter, "gi_frame", True) is None:
        # The round loop has ended and has dropped what it was about to drop.
        in_cache = [row for row in in_cache if row not in drafted.gone]
    for row, uid in enumerate(batch._all_uids):
        if batch._finished[row] and uid in drafted.rows:
            ledger = drafted.rows.pop(uid)
            if row in in_cache:
                place = in_cache.index(row)
                with drafted.beside(batch, row, place, len(ledger.ids)):
                    commit_row(ledger, drafted.shown(batch.prompt_cache), place)
            else:
                ledger.reason = "its row has left the caches"
            if ledger.committed:
                written = [*ledger.ids, drafted.bonus[row]]
                emitted = written[: ledger.prompt_len + batch._num_tokens[row]]
                store = reply_ids_of(ledger.coordinator.manager)
                store.note_reply(emitted, ledger.prompt_len)


def _settle(batch: Any, drafted: DraftedRows) -> None:
    """Enter what was committed since the last call into the ledgers."""
    if not drafted.bonus:
        drafted.bonus = dict(enumerate(batch.first_tokens.tolist()))
    for place, accepted, new in drafted.round or ():
        row = drafted.rows.get(batch._all_uids[place])
        if row is not None:
            row.ids.extend([drafted.bonus[place], *new[:accepted]])
        drafted.accepted[place] = accepted
        if new:
            drafted.bonus[place] = new[-1]
    drafted.round = None
