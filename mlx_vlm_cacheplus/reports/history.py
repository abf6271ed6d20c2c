"""Token ids of earlier requests, to tell what is new in a prompt.

A prompt's new tokens are its length less its longest common prefix with any earlier prompt + reply of this server.
Sequences are int32 arrays, bounded in bytes and in number, the oldest out first. A sequence that a later one contains
from the start tells nothing more and leaves early, so a conversation costs about one sequence, not one a turn.

Invariants, checked by `check_invariants()`:
1. The bytes counted are the bytes held, and both bounds hold.
2. Sequences are in order of arrival, each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

MAX_BYTES = 32 << 20
MAX_SEQUENCES = 4096
_CHUNK = 4096


def as_ids(ids: Sequence[int]) -> Ids:
    return np.asarray(ids, dtype=np.int32)


def common_prefix(a: Ids, b: Ids) -> int:
    """Tokens that two sequences share from the start. Chunked: a difference near the start costs little."""
    length = min(a.size, b.size)
    for start in range(0, length, _CHUNK):
        stop = min(start + _CHUNK, length)
        differs = a[start:stop] != b[start:stop]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
    return length


@dataclass(eq=False)
class Seen:
    """One request's tokens, and what a later request must know to explain why it could not reuse them.

    Attributes:
        ids: prompt + reply as far as the server has read them; replaced when the request ends.
        prompt: how many of ids are the prompt, in tokens.
        model: nothing is shared between models, equal as their ids may be.
        tenant: isolation salt of the request; salt: everything that keys its entries (tenant, media, model).
        running: the request has not ended.
        committed: tokens in the cache at its end; reason: why not all of them.
        dropped: the cache's count of evictions when it ended.
    """

    ids: Ids
    prompt: int
    model: str = ""
    tenant: str | None = None
    salt: int | None = None
    running: bool = True
    committed: int = 0
    reason: str | None = None
    dropped: int | None = None


@dataclass(frozen=True)
class Match:
    """The best earlier sequence for a prompt; none where nothing is shared."""

    length: int = 0
    sequence: Seen | None = None
    # First position where the prompt and that sequence differ; None where one ends before they do.
    divergence: int | None = None


@dataclass
class TokenHistory:
    """Owns the arrays it is given. Not thread-safe: the tracker holds a lock."""

    max_bytes: int = MAX_BYTES
    max_sequences: int = MAX_SEQUENCES
    bytes_held: int = 0
    _sequences: list[Seen] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._sequences)

    def match(self, ids: Ids, model: str = "") -> Match:
        """The longest common prefix with any sequence of the model; the newest wins where several share it.

        A sequence can only beat the best so far if it agrees at that very position, which rules out nearly all of them
        at the price of one comparison.
        """
        best, found = 0, None
        for sequence in reversed(self._sequences):
            held = sequence.ids
            if best >= ids.size:
                break
            if sequence.model == model and held.size > best and held[best] == ids[best]:
                length = common_prefix(ids, held)
                if length > best:
                    best, found = length, sequence
        if found is None:
            return Match()
        diverges = best < min(ids.size, found.ids.size)
        return Match(best, found, best if diverges else None)

    def add(self, sequence: Seen) -> Seen:
        self._sequences.append(sequence)
        self.bytes_held += sequence.ids.nbytes
        self._drop_oldest()
        return sequence

    def replace(self, sequence: Seen, ids: Ids) -> None:
        """Give a sequence its final tokens. One that the bounds have already pushed out stays out."""
        held = sequence in self._sequences
        if held:
            self.bytes_held += ids.nbytes - sequence.ids.nbytes
        sequence.ids = ids
        if held:
            self._drop_oldest()

    def drop(self, sequence: Seen) -> None:
        if sequence in self._sequences:
            self._sequences.remove(sequence)
            self.bytes_held -= sequence.ids.nbytes

    def clear(self) -> None:
        self._sequences.clear()
        self.bytes_held = 0

    def _drop_oldest(self) -> None:
        while self._sequences and (
            self.bytes_held > self.max_bytes
            or len(self._sequences) > self.max_sequences
        ):
            self.bytes_held -= self._sequences.pop(0).ids.nbytes

    def check_invariants(self) -> None:
        assert self.bytes_held == sum(s.ids.nbytes for s in self._sequences)
        assert (
            self.bytes_held <= self.max_bytes
            and len(self._sequences) <= self.max_sequences
        )
        assert len({id(s) for s in self._sequences}) == len(self._sequences)
