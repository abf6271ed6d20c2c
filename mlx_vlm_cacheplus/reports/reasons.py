"""Why less was restored than an earlier request had in common, in words, as far as it can be known cheaply."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .cache_view import CacheView
from .drafter_view import NOT_READ_BY_DRAFTER
from .history import Match, Seen
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
    reasons = _reasons(
        match,
        earlier,
        tenant=tenant,
        salt=salt,
        cache=cache,
        refused=refused,
        media_in_the_way=media_in_the_way,
        shorter_for_drafter=shorter_for_drafter,
    )
    return Shortfall(missing, next(reasons))


def _reasons(
    match: Match,
    earlier: Seen,
    *,
    tenant: str | None,
    salt: int | None,
    cache: CacheView,
    refused: bool,
    media_in_the_way: Callable[[int], str],
    shorter_for_drafter: Callable[[], bool],
) -> Iterator[str]:
    """The reasons that hold, the most telling one first; at least one."""
    if cache.off:
        yield cache.off
    if earlier.tenant != tenant:
        yield OTHER_TENANT
    if None not in (earlier.salt, salt) and earlier.salt != salt:
        yield OTHER_MEDIA
    if earlier.running:
        yield STILL_RUNNING
    if match.length < cache.minimum:
        yield f"below the minimum of {cache.minimum} tokens"
    if media := media_in_the_way(match.length):
        yield media
    if shorter_for_drafter():
        yield NOT_READ_BY_DRAFTER
    if refused:
        yield NO_MEMORY
    if earlier.reason and match.length > max(earlier.prompt, earlier.committed):
        yield earlier.reason
    if earlier.dropped is not None and cache.evictions > earlier.dropped:
        yield DROPPED
    if cache.whole_states and match.length < earlier.committed:
        yield NO_STATE_HERE
    yield earlier.reason or NOT_KEPT
