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

# Two stops closer than this cost more in chunks than they save in reading.
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
    """Order the places and thin them.

    Args:
        wanted: places in any order, in tokens.
        length: the prompt's length.
        stride: longest distance without a stop, in tokens; 0 for none.
        final: the last stop, which always stays.
        media: positions of media tokens; no stop lies inside a run of them.
    """
    grid = range(stride, length, stride) if stride > 0 else ()
    inside = {p for p in media if p - 1 in media}
    kept: list[int] = []
    for place in sorted({*wanted, *grid}):
        near_last = kept and place - kept[-1] < NEAREST
        if NEAREST <= place <= final - NEAREST and place not in inside:
            if not near_last:
                kept.append(place)
    return [*kept, final] if final > 0 else kept
