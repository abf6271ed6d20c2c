"""The model's own ids stand for the text that it wrote.

A client sends a reply back as text.  Tokenizing that text again need not give the
ids that the model chose: there are several ways to spell a text in tokens, and a
reply cut inside a character has no exact spelling at all.  One differing id ends
the reuse of everything behind it.

Where a rendered prompt begins with an earlier prompt followed by exactly the text
of its reply, the ids of both are used again, because they decode to the same text.
White space at the end of a reply is the one exception: servers and templates strip it,
and the model reads what it wrote.
What follows keeps its own tokenization; it starts at a stop token, which no
tokenizer merges with its neighbours.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

# Conversations remembered; one entry each is enough, branches need more.
CAPACITY = 256
# And their size: 4 bytes an id, at least one a character.
MAX_BYTES = 32 << 20


@dataclass
class _Reply:
    """One prompt and its reply: rendered text, ids of both, and the reply's text."""

    prompt_text: str
    ids: Sequence[int]
    prompt_len: int
    tenants: frozenset[str | None]
    reply_text: str | None = field(default=None)

    @property
    def nbytes(self) -> int:
        return len(self.prompt_text) + 4 * len(self.ids)

    def to_bytes(self) -> bytes:
        tenants = sorted(self.tenants, key=str)
        return json.dumps(
            [self.prompt_text, list(self.ids), self.prompt_len, tenants]
        ).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> _Reply:
        text, ids, prompt_len, tenants = json.loads(content)
        return cls(text, array("I", ids), prompt_len, frozenset(tenants))


@dataclass
class _Prompt:
    """The text that a prompt's ids came from, and the tenants that sent it."""

    text: str
    tenants: frozenset[str | None]

    @property
    def nbytes(self) -> int:
        return len(self.text)


class ReplyIds:
    """Ids of recent replies, found again by the text in front of them.

    Prompts are noted and looked up on request threads, replies are noted on the
    generation thread; no array is touched and no tokenizer is called there.

    Args:
        keep: told of each reply, by key and as bytes that ``remember`` takes back.
    """

    def __init__(
        self,
        capacity: int = CAPACITY,
        keep: Callable[[bytes, bytes], None] | None = None,
    ):
        self._keep = keep
        self._capacity = capacity
        self._lock = threading.Lock()
        self._prompts: OrderedDict[bytes, _Prompt] = OrderedDict()
        self._replies: OrderedDict[bytes, _Reply] = OrderedDict()

    def note_prompt(self, text: str, ids: Sequence[int], tenant: str | None) -> None:
        """Remember which text a prompt's ids came from."""
        key = _key(ids)
        with self._lock:
            known = self._prompts.get(key)
            tenants = known.tenants if known is not None else frozenset()
            self._remember(self._prompts, key, _Prompt(text, tenants | {tenant}))

    def note_reply(self, ids: Sequence[int], prompt_len: int) -> None:
        """Remember a row's ids at its end: the prompt's, then the reply's."""
        with self._lock:
            prompt = self._prompts.get(_key(ids[:prompt_len]))
            if prompt is not None:
                reply = _Reply(prompt.text, array("I", ids), prompt_len, prompt.tenants)
                self._remember(self._replies, _key(ids), reply)
                if self._keep is not None:
                    self._keep(_key(ids), reply.to_bytes())

    def remember(self, kept: Iterable[bytes]) -> None:
        """Know replies again that were kept elsewhere, the newest last."""
        with self._lock:
            for content in kept:
                reply = _Reply.from_bytes(content)
                self._remember(self._replies, _key(reply.ids), reply)

    def spell(
        self,
        text: str,
        ids: Sequence[int],
        tokenizer: Any,
        stop_ids: Sequence[int],
        tenant: str | None,
    ) -> list[int]:
        """Respell ``ids``, the tokenization of ``text``, with the ids of a known reply.

        Args:
            text: the rendered prompt.
            ids: its ids as the tokenizer gave them.
            tokenizer: borrowed; the caller serializes its use.
            stop_ids: ids that can end a reply.
            tenant: whose replies may be used.

        Returns:
            Ids that decode to the same text; ``ids`` where no reply is known.
        """
        with self._lock:
            known = [
                reply
                for reply in self._replies.values()
                if tenant in reply.tenants and text.startswith(reply.prompt_text)
            ]
        known.sort(key=lambda r: len(r.ids), reverse=True)
        for reply in known:
            spelled = _spell_with(reply, text, list(ids), tokenizer, stop_ids)
            if spelled is not None:
                return spelled
        return list(ids)

    def _remember(self, table: OrderedDict, key: bytes, value: Any) -> None:
        """Put the newest last; the oldest leave when there are too many."""
        table.pop(key, None)
        table[key] = value
        nbytes = sum(kept.nbytes for kept in table.values())
        while len(table) > self._capacity or (nbytes > MAX_BYTES and len(table) > 1):
            nbytes -= table.popitem(last=False)[1].nbytes


