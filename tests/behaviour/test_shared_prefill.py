"""Requests that arrive together with the same cold prefix read it once."""

from __future__ import annotations

import contextlib
import importlib
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.behaviour.sessions import common
from tests.behaviour.stored import leases
from tests.behaviour.test_rejoin import records
from tests.fakes.host import REQUEST_SECONDS
from tests.fakes.oracle import make_drafter
from tests.fakes.replies import RequestFailed
from tests.fakes.server import system, user, wait_for

change = pytest.mark.change("shared-prefill")
MODELS = ["dense", "hybrid"]
SYSTEM = f"shared system\n{records(56)['content']}"
# Tokens below which nobody waits.
WORTH = 256
# Tokens that a row may read though another has read them: on layers that can be resumed
# at few places, from the last one before the prompts part.
AGAIN = 16
CHUNK = 64

generation = importlib.import_module("mlx_vlm.server.generation")
ar = importlib.import_module("mlx_vlm.generate.ar")


def agent(number, text=SYSTEM, lines=None, inside=False, **body):
    """A request of that system text, with a question of its own.

    inside: the text is in the question's message, so that prompts part inside a message.
    """
    own = records(6 + number if lines is None else lines)["content"]
    question = f"{number} is the agent's number\n{own}\nget: amber{number}"
    messages = [system(text), user(question)]
    if inside:
        messages = [user(f"{text}\n{question}")]
    return {"messages": messages, "max_tokens": 8, **body}


def agents(count=4, **body):
    return [agent(number, **body) for number in range(count)]


def shared_by(replies):
    """|S|: what all prompts begin with."""
    first = replies[0].prompt_ids
    return min(common(first, reply.prompt_ids) for reply in replies[1:])


def read(replies):
    return sum(reply.prefilled for reply in replies)


def assert_read_once(replies, times=1):
    """|S| + sum|U| and a few tokens: less than 2|S| + sum|U|, which is the least to reach."""
    shared = shared_by(replies)
    own = sum(len(reply.prompt_ids) - shared for reply in replies)
    assert shared > WORTH
    assert read(replies) <= times * shared + own + AGAIN * len(replies)
    assert AGAIN * len(replies) < shared / 2


def assert_as_if_alone(server, replies):
    for reply in replies:
        server.assert_cold(reply)
    assert leases(server.manager) == 0


@pytest.fixture
def embedded(monkeypatch):
    """What has been embedded and read, in order: ``("embed", tokens)``, ``("read", rows)``."""
    events = []
    embed = generation.ResponseGenerator._gpu_embed

    def gpu_embed(server, raw_inputs, *args, **kwargs):
        events.append(("embed", int(raw_inputs["input_ids"].shape[-1])))
        return embed(server, raw_inputs, *args, **kwargs)

    finish = ar.PromptProcessingBatch.generate

    def generate(batch, *args, **kwargs):
        events.append(("read", len(batch.uids)))
        return finish(batch, *args, **kwargs)

    monkeypatch.setattr(generation.ResponseGenerator, "_gpu_embed", gpu_embed)
    monkeypatch.setattr(ar.PromptProcessingBatch, "generate", generate)
    return events


class Held:
    """The first prefill stands before its chunk ``at`` until ``release`` is set."""

    def __init__(self, monkeypatch, at):
        self.reached, self.release = threading.Event(), threading.Event()
        step, calls = ar.PromptProcessingBatch.prompt_step, []

        def prompt_step(batch):
            calls.append(batch)
            if len(calls) == at:
                self.reached.set()
                self.release.wait(REQUEST_SECONDS)
            return step(batch)

        monkeypatch.setattr(ar.PromptProcessingBatch, "prompt_step", prompt_step)


@pytest.fixture
def held(monkeypatch):
    return lambda at: Held(monkeypatch, at)


def queued(server, count):
    wait_for(
        lambda: server.generator.requests.qsize() >= count, "requests are not queued"
    )


@change
@pytest.mark.parametrize("model", [*MODELS, "window"])
def test_c15_four_agents_read_the_system_text_once(make_server, embedded, model):
    server = make_server(model)
    replies = server.together(agents())
    assert_read_once(replies)
    assert_as_if_alone(server, replies)
    # The others hold no embeddings before the leader's prompt has been read.
    assert [event for event, _ in embedded[:2]] == ["embed", "read"]
    shortest = min(replies, key=lambda reply: len(reply.prompt_ids))
    assert embedded[0] == ("embed", len(shortest.prompt_ids))
    assert shortest.cached_tokens == 0
    for reply in replies:
        if reply is not shortest:
            assert reply.cached_tokens >= shared_by(replies) - AGAIN


