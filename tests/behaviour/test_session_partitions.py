"""Many agents on one server: each keeps its conversation, and costs nobody else theirs."""

from __future__ import annotations

import importlib
import uuid

import pytest

from tests.behaviour.sessions import new_tokens
from tests.behaviour.stored import sessions
from tests.behaviour.test_rejoin import records
from tests.fakes.server import RequestFailed, system, user

change = pytest.mark.change("session-partitions")
MODELS = ["dense", "hybrid"]
GB = 2**30
ENOUGH = 8 * GB
# What is needed of all that a cache without limit holds: not the end states of a hybrid
# that newer ones further on in the same conversation have superseded.
NEEDED = {"dense": 1.0, "hybrid": 0.6}
REPLY = "fox yak sun elk owl"
SESSIONS = "/v1/cache/sessions"
HEADER = "x-claude-code-session-id"


@pytest.fixture(autouse=True)
def memory_is_free(monkeypatch):
    """Where nothing is known of the machine's memory, stock takes the budget for all
    there is, and room for the next prefill would be taken from it."""
    apc = importlib.import_module("mlx_vlm.apc")
    monkeypatch.setattr(apc, "_free_ram_bytes", lambda: ENOUGH)


def bytes_held(server):
    stats = server.get("/v1/cache/stats")
    assert stats["resident_bytes"] <= stats["memory_max_bytes"]
    return stats["resident_bytes"]


def rows(server):
    answer = server.get(SESSIONS)
    assert answer["enabled"]
    return {row["id"]: row for row in answer["sessions"]}


def sessions_named(server, *names):
    """The sessions with these names, as the cache knows them."""
    found = sessions(server.manager)
    assert set(names) <= set(found), "these are no sessions"
    return [found[name] for name in names]


def the_only_session(server):
    """The one session that there is."""
    found = list(sessions(server.manager).values())
    assert len(found) == 1
    return found[0]


def prompt(name, lines=12, shared=None):
    """A conversation's first prompt; a session's own text is in the first message."""
    text = shared or f"{name} system\n{records(lines)['content']}"
    return [system(text), user(f"{name} get: amber3")]


class Agent:
    """One conversation; counts what its turns read beyond what was new."""

    def __init__(self, server, name, lines=12, shared=None, headers=None):
        self.server, self.name = server, name
        self.asked = prompt(name, lines, shared)
        self.headers = {HEADER: name} if headers is None else headers
        self.replies, self.prefilled, self.new = [], 0, 0

    def turn(self, known=None, script=REPLY):
        """Ask; ``known`` holds all earlier replies, where not only this agent's count."""
        seen = self.replies if known is None else known
        reply = self.server.chat(
            self.asked, script=script, max_tokens=12, headers=self.headers
        )
        self.prefilled += reply.prefilled
        self.new += new_tokens(reply, seen) + 1
        self.replies.append(reply)
        if known is not None:
            known.append(reply)
        self.asked += [reply.message(), user(f"again {self.name} {len(self.replies)}")]
        return reply

    @property
    def ratio(self):
        return self.prefilled / self.new


def with_room_for(make_server, model, fill, share=1.0):
    """A server whose budget is what is needed of what ``fill(server)`` leaves, times share."""
    server = make_server(model)
    fill(server)
    budget = share * NEEDED[model] * bytes_held(server)
    return make_server(model, apc_memory_max_gb=budget / GB)


def title(server, number, headers=None):
    server.chat(prompt(f"title {number}", lines=3), max_tokens=4, headers=headers)


@change
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("titles", [3, 10, 50])
def test_c09_titles_do_not_push_a_session_out(make_server, model, titles):
    def fill(server):
        main = Agent(server, "main")
        for _ in range(3):
            main.turn()
        title(server, 0)
        title(server, 1)

    server = with_room_for(make_server, model, fill)
    main = Agent(server, "main")
    main.turn()
    main.turn()
    for number in range(titles):
        # Claude Code's titles bear the session id of the conversation.
        title(server, number, main.headers if number % 2 else None)
        bytes_held(server)
    before = main.prefilled
    reply = main.turn(script=None)
    assert main.prefilled - before <= new_tokens(reply, main.replies[:-1]) + 1
    assert sessions_named(server, "main")[0].hits >= 2
    server.assert_cold(reply)


