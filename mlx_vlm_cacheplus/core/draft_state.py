"""What the drafter has read is kept and restored with the target's part.

A segment of the tree carries a :class:`DraftPart`: the drafter's keys and values of the
segment's span.  Restoring a prefix restores both, so that a warm turn drafts as well as
a cold one, without another pass over the prompt.

*Look-ahead* drafters (MTP, EAGLE3) consume pairs: entry i has read the target's hidden
state i and token i + 1.  So an entry belongs to the token that completes it, i + 1: it
depends on the tokens up to there and on nothing behind.  A span of tokens s to e has the
entries s - 1 to e - 2, one for each token; the first token of all has an empty column.
The hidden state of the span's last token, still without a partner, is its ``pending``.
Where a prefix ends inside a span, or at the end of one that keeps no pending state, the
target reads the last token again and so has its hidden state; models whose other layers
can be resumed at one place only need the pending state there.

*Context* drafters (DFlash, DSpark) consume hidden states alone; entry i belongs to token i.

A drafter of another identity, or none, uses the target's part alone.  When it comes back
it finds its part again; segments that were written without it are read again once, which
primes it, and their part is filled in.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from . import segments
from .draft_priming import DraftPrimer, PrimedRow, takes_ragged_rows
from .resumable import Hit
from .segment_layers import Arrays, DenseLayer
from .segment_tree import Node

logger = logging.getLogger(__name__)

LOOKAHEAD_KINDS = ("mtp", "eagle3")
_numbers = itertools.count(1)


@dataclass
class DraftPart:
    """The drafter's part of one segment.

    Attributes:
        identity: which drafter; see :func:`identity_of`.
        spans: one tuple of arrays a layer, [1, heads, tokens, dim] each.
        pending: the target's hidden state at the end, [1, 1, features], or None.
    """

    identity: Any
    spans: list[Arrays]
    pending: mx.array | None = None
    nbytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.nbytes = sum(a.nbytes for span in self.spans for a in span)
        self.nbytes += 0 if self.pending is None else self.pending.nbytes

    def split(self, at: int) -> tuple[DraftPart, DraftPart]:
        """Cut after ``at`` tokens; the pending state goes with the tail."""
        head = [segments.cut(span, 0, at) for span in self.spans]
        tail = [segments.cut(span, at, span[0].shape[2]) for span in self.spans]
        mx.eval(head, tail)
        return DraftPart(self.identity, head), DraftPart(
            self.identity, tail, self.pending
        )

    def join(self, tail: DraftPart) -> DraftPart:
        """This part followed by ``tail``, whose pending state remains."""
        spans = [
            segments.side_by_side(*parts)
            for parts in zip(self.spans, tail.spans, strict=True)
        ]
        mx.eval(spans)
        return DraftPart(self.identity, spans, tail.pending)


@dataclass(frozen=True)
class DraftView:
    """How far one drafter can be resumed; the coordinator's ``companion``.

    Attributes:
        identity: whose parts count.
        lookahead: whether an entry needs the token behind its hidden state.
    """

    identity: Any
    lookahead: bool

    def resumable(self, path: Sequence[Node], length: int, exact: bool) -> int:
        """Longest length at which target and drafter can be resumed; 0 for none."""
        covered = 0
        for node in path:
            if node.payload.companion_identity != self.identity:
                break
            covered = node.end
        reach = min(length, covered)
        if exact and reach < length:
            return 0
        if not self.lookahead or _pending_at(path, reach) is not None:
            return reach
        return 0 if exact else reach - 1

    def restore(self, hit: Hit, capacity: int) -> PrimedRow:
        """The drafter's row at a hit's end; owns its arrays."""
        path = hit.node.path()
        pending = _pending_at(path, hit.length) if self.lookahead else None
        skip = int(self.lookahead)
        entries = hit.length if pending is None else hit.length - 1
        layers: list[Any] = []
        parts = [n.payload.companion.spans for n in path if n.start < entries + skip]
        held = sum(spans[0][0].shape[2] for spans in parts) - skip
        if held < entries:
            raise ValueError(f"the drafter's part holds {held} of {entries} entries")
        for sides in zip(*parts, strict=True):
            arrays = tuple(
                segments.joined(_without(side, skip), entries, capacity)
                for side in zip(*sides, strict=True)
            )
            layers.append(DenseLayer.rebuild(arrays, entries, None))
        mx.eval([(entry.keys, entry.values) for entry in layers])
        return PrimedRow(layers, entries, hit.length, pending=pending)


@dataclass
class DraftRow:
    """What a drafter holds of one row; the tree's companion source.

    Attributes:
        view: whose part it is.
        cache: the drafter's live cache, one row or a batch; borrowed.
        row: the row's place in it.
        tokens: tokens of the row's ids that its entries cover.
        pending: hidden state of the newest of these, [1, 1, features], or None.
    """

    view: DraftView
    cache: list[Any]
    row: int
    tokens: int
    pending: mx.array | None = None

    def wants(self, segment: segments.Segment, start: int) -> bool:
        """Whether a segment lacks what this row holds of it."""
        end = start + segment.tokens
        if end > self.tokens:
            return False
        if segment.companion_identity != self.view.identity:
            return True
        at_end = end == self.tokens and self.pending is not None
        return at_end and getattr(segment.companion, "pending", None) is None

    def capture(self, start: int, stop: int) -> DraftPart | None:
        """Copy the entries of tokens ``start`` to ``stop``; schedules, does not wait."""
        shift = int(self.view.lookahead)
        first = max(start - shift, 0)
        if stop - shift > first:
            spans = segments.capture_span(self.cache, self.row, first, stop - shift)
        elif self.cache and not any(entry.empty() for entry in self.cache):
            # The first token completes no pair; an entry tells what its column is like.
            spans = segments.capture_span(self.cache, self.row, 0, 1)
            spans = [tuple(a[..., :0, :] for a in span) for span in spans]
        else:
            return None
        if shift and start == 0:
            spans = [tuple(_with_empty_column(a) for a in span) for span in spans]
        pending = None
        if stop == self.tokens and self.pending is not None:
            pending = mx.contiguous(self.pending)
        mx.async_eval(spans, pending if pending is not None else [])
        return DraftPart(self.view.identity, spans, pending)

    def span_nbytes(self, tokens: int) -> int:
        """Bytes of so many tokens."""
        return segments.span_nbytes(self.cache, tokens)


def view_of(drafter: Any, kind: str | None) -> tuple[DraftView | None, str | None]:
    """How a drafter is kept, or None and why it is not."""
    if drafter is None or kind is None:
        return None, None
    name = type(drafter).__name__
    if kind == "mtp" and not hasattr(drafter, "prefill_from_target_hidden"):
        return None, f"{name} reads the target's own cache and has no state"
    # A composite is rebuilt by nobody here: each layer's entry is looked at as it is.
    kinds = [type(entry) for entry in drafter.make_cache()]
    if not kinds or any(kind not in DenseLayer.types for kind in kinds):
        return None, f"{name} keeps more than keys and values; it reads new tokens only"
    if not takes_ragged_rows(drafter, kind):
        # Rows that are read together are not primed; nothing would be kept of them, and
        # they would be read again at every turn.
        return None, f"{name} keeps one position for all rows; it reads new tokens only"
    return DraftView(identity_of(drafter, kind), kind in LOOKAHEAD_KINDS), None


def identity_of(drafter: Any, kind: str) -> Any:
    """Names a loaded drafter; two that are loaded apart are never the same."""
    number = drafter.__dict__.get("prefix_identity")
    if number is None:
        number = next(_numbers)
        object.__setattr__(drafter, "prefix_identity", number)
    return kind, type(drafter).__name__, number


def configure(coordinator: Any, drafter: Any, kind: str | None) -> None:
    """Tell a coordinator which drafter is resumed with the target."""
    coordinator.companion, coordinator.companion_reason = view_of(drafter, kind)


def restore_rows(prompt_batch: Any) -> None:
    """Let the drafter's rows of a new prompt batch begin where the target's do."""
    primer = prompt_batch._speculative_prefill
    view = getattr(prompt_batch._apc_coordinator, "companion", None)
    if view is None or not isinstance(primer, DraftPrimer):
        return
    for index, capacity in enumerate(prompt_batch._prompt_tokens_per_row):
        hit = _hit_of(prompt_batch, index)
        if hit is None:
            continue
        try:
            primer.rows[index] = view.restore(hit, capacity)
        except Exception as error:
            logger.warning("Drafter not restored: %s", error, exc_info=True)


def _hit_of(prompt_batch: Any, index: int) -> Hit | None:
    metas = prompt_batch._apc_meta or []
    meta = metas[index] if index < len(metas) else None
    held = meta.get("apc_blocks", []) if meta is not None else []
    return next((h for h in held if isinstance(h, Hit)), None)


@contextlib.contextmanager
def offered_while_read(prompt_batch: Any, uid: int | None = None) -> Iterator[None]:
    """Commit the drafter's rows with what a prompt batch commits.

    Args:
        prompt_batch: about to commit, or None.
        uid: the only row that may; the batch offers nothing if it is not its own.
    """
    if uid is not None and uid not in getattr(prompt_batch, "uids", ()):
        yield
        return
    primer = getattr(prompt_batch, "_speculative_prefill", None)
    coordinator = getattr(prompt_batch, "_apc_coordinator", None)
    view = getattr(coordinator, "companion", None)
    if view is None or not isinstance(primer, DraftPrimer):
        yield
        return
    ahead: list[PrimedRow] = []

    def source(index: int) -> DraftRow | None:
        row = primer.rows[index]
        if not row.whole or row.last is None:
            return None
        if not view.lookahead and row.entries < row.read:
            # The first round takes the last column; lend it one until then.
            primer.family.feed(row, row.last)
            ahead.append(row)
        return DraftRow(view, row.cache, 0, row.read, row.last)

    try:
        with _offered(coordinator, source):
            yield
    finally:
        for row in ahead:
            row.entries -= 1
            for entry in row.cache:
                entry.trim(1)


def attach(prompt_batch: Any, batch: Any) -> None:
    """Let a decoding batch commit its drafter's rows with its own."""
    primer = prompt_batch._speculative_prefill
    if getattr(batch, "drafted", None) is None or not isinstance(primer, DraftPrimer):
        return
    offer_rows(batch, primer, prompt_batch._apc_coordinator)


