"""What a turn may read, for tests that replay a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.fakes.replies import Reply

# Stock stores dense layers in blocks of this many tokens.
BLOCK = 16
# Tokens that a turn may read beyond what is new to the server.
SLACK = {"dense": BLOCK, "hybrid": 1, "window": 1, "vlm": 1}


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def new_tokens(reply: Reply, earlier: Iterable[Reply]) -> int:
    """Prompt tokens that no earlier prompt and reply of the server began with."""
    known = [common(reply.prompt_ids, [*e.prompt_ids, *e.ids]) for e in earlier]
    return len(reply.prompt_ids) - max(known, default=0)


def assert_reads_only_new(reply: Reply, earlier: Sequence[Reply], model: str) -> None:
    """The turn forwarded what is new, and at most the model's slack."""
    new = new_tokens(reply, earlier)
    assert reply.prefilled <= new + SLACK[model], (
        f"{reply.prefilled} tokens read, {new} are new "
        f"(prompt {len(reply.prompt_ids)}, restored {reply.cached_tokens})"
    )
    assert reply.prefilled >= 1
    assert reply.cached_tokens + reply.prefilled == len(reply.prompt_ids)


def follows(reply: Reply, first: Reply) -> bool:
    """The prompt begins with the first one's prompt and whole reply."""
    whole = [*first.prompt_ids, *first.ids]
    return common(reply.prompt_ids, whole) == len(whole)
