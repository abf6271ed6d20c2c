"""No change adds a host sync or an array operation to a decode step."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fakes.counting import counted
from tests.fakes.server import user

pytestmark = pytest.mark.guard

# What stock does around the model for one token of every row: read the last column,
# normalise, choose, and wait for the token before.
SYNCS = {"eval": 1, "tolist": 1}
OPERATIONS = {"__getitem__": 2, "logsumexp": 1, "__sub__": 1, "argmax": 1}
# Models with a fused greedy step are asked for it first.
EXTRA = {"hybrid": {"__getitem__": 1}}
ASK = "amber = fox yak sun. dump"


def plain_steps(steps, rows):
    """The steps in which nothing joined or ended."""
    return [s for s in steps[1:-1] if s.rows == rows]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("model", ["dense", "hybrid", "window"])
def test_decode_step_costs_what_it_costs_on_stock(make_server, model, rows):
    server = make_server(model)
    server.chat([user(ASK)], max_tokens=2)
    with counted(server) as steps:
        replies = server.together([{"messages": [user(ASK)], "max_tokens": 24}] * rows)
    assert all(len(reply.ids) > 6 for reply in replies)
    expected = Counter(OPERATIONS) + Counter(EXTRA.get(model))
    found = plain_steps(steps, rows)
    assert len(found) > 4
    assert {str(dict(s.syncs)) for s in found} == {str(SYNCS)}
    assert [s.operations for s in found] == [expected] * len(found)