@change
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("count", [4, 8])
def test_with_a_budget_of_the_working_set_nobody_reads_again(make_server, model, count):
    """C14, C30: agents of one system prompt, in turn and at once; each as if alone."""
    shared = f"shared system\n{records(12)['content']}"

    def talk(server, titles=0):
        agents = [Agent(server, f"agent {n}", shared=shared) for n in range(count)]
        known = []
        title(server, "of the working set")
        for turn in range(3):
            for agent in agents:
                agent.turn(known)
            for number in range(titles):
                title(server, f"{turn} {number}")
        last = [
            {"messages": a.asked, "max_tokens": 8, "headers": a.headers} for a in agents
        ]
        return agents, server.together(last)

    server = with_room_for(make_server, model, talk)
    agents, replies = talk(server, titles=4)
    prefilled, new = (
        sum(getattr(a, of) for a in agents) for of in ("prefilled", "new")
    )
    assert prefilled <= 1.03 * new
    for agent, reply in zip(agents, replies, strict=True):
        assert reply.prefilled <= new_tokens(reply, agent.replies) + 1
        server.assert_cold(reply)
    found = sessions_named(server, *(agent.name for agent in agents))
    assert [session.requests for session in found] == [4] * count


@change
@pytest.mark.parametrize("model", MODELS)
def test_an_intruder_pays_for_itself(make_server, model):
    """C14: half of what all together would need; the intruder's prompts are never the same."""

    def fill(server):
        for n in range(3):
            agent = Agent(server, f"agent {n}")
            for _ in range(4):
                agent.turn()

    # Three agents within their share, and as much again for whoever wants more.
    server = with_room_for(make_server, model, fill, share=1.6)
    agents = [Agent(server, f"agent {n}") for n in range(3)]
    intruder = {HEADER: "intruder"}
    for turn in range(4):
        for agent in agents:
            agent.turn()
        for number in range(4 if turn else 0):
            cold = prompt(f"cold {turn} {number}", lines=14)
            server.chat(cold, max_tokens=4, headers=intruder)
            bytes_held(server)
    assert all(agent.ratio <= 1.10 for agent in agents), [a.ratio for a in agents]
    sessions_named(server, *(agent.name for agent in agents))
    server.assert_cold(agents[0].turn(script=None))


@pytest.mark.parametrize(
    "model",
    [
        # Blocks are shared as well; whole states are not.
        pytest.param("dense", marks=pytest.mark.guard),
        pytest.param("hybrid", marks=pytest.mark.change("segment-tree")),
    ],
)
def test_one_system_prompt_is_held_once(make_server, model):
    """C60: those of one owner share it, and nothing else; the tree alone does that."""
    shared = f"shared system\n{records(24)['content']}"
    server = make_server(model)
    first = Agent(server, "agent 0", shared=shared)
    one = first.turn()
    alone = bytes_held(server)
    for n in range(1, 5):
        agent = Agent(server, f"agent {n}", shared=shared)
        reply = agent.turn()
        if n > 1:
            assert reply.cached_tokens > 0.8 * len(one.prompt_ids)
    assert bytes_held(server) < (2 if model == "dense" else 4) * alone
    other = server.chat(first.asked, max_tokens=4, headers={"x-apc-tenant": "b"})
    assert other.cached_tokens == 0


