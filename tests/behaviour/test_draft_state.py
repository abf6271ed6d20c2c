"""A warm turn drafts as a cold one does: the drafter has read the whole prompt.

What a drafter proposes depends on all that it has read, so equal proposals round by
round, with equal replies, are equal counts of drafted and accepted tokens.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

import tests
from tests.behaviour.sessions import new_tokens
from tests.fakes.models import DRAFTERS, drafter_dir, model_dir
from tests.fakes.proposals import Proposals
from tests.fakes.server import system, user
from tests.fakes.unchunked import Unchunked

change = pytest.mark.change("draft-state")
KINDS = sorted(DRAFTERS)
SHORT = Path(tests.__file__).parents[1] / "mlx_vlm_cacheplus/sessions/short.jsonl"
# The newest token of a reply is not processed; where a prompt leaves the tree inside a
# segment, the last known token is read again for its hidden state.
SLACK = 2
RECORDS = "amber = fox yak sun\nbirch = owl ant bat\ncedar = dog ice hare\n"


BLOCK = 4
SETTINGS = {"env": {"MLX_VLM_DRAFT_BLOCK_SIZE": str(BLOCK), "PREFILL_STEP_SIZE": "64"}}


def notes(lines=12):
    return system("Look words up.\n" + RECORDS * (lines // 3))


PLACES = (1, 2, 5, 9)


def either(name, stock_can, *values):
    """One case: stock can, where what its drafter sees of the prompt is all it needs."""
    mark = pytest.mark.guard if stock_can else change
    return pytest.param(name, *values, marks=mark)


@functools.cache
def unchunked(name):
    """The drafter and its target, apart from every server."""
    return Unchunked(str(model_dir(DRAFTERS[name])), str(drafter_dir(name)))


@pytest.fixture(params=KINDS)
def drafted(request, make_server):
    """A server with one of the trained drafters, and what that drafter proposes."""
    return serving(make_server, request.param)


def serving(make_server, name):
    server = make_server(DRAFTERS[name], draft_model=name, **SETTINGS)
    return server, Proposals(server.generator.draft_model, name)


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
    if "temperature" not in kw:
        assert_has_read(proposals.name, warm, of_warm[0])
    return warm


def assert_has_read(name, reply, first_round):
    """The first round holds what a drafter proposes that was primed in one pass."""
    wanted = unchunked(name).first_proposal(reply.prompt_ids, BLOCK)
    # Several rows may draft fewer tokens a round.
    assert wanted[: len(first_round[0])] in first_round


@change
def test_c39_the_next_turn(drafted):
    server, proposals = drafted
    asked, replies = turns(server, 3)
    reply = assert_drafts_as_cold(server, proposals, asked, max_tokens=24)
    assert reply.prefilled <= new_tokens(reply, replies) + SLACK


@pytest.mark.parametrize(
    ("drafted", "keep"),
    [
        either(name, name == "dense-eagle3" and k > 2, k)
        for name in KINDS
        for k in PLACES
    ],
    indirect=["drafted"],
)
@pytest.mark.given_by_others("draft-state", "hybrid-mtp")
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


@pytest.mark.parametrize(
    "drafted", [either(name, name == "dense-eagle3") for name in KINDS], indirect=True
)
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
        assert_has_read(proposals.name, reply, first)
        server.clear_cache()
        assert server.chat(asked, max_tokens=12).ids == reply.ids


@change
@pytest.mark.parametrize("name", ["dense-dflash", "hybrid-mtp"])
def test_sampled_replies_are_the_same_warm_and_cold(make_server, name):
    """EAGLE-3 rounds draw without the seed, and two replies can differ."""
    server, proposals = serving(make_server, name)
    asked, _ = turns(server, 2)
    sampled = {"max_tokens": 16, "temperature": 0.8, "seed": 11}
    assert_drafts_as_cold(server, proposals, asked, **sampled)
    # And it is the drafter that has read the prompt, not one that never has.
    asked, _ = turns(server, 2)
    assert_drafts_as_cold(server, proposals, asked, max_tokens=8)


@change
@pytest.mark.given_by_others("draft-state")
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
@pytest.mark.given_by_others("draft-state")
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
    server, proposals = serving(make_server, "hybrid-mtp")
    asked = [notes(48), user("get: amber")]
    part = server.cancel(asked, after=1, max_tokens=8)
    assert len(part.prompt_ids) > 200
    assert_drafts_as_cold(server, proposals, asked, max_tokens=12)
