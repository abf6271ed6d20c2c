"""The stock server, with what a benchmark must know and hold still.

Started by ``gpu_session``, never by hand.  It runs stock's own ``main`` and adds:

- *Weights*: a model folder with an empty ``random.safetensors`` gets random weights
  where stock reads the file, so that a model of any size needs no download.
- *Scripted replies*: a request with ``bench_reply`` says that text, then stops.  It is
  a sampler that adds the script to zero times the argmax, so that the whole model runs
  for every token and nothing waits for a token that it need not wait for.
- *Trace*: when a request passed the seams between its arrival and its first token.
- ``GET /bench/requests`` (prompt ids, reply ids, trace), ``GET /bench/memory``.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

RANDOM = "random.safetensors"
CHAIN = "chain.json"  # beside it: a target that says a known reply, see gpu_chain
SCRIPT = "bench_reply"
# Where the generation thread takes requests.
COLLECT = (
    "mlx_vlm.server.generation",
    "ResponseGenerator",
    "_collect_pending_requests",
)
# Seams of a request's way to its first token: module, owner, name.
SEAMS = (
    ("mlx_vlm.server.generation", "ResponseGenerator", "_cpu_preprocess"),
    ("mlx_vlm.server.generation", "ResponseGenerator", "_gpu_embed"),
    ("mlx_vlm.apc_coordinator", "APCCoordinator", "lookup"),
    ("mlx_vlm.apc_coordinator", "APCCoordinator", "checkpoint_lengths"),
    ("mlx_vlm.apc_coordinator", "APCCoordinator", "merge_rows"),
    ("mlx_vlm.apc_coordinator", "APCCoordinator", "store_checkpoint"),
    ("mlx_vlm.apc_coordinator", "APCCoordinator", "commit"),
    ("mlx_vlm.generate.ar", "BatchGenerator", "insert"),
    ("mlx_vlm.generate.ar", "BatchGenerator", "_build_mixed_prompt_batch"),
    ("mlx_vlm.generate.ar", "PromptProcessingBatch", "prompt_step"),
    ("mlx_vlm.generate.ar", "PromptProcessingBatch", "generate"),
    ("mlx_vlm.generate.ar", "GenerationBatch", "filter"),
)


def random_weights(folder: Path) -> dict[str, Any]:
    """Weights of a freshly built model in bfloat16: matrices random, vectors as built."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    utils = importlib.import_module("mlx_vlm.utils")
    config = utils.load_config(folder)
    model_class, _ = utils.get_model_and_args(config=config, model_path=folder)
    for part in ("text_config", "vision_config", "audio_config"):
        config.setdefault(part, {})
    parts = ["text", "vision", "perceiver", "projector", "audio"]
    built = model_class.Model(
        utils.update_module_configs(
            model_class.ModelConfig.from_dict(config), model_class, config, parts
        )
    )
    mx.random.seed(7)
    weights = {}
    parameters: Any = tree_flatten(built.parameters())
    for name, value in parameters:
        if value.ndim > 1:
            fan_in = math.prod(value.shape[1:])
            value = mx.random.normal(value.shape, dtype=mx.bfloat16) * fan_in**-0.5
        weights[name] = value.astype(mx.bfloat16)
    if (folder / CHAIN).exists():
        from tests.bench.gpu_chain import quieten

        text = config.get("text_config") or {}
        quieten(weights, text.get("hidden_size") or config["hidden_size"])
    return weights


class Scripted:
    """A sampler that says ``script``, then ``stop``, whatever the model thinks."""

    def __init__(self, script: list[int], stop: int):
        self.script = [*script, stop]
        self.said = 0

    def __call__(self, logprobs: Any) -> Any:
        import mlx.core as mx

        token = self.script[min(self.said, len(self.script) - 1)]
        self.said += 1
        return mx.argmax(logprobs, axis=-1) * 0 + mx.array(token, mx.uint32)


