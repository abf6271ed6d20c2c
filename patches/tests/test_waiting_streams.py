"""However many replies wait, the next request is queued and threads are left."""

import asyncio
import gc
import threading
from types import SimpleNamespace

import httpx
import pytest
from mlx_vlm import server
from mlx_vlm.server.generation import GenerationContext, StreamingToken
from mlx_vlm.server.runtime import runtime

# More than asyncio has threads on any machine.
MANY = 40
SECONDS = 10


class Replies:
    """A response generator whose rows come when they are let go."""

    def __init__(self):
        self.asked, self.go_on = 0, threading.Event()
        self.all_asked, self._lock = threading.Event(), threading.Lock()
        self.threads = 0

    def validate_context_budget(self, *args, **kwargs):
        pass

    def generate(self, *args, **kwargs):
        with self._lock:
            self.asked += 1
            if self.asked == MANY:
                self.all_asked.set()
        self.go_on.wait()
        token = StreamingToken(
            text="fox", token=1, logprobs=0.0, finish_reason="stop", prompt_tps=1.0
        )
        return GenerationContext(uid=0, prompt_tokens=2), iter([token])


@pytest.fixture
def generator(monkeypatch):
    made = Replies()
    processor = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None))
    config = SimpleNamespace(model_type="qwen3", eos_token_id=0)
    loaded = (object(), processor, config)
    monkeypatch.setattr(server, "get_cached_model", lambda *a, **k: loaded)
    monkeypatch.setattr(server, "apply_chat_template", lambda *a, **k: "fox")
    monkeypatch.setattr(
        server, "_infer_tool_parser_from_processor", lambda *a, **k: None
    )
    monkeypatch.setattr(runtime, "response_generator", made)
    # The server collects garbage after every request; what is imported need not be
    # walked through each time.
    gc.collect()
    gc.freeze()
    yield made
    made.go_on.set()
    gc.unfreeze()


PATHS = {
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
    "/v1/messages": "messages",
}


async def ask_all(generator, path, stream):
    """Answers to MANY requests, and what is true while they all wait."""
    body = {"model": "m", "max_tokens": 4, "stream": stream}
    body[PATHS[path]] = [{"role": "user", "content": "fox"}]
    transport = httpx.ASGITransport(app=server.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        jobs = [
            asyncio.ensure_future(client.post(path, json=body)) for _ in range(MANY)
        ]
        try:
            deadline = asyncio.get_running_loop().time() + SECONDS
            while not generator.all_asked.is_set():
                await asyncio.sleep(0.01)
                late = asyncio.get_running_loop().time() > deadline
                assert not late, f"{generator.asked} of {MANY} are queued"
            # Others find a thread.
            await asyncio.wait_for(asyncio.to_thread(int), SECONDS)
            assert (await client.get("/health")).status_code == 200
            waiting = threading.active_count()
        finally:
            generator.go_on.set()
            answers = await asyncio.gather(*jobs)
        return answers, waiting


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_all_are_queued_and_others_find_a_thread(generator, path, stream):
    before = threading.active_count()
    answers, waiting = asyncio.run(ask_all(generator, path, stream))
    assert all(answer.status_code == 200 for answer in answers)
    assert all("fox" in answer.text for answer in answers)
    # The framework has 40 threads of its own for other things.
    assert waiting <= before + MANY + 40 + 8
    assert not [t for t in threading.enumerate() if t.name == "waiting" and t.join(5)]
