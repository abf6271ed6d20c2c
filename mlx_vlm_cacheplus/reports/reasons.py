"""Why less was restored than an earlier request had in common, in words, as far as it can be known cheaply."""

from __future__ import annotations

from collections.abc import Callable

from .cache_view import CacheView
from .drafter_view import NOT_READ_BY_DRAFTER
from .history import Match
from .record import Shortfall

OTHER_TENANT = "the earlier request was another tenant's"
OTHER_MEDIA = "the earlier request had other media or cache settings"
STILL_RUNNING = "the earlier request had not ended"
NO_MEMORY = "budget: no memory to restore it"
DROPPED = "budget: the state was dropped"
NO_STATE_HERE = "no state is kept where the prompt leaves the earlier one"
NOT_KEPT = "not in the cache: it was cleared, or had no room"


def missing_tokens(common: int, restored: int, prompt: int, cache: CacheView) -> int:
    """Tokens short of what could have been restored; 0 within the rounding. One token is always computed."""
    missing = min(common, prompt - 1) - restored
    return missing if missing > cache.block else 0


def explain_shortfall(
    match: Match,
    *,
    restored: int,
    prompt: int,
    tenant: str | None,
    salt: int | None,
    cache: CacheView,
    refused: bool,
    media_in_the_way: Callable[[int], str],
    shorter_for_drafter: Callable[[], bool] = lambda: False,
) -> Shortfall | None:
    """None where nothing is short. refused: the lookup of this request met the memory budget."""
    missing = missing_tokens(match.length, restored, prompt, cache)
    earlier = match.sequence
    if not missing or earlier is None:
        return None
    media = media_in_the_way(match.length)
    rules: list[tuple[Callable[[], bool], str]] = [
        (lambda: cache.off is not None, cache.off or ""),
        (lambda: earlier.tenant != tenant, OTHER_TENANT),
        (
            lambda: None not in (earlier.salt, salt) and earlier.salt != salt,
            OTHER_MEDIA,
        ),
        (lambda: earlier.running, STILL_RUNNING),
        (
            lambda: match.length < cache.minimum,
            f"below the minimum of {cache.minimum} tokens",
        ),
        (lambda: bool(media), media),
        (shorter_for_drafter, NOT_READ_BY_DRAFTER),
        (lambda: refused, NO_MEMORY),
        (
            lambda: match.length > max(earlier.prompt, earlier.committed),
            earlier.reason or "",
        ),
        (
            lambda: earlier.dropped is not None and cache.evictions > earlier.dropped,
            DROPPED,
        ),
        (
            lambda: cache.whole_states and match.length < earlier.committed,
            NO_STATE_HERE,
        ),
    ]
    reason = next(
        (text for applies, text in rules if text and applies()),
        earlier.reason or NOT_KEPT,
    )
    return Shortfall(missing, reason)