def offer_rows(batch: Any, primer: DraftPrimer, coordinator: Any) -> None:
    """Tell a decoding batch what its drafter holds of each row.

    Args:
        primer: its ``rows`` are in the order of the batch's own.
        coordinator: of the prefix cache, or None.
    """
    batch.primer, batch.coordinator = primer, coordinator
    if getattr(coordinator, "companion", None) is not None:
        batch.drafted.beside = functools.partial(
            _offered_while_written, primer, coordinator
        )


def _offered_while_written(
    primer: DraftPrimer, coordinator: Any, batch: Any, row: int, place: int, tokens: int
) -> Any:
    """Commit what the drafter holds of a row that ends with the row."""
    try:
        held = _written_row(batch, primer, coordinator.companion, row, place, tokens)
    except Exception as error:
        logger.warning("Drafter's part not kept: %s", error, exc_info=True)
        held = None
    return _offered(coordinator, lambda _: held)


def _written_row(
    batch: Any,
    primer: DraftPrimer,
    view: DraftView,
    row: int,
    place: int,
    tokens: int,
) -> DraftRow | None:
    accepted = batch.drafted.accepted.get(row)
    if accepted is None or not primer.rows[row].whole:
        return None
    if getattr(batch._rounds_iter, "gi_frame", True) is None:
        return None  # the loop has ended: rows may have moved since its last round
    if view.lookahead:
        drafter = batch.draft_model
        hidden = getattr(drafter, "verified_hidden", None)
        if hidden is None:
            return None
        pending = hidden[place : place + 1, accepted : accepted + 1]
        return DraftRow(view, drafter._cache, place, tokens, pending)
    features = batch.__dict__.get("verified_features")
    if features is None:
        return None
    own = primer.rows[row]
    hidden = mx.concatenate(features, axis=-1)[place : place + 1, : accepted + 1]
    primer.family.feed(own, hidden)
    return DraftRow(view, own.cache, 0, tokens)


@contextlib.contextmanager
def _offered(
    coordinator: Any, source: Callable[[int], DraftRow | None]
) -> Iterator[None]:
    coordinator.companion_source = source
    try:
        yield
    finally:
        coordinator.companion_source = None


def _pending_at(path: Sequence[Node], length: int) -> mx.array | None:
    """The pending hidden state of the segment that ends at ``length``."""
    for node in path:
        if node.end == length and node.payload.companion is not None:
            return node.payload.companion.pending
    return None


def _without(parts: Sequence[mx.array], skip: int) -> list[mx.array]:
    """The parts without their first columns."""
    return [parts[0][..., skip:, :], *parts[1:]] if skip else list(parts)


def _with_empty_column(a: mx.array) -> mx.array:
    """A column of zeros in front, for the token that completes no pair."""
    empty = mx.zeros((*a.shape[:2], 1, a.shape[3]), dtype=a.dtype)
    return mx.concatenate([empty, a], axis=2)
