"""The server's response generator without its thread: a test runs its loop, or one step."""

from queue import Queue
from threading import Lock
from types import SimpleNamespace

import mlx.core as mx
from mlx_vlm.server import generation
from mlx_vlm.tests.generation_fixtures import StopAt


class Streamer:
    """Says a token as its number."""

    def __init__(self, *args):
        pass

    def advance(self, token, finish_reason):
        return str(token)


def bare_server(**fields):
    """A response generator that has these fields and no other."""
    server = generation.ResponseGenerator.__new__(generation.ResponseGenerator)
    vars(server).update(fields)
    return server


def make_step_server(monkeypatch, drafter=None, **fields):
    """For tests that call ``_step``, with a generator and rows of their own."""
    server = bare_server(draft_model=drafter, **fields)
    for name in ("_log_prefill_progress", "_log_prefill_completed"):
        monkeypatch.setattr(server, name, lambda *args: None, raising=False)
    monkeypatch.setattr(
        server, "_log_decode_progress", lambda *args, **kwargs: 0.0, raising=False
    )
    return server


def make_loop_server(monkeypatch, model, drafter=None, kind=None, **fields):
    """For tests that call ``_run_impl``, which ends when all that is queued is answered."""
    monkeypatch.setattr(generation, "_ServerTokenStreamer", Streamer)
    monkeypatch.setattr(generation, "make_streaming_detokenizer", lambda *args: None)
    schemes = ("kv_bits", "kv_key_bits", "kv_value_bits")
    schemes += ("kv_key_scheme", "kv_value_scheme")
    defaults = {
        **dict.fromkeys(schemes),
        "kv_group_size": 64,
        "kv_quant_scheme": "uniform",
        "quantized_kv_start": 0,
        "processor": SimpleNamespace(stopping_criteria=StopAt()),
        "tokenizer": None,
        "stop_tokens": set(),
        "vision_cache": None,
        "top_logprobs_k": 0,
        "apc_manager": None,
        "prefill_step_size": 64,
        "requests": Queue(),
        "_stop": True,
        "_ready": SimpleNamespace(set=lambda: None),
        "_initialize_model": lambda: None,
        "_cancelled": set(),
        "_cancel_lock": Lock(),
    }
    asked = {"model": model, "draft_model": drafter, "draft_kind": kind}
    return bare_server(**{**defaults, **asked, **fields})


def make_request(prompt, args, **more):
    """A request as it is queued; args: those of ``GenerationArguments``."""
    return generation.QueuedGenerationRequest(
        rqueue=Queue(),
        raw_inputs={"input_ids": mx.array([prompt])},
        prompt_tokens=len(prompt),
        args=generation.GenerationArguments(**args),
        **more,
    )


def tokens_sent(queue):
    """The tokens that a request was sent; an error that it was sent is raised."""
    items = list(queue.queue)
    for item in items:
        if isinstance(item, Exception):
            raise item
    return [item for item in items if isinstance(item, generation.StreamingToken)]
