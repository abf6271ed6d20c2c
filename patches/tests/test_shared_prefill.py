"""Requests that arrive together with the same cold prefix read it once."""

import importlib
from queue import Queue
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_vlm.apc import APCManager
from mlx_vlm.generate import ar
from mlx_vlm.models import qwen3, qwen3_5_text
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.server import generation

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
HYBRID = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [1, 1, 0],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
MODELS = {"dense": (qwen3, DENSE), "hybrid": (qwen3_5_text, HYBRID)}
TOKENS = 8


class NeverStop:
    def add_eos_token_ids(self, ids):
        pass

    def __call__(self, token):
        return False


class Streamer:
    def advance(self, token, finish_reason):
        return str(token)


def build_model(module, config):
    """A random model; wide weights, so that greedy text varies."""
    mx.random.seed(0)
    model = module.Model(module.ModelConfig.from_dict(config))
    model.update(tree_map(lambda w: w * 3 if w.ndim > 1 else w, model.parameters()))
    mx.eval(model.parameters())
    return model


def build_drafter():
    """A random MTP drafter for the hybrid model; nothing it proposes is right."""
    package = importlib.import_module("mlx_vlm.speculative.drafters.qwen3_5_mtp")
    text = {**HYBRID, "mtp_num_hidden_layers": 1}
    config = {"model_type": "qwen3_5_mtp", "text_config": text, "block_size": 4}
    config["tie_word_embeddings"] = True
    return build_model(package, config)


def text(length, seed):
    return [(7 * i * i + 3 * i + 11 * seed + i // 90) % 90 + 3 for i in range(length)]


class Server:
    """The loop of the server's generation thread, run here until it has no work."""

    def __init__(self, patch, model, drafter=None, step=64):
        self.loop = made = generation.ResponseGenerator.__new__(
            generation.ResponseGenerator
        )
        fields = {
            "model": model,
            "processor": SimpleNamespace(stopping_criteria=NeverStop()),
            "tokenizer": SimpleNamespace(),
            "stop_tokens": set(),
            "vision_cache": None,
            "draft_model": drafter,
            "draft_kind": None if drafter is None else "mtp",
            "prefill_step_size": step,
            "top_logprobs_k": 0,
            "apc_manager": APCManager(num_blocks=512, block_size=16),
            "apc_mode": "block",
            "requests": Queue(),
            "_ready": SimpleNamespace(set=lambda: None),
            "_initialize_model": lambda: None,
            "_stop": True,
            "_cancelled": set(),
            "_cancel_lock": generation.Lock(),
            **dict.fromkeys(("kv_bits", "kv_key_bits", "kv_value_bits")),
            **dict.fromkeys(("kv_key_scheme", "kv_value_scheme")),
            "kv_group_size": 64,
            "kv_quant_scheme": "uniform",
            "quantized_kv_start": 0,
        }
        for name, value in fields.items():
            setattr(made, name, value)
        patch.setattr(generation, "_ServerTokenStreamer", lambda *args: Streamer())
        patch.setattr(generation, "make_streaming_detokenizer", lambda processor: None)
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
        rqueue = Queue()
        request = generation.QueuedGenerationRequest(
            rqueue=rqueue,
            raw_inputs={"input_ids": mx.array([prompt])},
            prompt_tokens=len(prompt),
            args=generation.GenerationArguments(max_tokens=TOKENS, temperature=0),
            apc_semantic_hash=salt,
            request_id=f"{id(rqueue):x}",
        )
        self.loop.requests.put(request)
        return rqueue

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
    items = list(queue.queue)
    errors = [item for item in items if isinstance(item, Exception)]
    if errors:
        raise errors[0]
    return [item.token for item in items if hasattr(item, "token")]


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
    model = build_model(*MODELS[name])
    want = alone(model, agents(rows))
    server = Server(monkeypatch, model)
    assert server.run(agents(rows)) == want
    assert_read_once(server, agents(rows))


def test_with_a_draft_model(monkeypatch):
    model = build_model(*MODELS["hybrid"])
    want = alone(model, agents())
    server = Server(monkeypatch, model, build_drafter())
    assert server.run(agents()) == want
    assert_read_once(server, agents())


def test_followers_are_not_embedded_while_they_wait(monkeypatch):
    model = build_model(*MODELS["dense"])
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
    model = build_model(*MODELS[name])
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
    model = build_model(*MODELS["dense"])
    server = Server(monkeypatch, model)
    prompts = agents(3, shared=100)
    assert server.run(prompts) == alone(model, prompts)
    assert server.forwarded[0] == 3 * 64


def test_salts_share_nothing(monkeypatch):
    model = build_model(*MODELS["dense"])
    server = Server(monkeypatch, model)
    queues = [server.ask(prompt, salt) for salt, prompt in enumerate(agents(3))]
    server.loop._stop = False
    server.stop_after(queues)
    server.loop._run_impl()
    assert [tokens_of(queue) for queue in queues] == alone(model, agents(3))
    assert server.forwarded[0] == 3 * 64