def reply_ids_of(manager: Any) -> ReplyIds:
    """The store that belongs to a prefix cache's manager, made at first use."""
    store = getattr(manager, "reply_ids", None)
    if store is None:
        keep = getattr(manager, "keep_reply", None)
        store = manager.reply_ids = ReplyIds(keep=keep)
    return store


def ending_rows(batch: Any, keep: Sequence[int]) -> list[Any]:
    """Ledgers of the rows that ``GenerationBatch.filter`` is about to drop."""
    rows = getattr(batch, "output_rows", None) or {}
    staying = set(keep)
    return [
        rows[uid]
        for index, uid in enumerate(batch.uids)
        if index not in staying and uid in rows
    ]


def note_ended_rows(rows: Sequence[Any]) -> None:
    """Remember the ids of the rows that were committed; others are of no use."""
    for row in rows:
        if row.committed:
            reply_ids_of(row.coordinator.manager).note_reply(row.ids, row.prompt_len)


def respell_inputs(
    generator: Any,
    prompt: Any,
    raw_inputs: dict,
    media: Sequence[Any],
    tenant: str | None,
) -> dict:
    """Use known ids in the tokenized inputs of one text-only request.

    Args:
        generator: the server's response generator; borrowed.
        prompt: the rendered prompt.
        raw_inputs: ``input_ids`` and ``attention_mask``, each [1, tokens].
        media: pictures, sounds and videos; with any of them the inputs carry arrays
            aligned with their tokens, and pass unchanged.
        tenant: the request's; replies are not spelled as another tenant's were.
    """
    manager = getattr(generator, "apc_manager", None)
    plain = set(raw_inputs) == {"input_ids", "attention_mask"}
    if manager is None or any(media) or not plain or not isinstance(prompt, str):
        return raw_inputs
    canonical = raw_inputs["input_ids"].tolist()[0]
    tokenizer = generator.tokenizer
    stop_ids = getattr(
        getattr(tokenizer, "stopping_criteria", None), "eos_token_ids", ()
    )
    store = reply_ids_of(manager)
    ids = store.spell(prompt, canonical, tokenizer, stop_ids, tenant)
    store.note_prompt(prompt, ids, tenant)
    if ids == canonical:
        return raw_inputs
    # Built from lists: request threads have no stream of their own to compute on.
    return {
        "input_ids": mx.array([ids], dtype=raw_inputs["input_ids"].dtype),
        "attention_mask": mx.array(
            [[1] * len(ids)], dtype=raw_inputs["attention_mask"].dtype
        ),
    }


def _spell_with(
    reply: _Reply,
    text: str,
    ids: list[int],
    tokenizer: Any,
    stop_ids: Sequence[int],
) -> list[int] | None:
    emitted = list(reply.ids[reply.prompt_len :])
    if emitted and emitted[-1] in stop_ids:
        stop_ids = [emitted.pop(), *stop_ids]
    if reply.reply_text is None:
        reply.reply_text = _decode(tokenizer, emitted)
    # Servers strip white space behind a reply; what comes back is still that reply.
    for written in (reply.reply_text, reply.reply_text.rstrip()):
        head = reply.prompt_text + written
        if not text.startswith(head):
            continue
        for stop_id in stop_ids:
            stop_text = _decode(tokenizer, [stop_id])
            if not stop_text or not text.startswith(stop_text, len(head)):
                continue
            # Special tokens split a text before anything is merged, so counting them
            # tells where the reply ends in the tokenizer's own ids.
            if ids.count(stop_id) != text.count(stop_text):
                return None
            tail = _after_nth(ids, stop_id, text.count(stop_text, 0, len(head)))
            return [*reply.ids[: reply.prompt_len], *emitted, stop_id, *tail]
    return None


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def _after_nth(ids: list[int], wanted: int, skip: int) -> list[int]:
    """Ids behind occurrence number ``skip`` (from 0) of ``wanted``."""
    place = -1
    for _ in range(skip + 1):
        place = ids.index(wanted, place + 1)
    return ids[place + 1 :]


def _key(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("I", ids).tobytes(), digest_size=16).digest()