@change
@pytest.mark.parametrize("how", ["header", "cache key", "metadata", "lineage"])
def test_c59_two_turns_are_one_session(make_server, how):
    server = make_server("dense")
    sent = {
        "header": {"headers": {"X-Hermes-Session-Id": "mine"}},
        "cache key": {"prompt_cache_key": "mine"},
        "metadata": {"metadata": {"user_id": "mine"}},
        "lineage": {},
    }[how]
    ask = server.messages if how == "metadata" else server.chat
    asked = [user("get: amber3")]
    for _ in range(2):
        reply = ask(asked, script=REPLY, max_tokens=12, **sent)
        asked += [reply.message(), user("again")]
    session = the_only_session(server)
    assert session.requests == 2
    assert session.name == (None if how == "lineage" else "mine")
    assert session.id == "mine" or how == "lineage"


@change
def test_c59_ids_that_change_with_every_request_are_ignored(make_server):
    server = make_server("dense")
    agent = Agent(server, "x", lines=4)
    for _ in range(5):
        agent.headers = {HEADER: str(uuid.uuid4())}
        agent.turn()
    assert agent.ratio <= 1.03
    session = the_only_session(server)
    assert session.requests == 5 and session.name is None


@change
def test_sessions_are_listed(make_server):
    """The endpoint says what the cache knows, and of what is shared that it is."""
    shared = f"shared system\n{records(24)['content']}"
    server = make_server("dense")
    agents = [Agent(server, f"agent {n}", shared=shared) for n in range(2)]
    for agent in agents:
        agent.turn()
    agents[0].turn()
    server.chat([user("get: amber3")], max_tokens=4, headers={"x-apc-tenant": "b"})
    listed, found = rows(server), sessions(server.manager)
    assert set(listed) == set(found) > {"agent 0", "agent 1"}
    for id_, row in listed.items():
        assert row["requests"] == found[id_].requests
        assert row["restored_tokens"] == found[id_].restored
        assert row["named"] == id_.startswith("agent")
        if not row["named"]:
            assert (row["tenant"], row["shared_bytes"]) == ("b", 0)
            continue
        assert row["tenant"] is None
        assert row["shared_bytes"] > 0, "the template's first words, at least"
    assert [listed[a.name]["state"] for a in agents] == ["live", "new"]
    assert sum(row["bytes"] for row in listed.values()) == pytest.approx(
        bytes_held(server), abs=len(listed)
    )


@change
def test_sessions_are_pinned_and_forgotten(make_server):
    server = make_server("dense")
    for name in ("one", "two"):
        agent = Agent(server, name, lines=6)
        agent.turn()
        agent.turn()
    before = bytes_held(server)
    server.post(SESSIONS + "/pin", {"session": "one"})
    assert rows(server)["one"]["pinned"]
    server.manager.segments.evict_to(0)
    held = rows(server)
    # What the other stands on besides is the template's first words.
    assert held["one"]["tokens"] > 10 * held["two"]["tokens"]
    server.post(SESSIONS + "/unpin", {"session": "one"})
    freed = server.post(SESSIONS + "/forget", {"session": "one"})["freed_bytes"]
    assert 0 < freed < before
    assert set(rows(server)) == {"two"} and bytes_held(server) < before / 10
    for verb, fields, status in (
        ("pin", {"session": "nobody"}, 404),
        ("pin", {}, 400),
        ("reset", {"scope": "disc"}, 400),
    ):
        with pytest.raises(RequestFailed) as refused:
            server.post(f"{SESSIONS}/{verb}", fields)
        assert refused.value.status == status


@change
@pytest.mark.parametrize("model", MODELS)
def test_c78_a_reset_of_all_leaves_nothing_behind(make_server, model):
    server = make_server(model)
    agent = Agent(server, "one", lines=6)
    agent.turn()
    assert agent.turn().cached_tokens > 0
    done = server.post(SESSIONS + "/reset", {"scope": "ram"})
    assert done["freed_bytes"] > 0 and bytes_held(server) == 0
    assert agent.turn().cached_tokens == 0
    assert set(rows(server)) == {"one"}
    done = server.post(SESSIONS + "/reset", {"scope": "all"})
    assert done["forgotten_sessions"] == 1 and not rows(server)
    assert bytes_held(server) == 0
    reply = agent.turn(script=None)
    assert reply.cached_tokens == 0
    server.assert_cold(reply)