@change
@pytest.mark.parametrize("model", MODELS)
def test_equal_prompts_are_read_once(make_server, model):
    server = make_server(model)
    replies = server.together([agent(3) for _ in range(4)])
    assert read(replies) <= len(replies[0].prompt_ids) + AGAIN * 3
    assert len({tuple(reply.ids) for reply in replies}) == 1
    assert_as_if_alone(server, replies[:1])


@change
@pytest.mark.parametrize("model, kind", [("hybrid", "mtp"), ("dense", "eagle3")])
def test_with_a_draft_model(make_server, tmp_path, model, kind):
    drafter = make_drafter(tmp_path / kind, kind=kind)
    server = make_server(model, draft_model=drafter, draft_kind=kind)
    assert server.generator.draft_model is not None
    replies = server.together(agents())
    assert_read_once(replies)
    assert_as_if_alone(server, replies)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("dense", marks=pytest.mark.guard),
        pytest.param("hybrid", marks=change),
    ],
)
@pytest.mark.parametrize("at", [1, 4])
def test_agents_join_while_it_is_being_read(make_server, held, model, at):
    """The leader's prefill learns where they leave it while it runs."""
    server = make_server(model, env={"PREFILL_STEP_SIZE": str(CHUNK)})
    stands = held(at)
    first, *others = agents(inside=True)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(server.chat, **first)]
        assert stands.reached.wait(REQUEST_SECONDS)
        jobs += [pool.submit(server.chat, **other) for other in others]
        queued(server, 3)
        stands.release.set()
        replies = [job.result(REQUEST_SECONDS) for job in jobs]
    assert_read_once(replies)
    assert_as_if_alone(server, replies)


@change
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
@pytest.mark.parametrize("model", MODELS)
def test_c15_another_takes_over_from_a_leader_that_hangs_up(
    make_server, held, model, order
):
    """The shortest one does, whoever came first: it is the first that is read."""
    server = make_server(model, env={"PREFILL_STEP_SIZE": str(CHUNK)})
    server.reload()  # no stop is planned for these prompts yet
    stands = held(2)
    first, *others = agents(inside=True)
    gone = server._expect(None, "stop")
    body = server._body({"messages": first["messages"]}, gone, True, {"max_tokens": 8})
    with ThreadPoolExecutor(3) as pool:
        with server.host.client.stream(
            "POST", "/v1/chat/completions", json=body
        ) as answer:
            assert answer.status_code == 200 and stands.reached.wait(REQUEST_SECONDS)
            jobs = []
            for place in order:
                jobs.append(pool.submit(server.chat, **others[place]))
                queued(server, len(jobs))
        wait_for(lambda: server.generator._cancelled, "nobody heard the hang-up")
        stands.release.set()
        replies = [job.result(REQUEST_SECONDS) for job in jobs]
    assert gone.prefilled < shared_by(replies) and not gone.ids
    shared = shared_by(replies)
    own = sum(len(reply.prompt_ids) - shared for reply in replies)
    # The next one reads on from where the first one was left.
    assert gone.prefilled + read(replies) <= shared + own + AGAIN * 4 + CHUNK
    assert_as_if_alone(server, replies)


@change
@pytest.mark.parametrize("model", MODELS)
def test_another_takes_over_from_a_leader_that_fails(make_server, monkeypatch, model):
    server = make_server(model)
    step, failed = ar.PromptProcessingBatch.prompt_step, []

    def prompt_step(batch):
        if not failed:
            failed.append(batch)
            raise RuntimeError("planted in a prefill")
        return step(batch)

    monkeypatch.setattr(ar.PromptProcessingBatch, "prompt_step", prompt_step)
    outcomes = server.settled(agents())
    replies = [out for out in outcomes if not isinstance(out, BaseException)]
    errors = [out for out in outcomes if isinstance(out, RequestFailed)]
    assert [error.status for error in errors] == [500] and len(replies) == 3
    assert_read_once(replies)
    assert_as_if_alone(server, replies)


@change
def test_followers_take_no_place_and_hold_nobody_up(make_server, embedded):
    """Two places: the leader's, and one for whoever has nothing to do with it."""
    server = make_server("dense", env={"MLX_VLM_MAX_NUM_SEQS": "2"})
    stranger = {
        "messages": [user(f"stranger\n{records(40)['content']}\nget: amber1")],
        "max_tokens": 8,
    }
    replies = server.together([*agents(), stranger])
    *sharing, other = replies
    assert_read_once(sharing)
    assert ("embed", len(other.prompt_ids)) in embedded[:2]
    assert embedded[2][0] == "read"
    assert_as_if_alone(server, replies)


