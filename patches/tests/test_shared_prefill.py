"""Requests that arrive together with the same cold prefix read it once."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_vlm.apc import APCManager
from mlx_vlm.generate import ar
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.server import generation
from mlx_vlm.tests.generation_fixtures import MODELS, build_mtp_drafter, tiny_model
from mlx_vlm.tests.server_fixtures import make_loop_server, make_request, tokens_sent

TOKENS = 8


def text(length, seed):
    return [(7 * i * i + 3 * i + 11 * seed + i // 90) % 90 + 3 for i in range(length)]


class Server:
    """The loop of the server's generation thread, run here until it has no work."""

    def __init__(self, patch, model, drafter=None):
        self.loop = make_loop_server(
            patch,
            model,
            drafter,
            None if drafter is None else "mtp",
            tokenizer=SimpleNamespace(),
            apc_manager=APCManager(num_blocks=512, block_size=16),
            apc_mode="block",
        )
        self.forwarded, self.embedded = [], []
        self._count(patch, model)

    def _count(self, patch, model):
        """Note the tokens of each prefill call, and of each prompt that is embedded."""
        reading = []

        def noted(original):
            def call(batch, *args, **kwargs):
                reading.append(batch)
                try:
                    return original(batch, *args, **kwargs)
                finally:
                    reading.pop()

            return call

        for name in ("prompt_step", "generate"):
            original = getattr(ar.PromptProcessingBatch, name)
            patch.setattr(ar.PromptProcessingBatch, name, noted(original))
        language_model = type(model.language_model)
        forward = language_model.__call__

        def counted(own, inputs, *args, **kwargs):
            if reading:
                self.forwarded.append(inputs.size)
            return forward(own, inputs, *args, **kwargs)

        patch.setattr(language_model, "__call__", counted)
        embed = model.get_input_embeddings

        def embedding(input_ids, *args, **kwargs):
            self.embedded.append(input_ids.size)
            return embed(input_ids, *args, **kwargs)

        object.__setattr__(model, "get_input_embeddings", embedding)

    def ask(self, prompt, salt=1):
        """Queue a request; returns the queue of its answer."""
        args = {"max_tokens": TOKENS, "temperature": 0}
        request = make_request(prompt, args, apc_semantic_hash=salt)
        request.request_id = f"{id(request.rqueue):x}"
        self.loop.requests.put(request)
        return request.rqueue

    def run(self, prompts, **kwargs):
        """Tokens of prompts that are queued together."""
        queues = [self.ask(prompt, **kwargs) for prompt in prompts]
        # A request is received before the server looks whether it is to stop.
        self.loop._stop = False
        self.stop_after(queues)
        self.loop._run_impl()
        return [tokens_of(queue) for queue in queues]

    def stop_after(self, queues):
        """Let the loop end when all are answered."""
        collect = generation.ResponseGenerator._collect_pending_requests

        def collecting(**kwargs):
            if all(None in queue.queue for queue in queues):
                self.loop._stop = True
                self.loop.requests.put(None)
            return collect(self.loop, **{**kwargs, "idle_timeout": 0.001})

        self.loop._collect_pending_requests = collecting


def tokens_of(queue):
    return [sent.token for sent in tokens_sent(queue)]


def agents(count=4, shared=400, own=20):
    system = text(shared, 1)
    return [system + text(own + 5 * n, 30 + n) for n in range(count)]


def alone(model, prompts):
    """Greedy tokens of each prompt, read whole by itself."""
    out = []
    for prompt in prompts:
        ids, cache = mx.array([prompt]), make_prompt_cache(model.language_model)
        own = []
        for _ in range(TOKENS):
            output = model.language_model(ids, cache=cache)
            ids = mx.argmax(output.logits[:, -1], axis=-1)[:, None]
            own.append(ids.item())
        out.append(own)
    return out


def assert_read_once(server, prompts):
    own = sum(len(prompt) - 400 for prompt in prompts)
    assert sum(server.forwarded) <= 400 + own + 16 * len(prompts)


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_cold_prefix_is_read_once(monkeypatch, name, rows):
    model = tiny_model(name)
    want = alone(model, agents(rows))
    server = Server(monkeypatch, model)
    assert server.run(agents(rows)) == want
    assert_read_once(server, agents(rows))


def test_with_a_draft_model(monkeypatch):
    model = tiny_model("hybrid")
    want = alone(model, agents())
    server = Server(monkeypatch, model, build_mtp_drafter())
    assert server.run(agents()) == want
    assert_read_once(server, agents())


def test_followers_are_not_embedded_while_they_wait(monkeypatch):
    model = tiny_model("dense")
    server = Server(monkeypatch, model)
    finish, embedded = ar.PromptProcessingBatch.generate, []

    def generate(batch, *args, **kwargs):
        embedded.append(len(server.embedded))
        return finish(batch, *args, **kwargs)

    monkeypatch.setattr(ar.PromptProcessingBatch, "generate", generate)
    server.run(agents())
    assert embedded[0] == 1


@pytest.mark.parametrize("name", MODELS)
def test_another_takes_over_from_one_that_is_cancelled(monkeypatch, name):
    model = tiny_model(name)
    want = alone(model, agents())
    server = Server(monkeypatch, model)
    step, steps = ar.PromptProcessingBatch.prompt_step, []

    def prompt_step(batch):
        steps.append(batch)
        if len(steps) == 2:
            server.loop._cancel(batch.uids[0])
        return step(batch)

    monkeypatch.setattr(ar.PromptProcessingBatch, "prompt_step", prompt_step)
    first, *others = server.run(agents())
    assert first == [] and others == want[1:]
    # It had read two chunks, which the next one did not read again.
    assert_read_once(server, agents())


def test_what_shares_too_little_or_nothing_goes_together(monkeypatch):
    model = tiny_model("dense")
    server = Server(monkeypatch, model)
    prompts = agents(3, shared=100)
    assert server.run(prompts) == alone(model, prompts)
    assert server.forwarded[0] == 3 * 64


def test_salts_share_nothing(monkeypatch):
    model = tiny_model("dense")
    server = Server(monkeypatch, model)
    queues = [server.ask(prompt, salt) for salt, prompt in enumerate(agents(3))]
    server.loop._stop = False
    server.stop_after(queues)
    server.loop._run_impl()
    assert [tokens_of(queue) for queue in queues] == alone(model, agents(3))
    assert server.forwarded[0] == 3 * 64