class Watch:
    """What was asked, and when each request passed which seam (seconds)."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.seams: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Hooks on symbols that no change of the plugin targets, then the others."""
        normalization = importlib.import_module("mlx_vlm.server.request_normalization")
        generation = importlib.import_module("mlx_vlm.server.generation")
        owner = generation.ResponseGenerator
        self._wrap(normalization, "_build_gen_args", self._arguments)
        self._wrap(owner, "_make_sampler", self._sampler)
        progress = staticmethod(self._progress(owner._log_decode_progress))
        owner._log_decode_progress = progress
        self.watch_seams()

    def watch_seams(self) -> None:
        """Time what a request passes; after the plugin, whose check wants stock's."""
        for module, cls, name in (COLLECT, *SEAMS):
            owner = getattr(importlib.import_module(module), cls)
            self.seams.append((owner, name, vars(owner)[name]))
            made = self._collect if name == COLLECT[2] else self._timed
            self._wrap(owner, name, made)

    @staticmethod
    def _wrap(owner: Any, name: str, make: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(make(original)))

    def _arguments(self, original: Any) -> Any:
        def build_gen_args(request: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(request, *args, **kwargs)
            out.bench_reply = getattr(request, SCRIPT, None)
            out.bench_arrived = time.perf_counter()
            return out

        return build_gen_args

    def _collect(self, original: Any) -> Any:
        def collect_pending_requests(generator: Any, **kwargs: Any) -> Any:
            if self.between(generator, kwargs["active"]):
                # What this is now, which need not be what it was.
                out: tuple[Any, Any] = generator._collect_pending_requests(**kwargs)
                return out
            pending, stop = original(generator, **kwargs)
            self.requests += [self.admitted(request) for request in pending]
            return pending, stop

        return collect_pending_requests

    def _progress(self, original: Any) -> Any:
        def log_decode_progress(uid: Any, info: Any, **kwargs: Any) -> float:
            if self.requests and kwargs.get("token_count", 1):
                self.wrote(self.requests[-1], int(kwargs["token"]))
            seconds: float = original(uid, info, **kwargs)
            return seconds

        return log_decode_progress

    # -- in the generation thread ------------------------------------------------
    def between(self, generator: Any, active: bool) -> bool:
        """Before requests are taken; ``active``: some are being answered.

        Returns whether the server may be another one now.
        """
        return False

    def admitted(self, request: Any) -> dict[str, Any]:
        """What is kept of a request."""
        return {
            "arrived": getattr(request.args, "bench_arrived", 0.0),
            "admitted": time.perf_counter(),
            "prompt": request.raw_inputs["input_ids"].reshape(-1).tolist(),
            "reply": [],
            "times": [],
            "seams": [],
        }

    def wrote(self, request: dict[str, Any], token: int) -> None:
        """One token of the reply."""
        request["times"].append(time.perf_counter())
        request["reply"].append(token)

    def _sampler(self, original: Any) -> Any:
        def make_sampler(generator: Any, args: Any) -> Any:
            text = getattr(args, SCRIPT, None)
            if text is None:
                return original(generator, args)
            tokenizer = generator.tokenizer
            ids = tokenizer.encode(text, add_special_tokens=False)
            return Scripted(ids, tokenizer.eos_token_id)

        return make_sampler

    def _timed(self, original: Any) -> Any:
        name = original.__name__

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - began
                if self.requests:
                    self.requests[-1]["seams"].append((name, began, seconds))

        return timed

    # -- routes ----------------------------------------------------------------
    def take(self) -> list[dict[str, Any]]:
        """Everything since the last call."""
        out, self.requests = self.requests, []
        return out

    @staticmethod
    def memory() -> dict[str, int]:
        """Bytes in use and the peak since the last call."""
        import mlx.core as mx

        out = {"active": mx.get_active_memory(), "peak": mx.get_peak_memory()}
        mx.reset_peak_memory()
        return out


def main(words: list[str]) -> None:
    """Run stock's server with these arguments; ``--cacheplus`` among them is ours."""
    if os.environ.get("MLX_VLM_CACHEPLUS") != "0":
        sys.argv = ["mlx_vlm.server", *words]
        import mlx_vlm_cacheplus

        mlx_vlm_cacheplus.activate(defer=True)
    serve(words, Watch(), {})


def serve(words: list[str], watch: Watch, routes: dict[str, Any]) -> None:
    """Run stock's ``main`` with weights made on reading, and this watch."""
    if cores := os.environ.get("BENCH_CORES"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    sys.argv = ["mlx_vlm.server", *words]
    importlib.import_module("mlx_vlm.server")
    utils: Any = importlib.import_module("mlx_vlm.utils")
    read = utils._load_safetensors

    def load_safetensors(path: str) -> dict[str, Any]:
        file = Path(path)
        return random_weights(file.parent) if file.name == RANDOM else read(path)

    utils._load_safetensors = load_safetensors
    watch.install()
    app = importlib.import_module("mlx_vlm.server.app").app
    routes = {"requests": watch.take, "memory": watch.memory, **routes}
    for name, function in routes.items():
        app.add_api_route(f"/bench/{name}", function)
    importlib.import_module("mlx_vlm.server.cli").main()


if __name__ == "__main__":
    main(sys.argv[1:])
