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


def rejoin_points(starts: Sequence[int]) -> list[int]:
    """End of the system text, and start of the last message before the reply's own."""
    return [*starts[1:2], *starts[-2:-1]]


def stops(
    wanted: Iterable[int], length: int, stride: int, final: int, media: Collection[int]
) -> list[int]:
    """Order the places; the stride's are thinned, the wanted ones stay.

    Args:
        wanted: places in any order, in tokens.
        length: the prompt's length.
        stride: longest distance without a stop, in tokens; 0 for none.
        final: the last stop, which always stays.
        media: positions of media tokens; no stop lies inside a run of them.
    """
    inside = {p for p in media if p - 1 in media}
    kept = {p for p in wanted if NEAREST <= p < final and p not in inside}
    kept |= {final} if final > 0 else set()
    grid = range(stride, min(length, final), stride) if stride > 0 else ()
    for place in grid:
        if place not in inside and not _has_near(kept, place):
            kept.add(place)
    return sorted(kept)


def _has_near(kept: Collection[int], place: int) -> bool:
    return any(abs(place - other) < NEAREST for other in kept)
