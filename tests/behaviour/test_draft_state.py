"""A warm turn drafts as a cold one does: the drafter has read the whole prompt.

What a drafter proposes depends on all that it has read, so equal proposals round by
round, with equal replies, are equal counts of drafted and accepted tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tests
from tests.behaviour.sessions import new_tokens
from tests.fakes.models import DRAFTERS
from tests.fakes.proposals import Proposals
from tests.fakes.server import system, user

change = pytest.mark.change("draft-state")
KINDS = sorted(DRAFTERS)
SHORT = Path(tests.__file__).parents[1] / "mlx_vlm_cacheplus/sessions/short.jsonl"
# The newest token of a reply is not processed; where a prompt leaves the tree inside a
# segment, the last known token is read again for its hidden state.
SLACK = 2
RECORDS = "amber = fox yak sun\nbirch = owl ant bat\ncedar = dog ice hare\n"


def notes(lines=12):
    return system("Look words up.\n" + RECORDS * (lines // 3))


@pytest.fixture(params=KINDS)
def drafted(request, make_server):
    """A server with one of the trained drafters, and what that drafter proposes."""
    server = make_server(DRAFTERS[request.param], draft_model=request.param)
    return server, Proposals(server.generator.draft_model)


def turns(server, count, max_tokens=16):
    """Prompts of a conversation whose replies are free; all but the last are sent."""
    asked, replies = [notes(), user("get: amber")], []
    for turn in range(count):
        replies.append(server.chat(asked, max_tokens=max_tokens))
        asked = [*asked, replies[-1].message(), user(f"get: birch {turn}")]
    return asked, replies


def assert_drafts_as_cold(server, proposals, asked, **kw):
    """The prompt restores something, and drafts as it does on an empty cache."""
    proposals.take()
    warm = server.chat(asked, **kw)
    of_warm = proposals.take()
    server.clear_cache()
    cold = server.chat(asked, **kw)
    assert warm.cached_tokens > cold.cached_tokens == 0
    assert warm.ids == cold.ids
    assert of_warm == proposals.take() and of_warm
    return warm


@change
def test_c39_the_next_turn(drafted):
    server, proposals = drafted
    asked, replies = turns(server, 3)
    reply = assert_drafts_as_cold(server, proposals, asked, max_tokens=24)
    assert reply.prefilled <= new_tokens(reply, replies) + SLACK


@change
@pytest.mark.parametrize("keep", [1, 2, 5, 9])
def test_a_prompt_that_leaves_another_anywhere(drafted, keep):
    """Twice: the first departure leaves an end state where the second one departs."""
    server, proposals = drafted
    lines = RECORDS.splitlines() * 4
    for words in ("first", "second", "third"):
        text = "\n".join([*lines[:keep], f"delta = {words}", *lines[keep:]])
        asked = [system("Look words up.\n" + text), user("dump")]
        if words != "third":
            server.chat(asked, max_tokens=4)
    assert_drafts_as_cold(server, proposals, asked, max_tokens=24)


@change
def test_warm_rows_of_one_batch(drafted):
    server, proposals = drafted
    asks = []
    for lines in (6, 12):
        asked = [notes(lines), user("get: amber")]
        reply = server.chat(asked, max_tokens=8)
        asks.append([*asked, reply.message(), user("get: cedar")])
    bodies = [{"messages": asked, "max_tokens": 12} for asked in asks]
    proposals.take()
    warm = server.together(bodies)
    first = proposals.take()[0]
    for asked, reply in zip(asks, warm, strict=True):
        assert reply.cached_tokens > 0
        server.clear_cache()
        cold = server.chat(asked, max_tokens=12)
        assert cold.ids == reply.ids
        (row,) = proposals.take()[0]
        # Several rows may draft fewer tokens a round.
        assert any(row[: len(other)] == other for other in first)


@change
def test_sampled_replies_are_the_same_warm_and_cold(drafted):
    server, proposals = drafted
    asked, _ = turns(server, 2)
    assert_drafts_as_cold(
        server, proposals, asked, max_tokens=16, temperature=0.8, seed=11
    )


@change
def test_the_bundled_session_is_read_once(drafted):
    server, _ = drafted
    head, *rest = map(json.loads, SHORT.read_text().splitlines())
    asked, replies = [system(head["system"])], []
    for turn in rest[:4]:
        asked += turn["add"]
        reply = server.chat(asked, max_tokens=40)
        assert reply.prefilled <= new_tokens(reply, replies) + SLACK
        replies.append(reply)
        asked.append(reply.message())
    server.assert_cold(replies[-1])


@change
@pytest.mark.parametrize("name", ["dense-eagle3", "hybrid-mtp"])
def test_eighteen_turns_are_read_once(make_server, name):
    server = make_server(DRAFTERS[name], draft_model=name)
    asked, replies = [notes(48), user("get: amber")], []
    for turn in range(18):
        replies.append(server.chat(asked, max_tokens=12))
        asked += [replies[-1].message(), user(f"get: birch {turn}")]
    read = sum(reply.prefilled for reply in replies)
    new = sum(new_tokens(r, replies[:turn]) for turn, r in enumerate(replies))
    assert read / new <= 1.03
    server.assert_cold(replies[-1])


@change
def test_c12_a_cancelled_prefill_is_kept_for_the_drafter_too(make_server):
    server = make_server(
        "hybrid", draft_model="hybrid-mtp", env={"PREFILL_STEP_SIZE": "64"}
    )
    proposals = Proposals(server.generator.draft_model)
    asked = [notes(48), user("get: amber")]
    part = server.cancel(asked, after=1, max_tokens=8)
    assert len(part.prompt_ids) > 200
    assert_drafts_as_cold(server, proposals, asked, max_tokens=12)
