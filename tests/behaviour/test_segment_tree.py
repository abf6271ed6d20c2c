"""A session reads every token once, and answers as a cold run does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tests
from tests.behaviour.sessions import common, new_tokens
from tests.fakes.oracle import make_drafter
from tests.fakes.server import system, user

change = pytest.mark.change("segment-tree")
MODELS = ["dense", "hybrid", "window"]
RECORDS = "amber = fox yak sun\nbriar = elk owl ant\n"
SHORT = Path(tests.__file__).parents[1] / "mlx_vlm_cacheplus/sessions/short.jsonl"


def rules(lines=12):
    """A system message of 6 tokens a line."""
    return system("Look words up.\n" + RECORDS * (lines // 2))


def session(server, turns=4, *, ask="chat", lines=12):
    """Replies of a conversation: a text that comes back as it was, at last a free one."""
    asked, out = [rules(lines), user("get: amber")], []
    for turn in range(turns):
        script = "fox yak sun" if turn + 1 < turns else None
        out.append(getattr(server, ask)(asked, script=script, max_tokens=16))
        asked += [out[-1].message(), user(f"get: briar {turn}")]
    return out


def assert_reads_new(server, replies, slack=1):
    """Every turn forwards what no reply before it ended with; the last is a cold run's."""
    for turn, reply in enumerate(replies):
        new = new_tokens(reply, replies[:turn])
        assert (
            reply.prefilled <= new + slack
        ), f"turn {turn}: {reply.prefilled} tokens read, {new} are new"
        assert reply.cached_tokens + reply.prefilled == len(reply.prompt_ids)
    server.assert_cold(replies[-1])


def reread_ratio(replies):
    """Tokens read, to the tokens that had to be: prompts less what came before."""
    new = [new_tokens(reply, replies[:turn]) for turn, reply in enumerate(replies)]
    return sum(reply.prefilled for reply in replies) / sum(new)


@change
@pytest.mark.parametrize("ask", ["chat", "responses", "messages"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.given_by_others("segment-tree", "hybrid", "window")
def test_a_turn_reads_what_is_new(make_server, model, ask):
    server = make_server(model)
    assert_reads_new(server, session(server, ask=ask))


@change
def test_quantized_keys_are_kept_as_they_are(make_server):
    """The reference run knows no quantization: an empty cache says what is right."""
    server = make_server("dense", kv_bits=8, kv_group_size=32)
    asked, seen = [rules(), user("get: amber")], []
    for turn in range(3):
        reply = server.chat(asked, script="fox yak sun", max_tokens=8)
        asked += [reply.message(), user(f"get: briar {turn}")]
        assert reply.prefilled <= new_tokens(reply, seen) + 1
        seen.append(reply)
    warm = server.chat(asked, max_tokens=16)
    server.clear_cache()
    cold = server.chat(asked, max_tokens=16)
    assert warm.cached_tokens > cold.cached_tokens == 0
    assert warm.ids == cold.ids


@change
@pytest.mark.parametrize("model", ["dense", "hybrid"])
@pytest.mark.given_by_others("segment-tree", "hybrid")
def test_two_sessions_beside_each_other(make_server, model):
    """Free replies; they end behind a word, so that their text has all of them."""
    server = make_server(model)
    sides = [[rules(), user("get: amber")], [rules(20), user("get: briar")]]
    seen = []
    for turn in range(3):
        for asked in sides:
            reply = server.chat(asked, max_tokens=13)
            new = new_tokens(reply, seen)
            # Where the second leaves the first, a hybrid has no end state yet.
            assert reply.prefilled <= new + 1 or len(seen) == 1
            server.assert_cold(reply)
            seen.append(reply)
            asked += [reply.message(), user(f"get: amber {turn}")]


@change
@pytest.mark.parametrize("model", ["dense", "hybrid"])
@pytest.mark.given_by_others("segment-tree", "hybrid")
def test_the_bundled_session_is_read_once(make_server, model):
    server = make_server(model)
    head, *turns = map(json.loads, SHORT.read_text().splitlines())
    asked, replies = [system(head["system"])], []
    for turn in turns:
        asked += turn["add"]
        replies.append(server.chat(asked, max_tokens=80))
        asked.append(replies[-1].message())
    assert reread_ratio(replies) <= 1.02
    server.assert_cold(replies[3])


@change
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.given_by_others("segment-tree", "hybrid", "window")
def test_eighteen_turns_are_read_once(make_server, model):
    server = make_server(model)
    replies = session(server, 18, lines=50)
    assert len(replies[-1].prompt_ids) < 2000
    assert reread_ratio(replies) <= 1.02


@pytest.fixture(scope="session")
def drafter(tmp_path_factory):
    return make_drafter(tmp_path_factory.mktemp("drafter") / "mtp")


@pytest.mark.guard
def test_with_a_drafter_a_prompt_is_read_once(make_server, drafter):
    """What the model wrote beside a drafter is not kept; its prompt is."""
    server = make_server("hybrid", draft_model=drafter)
    asked, before = [rules(), user("get: amber")], None
    for turn in range(3):
        reply = server.chat(asked, max_tokens=16)
        server.assert_cold(reply)
        if before is not None:
            shared = common(before.prompt_ids, reply.prompt_ids)
            assert reply.prefilled <= len(reply.prompt_ids) - shared + 2
        asked += [reply.message(), user(f"get: briar {turn}")]
        before = reply
