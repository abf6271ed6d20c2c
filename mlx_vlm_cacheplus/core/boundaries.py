"""Where a prefill stops to keep an end state.

A recurrent layer can only be resumed where its state was kept.  Later prompts leave
or rejoin a conversation at few places, all of which can be seen in its token ids:

- the end of the system text and tools, where a new conversation begins;
- the start of the last message, where templates drop reasoning and clients retry;
- the place where the prompt leaves what the cache knows, because a second prompt that
  left there will not be the last;
- the end of the prompt (less the token that must be computed again);
- a stride, so that a long text between two of these costs at most one stride.

Messages start with the same special token as the prompt's first message.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

# A stop of the stride that is closer than this to another costs more in chunks than it
# saves in reading.  A wanted one is where a later prompt leaves, so it stays.
NEAREST = 16


def message_starts(ids: Sequence[int], special_ids: Collection[int]) -> list[int]:
    """Positions at which messages start; empty for a text without special tokens.

    A tokenizer's first token may be a beginning-of-text mark that occurs once; the
    token that opens messages is the first special one that occurs again.
    """
    places: dict[int, list[int]] = {}
    for position, token in enumerate(ids):
        if token in special_ids:
            places.setdefault(token, []).append(position)
    for positions in places.values():
        if len(positions) > 1:
            return positions
    return []


def rejoin_points(starts: Sequence[int], left: int = 0) -> list[int]:
    """End of the system text, and start of the last message before the reply's own.

    Args:
        left: where the prompt leaves what the cache knows, in tokens.  A point right
            behind it is left out: it would cost a step of its own in every turn, and
            save whoever comes back to it a handful of tokens.
    """
    points = [*starts[1:2], *starts[-2:-1]]
    return [p for p in points if not 0 < left < p < left + NEAREST]


def stops(
    wanted: Iterable[int], length: int, stride: int, final: int, media: Collection[int]
) -> list[int]:
    """Order the places; the stride's are thinned, the wanted ones stay.

    Args:
        wanted: places in any order, in tokens.
        length: the prompt's length.
        stride: longest distance without a stop, in tokens; 0 for none.  It is counted
            from the stop before, not from the prompt's start: a turn that is shorter
            than a stride is read in one step wherever it lies.
        final: the last stop, which always stays.
        media: positions of media tokens; no stop lies inside a run of them.
    """
    inside = {p for p in media if p - 1 in media}
    kept = {p for p in wanted if NEAREST <= p < final and p not in inside}
    kept |= {final} if final > 0 else set()
    for start, end in itertools.pairwise([0, *sorted(kept)]) if stride > 0 else ():
        kept.update(
            place
            for place in range(start + stride, end - NEAREST + 1, stride)
            if place not in inside
        )
    return sorted(kept)