@change
@pytest.mark.parametrize("model", MODELS)
def test_two_of_the_followers_share_more(make_server, model):
    """What they share is again read once: by one of them, when the first is done."""
    server = make_server(model)
    longer = f"{SYSTEM}\n{records(45, volatile='both know this')['content']}"
    replies = server.together([agent(0), agent(1, longer), agent(2, longer)])
    first, *two = replies
    both = shared_by(two)
    assert shared_by(replies) > WORTH and both - shared_by(replies) > WORTH
    own = sum(len(reply.prompt_ids) - both for reply in two)
    assert read(replies) <= len(first.prompt_ids) + (
        both - shared_by(replies) + own + AGAIN * 3
    )
    assert_as_if_alone(server, replies)


@change
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.given_by_others("shared-prefill", "hybrid")
def test_a_shorter_prompt_behind_one_that_waits_for_its_turn(make_server, held, model):
    """It waits for no longer one; the two are read one after the other."""
    server = make_server(model)
    stands = held(1)
    stranger = {"messages": [user(f"x\n{records(9)['content']}")], "max_tokens": 4}
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(server.chat, **stranger)]
        assert stands.reached.wait(REQUEST_SECONDS)
        for number in (9, 1):
            jobs.append(pool.submit(server.chat, **agent(number)))
            queued(server, len(jobs) - 1)
        stands.release.set()
        replies = [job.result(REQUEST_SECONDS) for job in jobs]
    assert_read_once(replies[1:])
    assert_as_if_alone(server, replies)


@pytest.mark.guard
@pytest.mark.parametrize("model", MODELS)
def test_what_is_not_worth_it_goes_together(make_server, embedded, model):
    server = make_server(model)
    short = f"short system\n{records(9)['content']}"
    replies = server.together([agent(n, short) for n in range(4)])
    assert shared_by(replies) < WORTH
    assert embedded[4:5] == [("read", 4)]
    assert_as_if_alone(server, replies)


@pytest.mark.guard
def test_tenants_share_nothing_and_do_not_wait(make_server, embedded):
    server = make_server("dense")
    replies = server.together(
        [agent(n, headers={"x-apc-tenant": str(n)}) for n in range(3)]
    )
    assert embedded[3:4] == [("read", 3)]
    assert all(reply.cached_tokens == 0 for reply in replies)


@pytest.mark.guard
@pytest.mark.parametrize("model", MODELS)
def test_one_that_hangs_up_while_it_waits_costs_nobody_anything(
    make_server, held, model
):
    server = make_server(model, env={"PREFILL_STEP_SIZE": str(CHUNK)})
    stands = held(2)
    first, gone, *others = agents()
    record = server._expect(None, "stop")
    short = {"max_tokens": 8}
    body = server._body({"messages": gone["messages"]}, record, False, short)
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(server.chat, **first)]
        assert stands.reached.wait(REQUEST_SECONDS)
        with pytest.raises(httpx.ReadTimeout):
            server.host.client.post("/v1/chat/completions", json=body, timeout=0.5)
        queued(server, 1)
        jobs += [pool.submit(server.chat, **other) for other in others]
        queued(server, 3)
        stands.release.set()
        replies = [job.result(REQUEST_SECONDS) for job in jobs]
    server.wait_idle()
    assert_as_if_alone(server, replies)


@pytest.mark.guard
def test_a_server_that_stops_answers_those_that_wait(make_server, held):
    server = make_server("dense", env={"PREFILL_STEP_SIZE": str(CHUNK)})
    stands = held(2)
    with ThreadPoolExecutor(5) as pool:
        server.recorder.admit_together(4)
        jobs = [pool.submit(server.chat, **request) for request in agents()]
        assert stands.reached.wait(REQUEST_SECONDS)
        generator = server.generator
        stopping = pool.submit(generator.stop_and_join, REQUEST_SECONDS)
        wait_for(lambda: generator._stop, "it does not stop")
        stands.release.set()
        with contextlib.ExitStack() as stack:
            stack.callback(server.reload)
            stopping.result(REQUEST_SECONDS)
            replies = [job.result(REQUEST_SECONDS) for job in jobs]
    assert all(reply.ids for reply in replies)
