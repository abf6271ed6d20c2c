"""A session on servers that end between all of its turns, by SIGTERM and by SIGKILL."""

from __future__ import annotations

import signal

import pytest

from mlx_vlm_cacheplus.replay import session as sessions
from tests.stress.restarts import DRAFTERS, WAITS, Ending, Models, Player
from tests.stress.server_kills import Canonical

TERM, KILL = Ending(signal.SIGTERM), Ending(signal.SIGKILL)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """models(name) -> a float32 copy, so that how a prompt was split changes no token."""
    return Models(tmp_path_factory.mktemp("models"))


def check(session, models, home, model, drafter, endings):
    """Same tokens as without an end; what was read over what was new.

    With a draft model as many tokens are drafted, and accepted, in each turn.
    """
    more = ("--draft-model", models(DRAFTERS[model])) if drafter else ()
    off = (*more, "--cacheplus-disk", "off")
    whole = Player(session, models(model), home / "whole", off).play([Ending()])
    ended = Player(session, models(model), home / "ended", more).play(endings)
    assert ended.texts == whole.texts
    assert ended.drafts[: len(whole.drafts)] == whole.drafts
    assert any(accepted for _, accepted in whole.drafts) == drafter
    return ended.read / whole.new


@pytest.mark.timeout(600)
def test_a_few_turns(models, tmp_path):
    session = sessions.load("short").first(2)
    assert check(session, models, tmp_path, "hybrid", False, [KILL, TERM]) <= 1.03


@pytest.mark.timeout(600)
def test_killed_right_behind_replies_that_wait(models, tmp_path):
    check_killed_at_once(models, tmp_path, "hybrid", sessions.load("short").first(2))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", DRAFTERS)
def test_killed_right_behind_all_replies_that_wait(models, tmp_path, model):
    session = sessions.load("coding-agent-18")
    check_killed_at_once(models, tmp_path, model, session)


def check_killed_at_once(models, home, model, session):
    """Killed where the client has seen the end of a reply: only what is new is read."""
    off, at_once = ("--cacheplus-disk", "off"), Ending(signal.SIGKILL, 0.0)
    whole = Player(session, models(model), home / "whole", off).play([Ending()])
    killed = Player(session, models(model), home / "killed", WAITS).play([at_once])
    assert killed.texts == whole.texts
    assert killed.read <= 1.03 * whole.new


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("drafter", [False, True])
@pytest.mark.parametrize("model", DRAFTERS)
@pytest.mark.parametrize("ending", [TERM, KILL])
def test_the_bundled_session(models, tmp_path, model, drafter, ending):
    session = sessions.load("coding-agent-18")
    ratio = check(session, models, tmp_path, model, drafter, [ending])
    print(f"{model} drafter={drafter} {ending.how.name}: re-read {ratio:.4f}")
    assert ratio <= 1.03


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", DRAFTERS)
@pytest.mark.parametrize("think", [0.25, 1.0])
def test_killed_while_the_client_thinks(models, tmp_path, model, think):
    """A client needs some time for its next turn; until then what it has is on disk."""
    session = sessions.load("coding-agent-18").first(8)
    ending = Ending(signal.SIGKILL, think)
    ratio = check(session, models, tmp_path, model, False, [ending])
    print(f"{model} SIGKILL after {think} s: re-read {ratio:.4f}")
    assert ratio <= 1.03


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", DRAFTERS)
def test_killed_right_behind_each_reply(models, tmp_path, model):
    """A race: what was not written is read again, and no token differs.

    How a reply is spelled is lost with it, and another spelling is another prompt: here
    all servers spell as the tokenizer does.
    """
    session = sessions.load("coding-agent-18").first(8)
    off, at_once = ("--cacheplus-disk", "off"), Ending(signal.SIGKILL, 0.0)

    def play(name, arguments, ending):
        home = tmp_path / name
        more = {"arguments": arguments, "kind": Canonical}
        return Player(session, models(model), home, **more).play([ending])

    whole, killed = play("whole", off, Ending()), play("killed", (), at_once)
    print(f"{model} SIGKILL at once: {killed.read} tokens read, {whole.read} without")
    assert killed.texts == whole.texts
    assert killed.read < 3 * whole.read
