"""One request on its way through the batch generator."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from .cache_view import CacheView
from .drafter_view import DrafterView
from .history import Ids, Match, Seen, as_ids
from .record import Shortfall, Source

ONLY_PROMPT = "only the prompt is kept: output-tokens is off"
ONLY_PROMPT_DRAFT = "only the prompt is kept: drafted-replies is off"
NOT_READ = "it ended before its prompt was read"
BROKEN_OFF = "an error broke the row off before it could be kept"


@dataclass(eq=False)
class Flight:
    """Filled in as the request passes the seams; read once, at its end.

    Attributes:
        id, tenant, queue: of stock's QueuedGenerationRequest, which is not kept: it holds pictures.
        uid: the row's number in its batch generator; -1 before it has one.
        ids: the prompt; None until the row is inserted.
        manager: the server's prefix cache, None where it is off; generator: the batch generator of the row.
        prompt_batch: the batch that reads the prompt, until decoding starts.
        meta: stock's prefix-cache notes on the row.
        row: the ledger that output-tokens keeps, or drafted-replies where a draft model writes; None where they are off.
        reply: ids fed after the prompt, where there is no ledger.
        draft_figures: what was drafted for this request alone, where speculative-turns counts it.
        draft_view: whether the draft model had read the prompt; of draft_model, None where there is none.
        emitted: tokens emitted, where a draft model writes: the newest is not in the ledger, and a round that was
            broken off can have left more there than came out; None elsewhere.
    """

    id: str
    model: str
    endpoint: str | None = None
    manager: Any = None
    tenant: str | None = None
    queue: Any = None
    prompt_tokens: int = 0
    generator: weakref.ref[Any] | None = None
    uid: int = -1
    ids: Ids | None = None
    cache: CacheView = field(default_factory=CacheView)
    match: Match = field(default_factory=Match)
    seen: Seen | None = None
    restored: int = 0
    source: Source = "none"
    from_disk: bool = False
    refused: bool = False
    shortfall: Shortfall | None = None
    prompt_batch: weakref.ref[Any] | None = None
    read: int | None = None
    meta: dict[str, Any] | None = None
    decoding: bool = False
    row: Any = None
    reply: list[int] = field(default_factory=list)
    emitted: int | None = None
    draft_model: Any = None
    draft_kind: str | None = None
    draft_before: tuple[Any, ...] | None = None
    draft_figures: Any = None
    draft_view: DrafterView = field(default_factory=DrafterView)

    @classmethod
    def of(cls, request: Any, model: str, endpoint: str | None, manager: Any) -> Flight:
        return cls(
            id=str(getattr(request, "request_id", None) or ""),
            model=model,
            endpoint=endpoint,
            manager=manager,
            tenant=getattr(getattr(request, "args", None), "tenant_id", None),
            queue=getattr(request, "rqueue", None),
            prompt_tokens=int(getattr(request, "prompt_tokens", 0) or 0),
        )

    @property
    def prompt(self) -> int:
        return int(self.ids.size) if self.ids is not None else self.prompt_tokens

    def prompt_read(self) -> int:
        """Prompt tokens that the cache of this row holds now, restored ones included."""
        if self.decoding:
            return self.prompt
        if self.read is not None:
            return self.read
        batch = self.prompt_batch() if self.prompt_batch is not None else None
        if batch is None or self.uid not in batch.uids:
            return 0
        return self.restored + _suffix_read(batch, batch.uids.index(self.uid))

    def freeze_progress(self) -> None:
        """Keep the progress of a row that is about to leave its prompt batch."""
        self.read = self.prompt_read()

    def all_ids(self) -> Ids | None:
        """Prompt and reply as far as the target has processed them."""
        if self.ids is None:
            return None
        if not self.decoding:
            return self.ids[: self.prompt_read()].copy()
        if self.row is not None and len(self.row.ids) >= self.prompt:
            return as_ids(self.row.ids)
        return as_ids([*self.ids.tolist(), *self.reply]) if self.reply else self.ids

    def last_token(self) -> int | None:
        """The newest token of the reply; None before the first."""
        if self.row is not None:
            return self.row.ids[-1] if len(self.row.ids) > self.prompt else None
        return self.reply[-1] if self.reply else None

    def commit_result(self) -> tuple[int, str | None]:
        """Tokens of this row in the cache after its end, and why not all of them."""
        if self.cache.off is not None:
            return 0, self.cache.off
        if not self.decoding:
            return 0, NOT_READ
        if (
            self.emitted is not None
            and self.row is not None
            and len(self.row.ids) == self.prompt
        ):
            # The newest token is not processed: of one token only the prompt is kept.
            return self._prompt_kept(), self.row.reason
        if self.row is not None:
            # Of a block cache, what is behind the last whole block is not kept.
            committed = int(self.row.committed) // self.cache.block * self.cache.block
            return committed, self.row.reason or (None if committed else BROKEN_OFF)
        reason = ONLY_PROMPT if self.draft_model is None else ONLY_PROMPT_DRAFT
        return self._prompt_kept(), reason

    def _prompt_kept(self) -> int:
        """What stock's own commit at the end of a prefill keeps: whole blocks, or the last whole state."""
        if not self.cache.whole_states:
            return self.prompt // self.cache.block * self.cache.block
        meta = self.meta or {}
        saved = (
            int(meta.get("checkpoint_stored") or 0)
            if meta.get("checkpoint_saved")
            else 0
        )
        return max(saved, self.restored)


def _suffix_read(batch: Any, index: int) -> int:
    """Real tokens of one row that a prompt batch has processed beyond the restored prefix."""
    columns = int(batch._processed_prompt_columns)
    if batch._right_pad_per_row is None:
        columns -= int(batch._left_padding_per_row[index])
    return min(int(batch._suffix_lens[index]), max(0, columns))
