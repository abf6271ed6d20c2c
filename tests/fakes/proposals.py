"""What a drafter proposes, round by round.

A drafter with random weights is hardly ever right, but what it proposes depends on all
that it has read: a restored drafter that proposes the same has read the same.
"""

from __future__ import annotations

from typing import Any


class Proposals:
    """The proposals of one drafter since ``clear``: one list of rows a round."""

    def __init__(self, draft_model: Any, name: str = ""):
        self.name = name
        self.rounds: list[list[list[int]]] = []
        base = type(draft_model)
        while "records_proposals" in vars(base):
            base = base.__mro__[1]
        draft_model.__class__ = _proposing(base, self.rounds)

    def take(self) -> list[list[list[int]]]:
        """The rounds so far, which are forgotten."""
        taken = list(self.rounds)
        self.rounds.clear()
        return taken


def _proposing(base: type, rounds: list[list[list[int]]]) -> type:
    running: list[str] = []

    def recorded(name: str) -> Any:
        method = getattr(base, name)

        def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
            running.append(name)
            try:
                tokens = method(self, *args, **kwargs)
            finally:
                running.pop()
            # One that calls the other would be recorded twice.
            if not running:
                rounds.append(tokens.tolist())
            return tokens

        return propose

    names = [n for n in ("draft_block", "draft_block_greedy") if hasattr(base, n)]
    recording = {name: recorded(name) for name in names}
    # A drafter is called by its class' name, among others where its part is stored.
    return type(base.__name__, (base,), {**recording, "records_proposals": True})
