"""An error in one row fails that row; the others of the batch go on."""

import asyncio
from queue import Queue
from threading import Lock

import pytest
from mlx_vlm.server import generation
from mlx_vlm.tests.generation_fixtures import Run, prompt_of, tiny_model
from mlx_vlm.tests.server_fixtures import Streamer, make_step_server

POISON = 95


@pytest.fixture
def model(monkeypatch):
    """Raises for every prompt that contains POISON."""
    made = tiny_model("dense")
    forward = type(made.language_model).__call__

    def checked(self, inputs, *args, **kwargs):
        is_prompt = kwargs.get("inputs_embeds") is not None
        if is_prompt and (inputs == POISON).any().item():
            raise RuntimeError("poisoned row")
        return forward(self, inputs, *args, **kwargs)

    monkeypatch.setattr(type(made.language_model), "__call__", checked)
    return made


@pytest.fixture
def server(monkeypatch):
    return make_step_server(monkeypatch)


class FailingStreamer(Streamer):
    """Raises at the token of this number, counted from 1."""

    def __init__(self, fail_at):
        self.fail_at = fail_at
        self.said = 0

    def advance(self, token, finish_reason):
        self.said += 1
        if self.said == self.fail_at:
            raise ValueError("detokenizer")
        return super().advance(token, finish_reason)


def activate(uids, streamers=None):
    return {
        uid: {"rqueue": Queue(), "streamer": (streamers or {}).get(uid, Streamer())}
        for uid in uids
    }


def serve_rows(server, run, active, steps=200):
    for _ in range(steps):
        if not run.generator.has_work:
            return
        server._step(run.generator, active)


def outcome(queue):
    """(number of tokens, error or None) of what a request was told."""
    items = list(queue.queue)
    errors = [item for item in items if isinstance(item, Exception)]
    tokens = [item for item in items if hasattr(item, "token")]
    return len(tokens), errors[0] if errors else None


@pytest.mark.parametrize("rows", [1, 3])
def test_row_that_fails_in_prefill_fails_alone(model, server, rows):
    prompts = [prompt_of(12, seed) for seed in range(rows)]
    prompts[-1] = prompts[-1][:-1] + [POISON]
    run = Run(model)
    uids = run.insert(prompts)
    active = activate(uids)
    queues = {uid: info["rqueue"] for uid, info in active.items()}
    serve_rows(server, run, active)
    count, error = outcome(queues[uids[-1]])
    assert count == 0 and "poisoned row" in str(error)
    for uid in uids[:-1]:
        assert outcome(queues[uid]) == (8, None)


def test_row_that_decodes_survives_a_row_that_fails_in_prefill(model, server):
    run = Run(model)
    (one,) = run.insert([prompt_of(12, 1)], max_tokens=20)
    active = activate([one])
    first = active[one]["rqueue"]
    while first.qsize() < 3:
        server._step(run.generator, active)
    (two,) = run.insert([prompt_of(9, 2) + [POISON]])
    active.update(activate([two]))
    second = active[two]["rqueue"]
    serve_rows(server, run, active)
    assert outcome(first) == (20, None)
    assert "poisoned row" in str(outcome(second)[1])


def test_detokenizer_error_stays_with_its_row(model, server):
    run = Run(model)
    uids = run.insert([prompt_of(12, 1), prompt_of(12, 2)])
    active = activate(uids, {uids[0]: FailingStreamer(fail_at=3)})
    queues = [active[uid]["rqueue"] for uid in uids]
    serve_rows(server, run, active)
    assert isinstance(outcome(queues[0])[1], ValueError)
    assert outcome(queues[1]) == (8, None)


def test_logits_processor_error_stays_with_its_row(model, server):
    def broken(tokens, logits):
        if len(tokens) > 14:
            raise ValueError("grammar")
        return logits

    args = generation.GenerationArguments(logits_processors=[broken])
    processors = server._make_logits_processors(args)
    run = Run(model)
    uids = run.insert(
        [prompt_of(12, 1), prompt_of(12, 2)],
        logits_processors=[processors, None],
    )
    active = activate(uids)
    queues = [active[uid]["rqueue"] for uid in uids]
    serve_rows(server, run, active)
    assert isinstance(outcome(queues[0])[1], ValueError)
    assert outcome(queues[1]) == (8, None)


def test_error_without_a_server_is_raised(model):
    run = Run(model)
    run.insert([[5, POISON]])
    with pytest.raises(RuntimeError, match="poisoned row"):
        for _ in range(4):
            run.step()


class Reply:
    """A reply of the server, as far as the client's end of it."""

    def __init__(self, server, active):
        self.rqueue = Queue()
        active[0] = {"rqueue": self.rqueue}
        self.iterator = generation._TokenIterator(self.rqueue, 0, server._cancel, 1.0)


@pytest.fixture
def cancelling(server):
    server._cancelled, server._cancel_lock = set(), Lock()
    server.rows_in_flight = {}
    return server


def test_late_cancel_spares_the_next_row_of_that_uid(cancelling):
    active = cancelling.rows_in_flight
    ended, running = Reply(cancelling, active), Reply(cancelling, active)
    ended.iterator.close()
    assert cancelling._drain_cancellations() == set()
    running.iterator.close()
    assert cancelling._drain_cancellations() == {0}


def test_stream_that_is_cancelled_in_a_write_cancels_its_row(cancelling):
    streams = []

    async def app(scope, receive, send):
        async def stream():
            reply = Reply(cancelling, cancelling.rows_in_flight)
            yield reply
            reply.iterator.close()

        streams.append(stream())
        await anext(streams[0])
        # The client goes; the stream is left suspended, and somebody still holds it.

    asyncio.run(serve(app))
    assert cancelling._drain_cancellations() == {0}


async def serve(app):
    """One request through the middleware of the server's application."""
    from mlx_vlm.server import app as server_app
    from mlx_vlm.server.hang_ups import RepliesEndWithTheirRequest

    installed = [middleware.cls for middleware in server_app.user_middleware]
    assert RepliesEndWithTheirRequest in installed
    await RepliesEndWithTheirRequest(app)({"type": "http"}, None, None)
