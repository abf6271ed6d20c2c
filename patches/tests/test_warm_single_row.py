"""A warm row that is alone has the caches of a cold one, and is decoded as one."""

import pytest
from mlx_vlm.generate import ar
from mlx_vlm.models import cache as caches
from mlx_vlm.models import llama, qwen3_5_text
from mlx_vlm.tests import generation_fixtures
from mlx_vlm.tests.generation_fixtures import (
    DENSE,
    HYBRID,
    build_model,
    build_mtp_drafter,
    make_manager,
    prompt_of,
)

LLAMA = {**DENSE, "model_type": "llama", "num_hidden_layers": 4}
MODELS = {"dense": (llama, LLAMA), "hybrid": (qwen3_5_text, HYBRID)}
LAYERS = (caches.KVCache, caches.BatchKVCache, caches.ArraysCache)
TOKENS = 12


class Run(generation_fixtures.Run):
    """A generator, what its prompt batches had, and what decoding copies.

    types: of the layers of each prompt batch.
    copied: bytes of layers that were put together from rows while decoding.
    """

    def __init__(self, patch, model, manager, drafter=None, **more):
        super().__init__(
            model,
            manager,
            compute_logprobs=False,
            draft_model=drafter,
            draft_kind=None if drafter is None else "mtp",
            **more,
        )
        self.types, self.copied, self._reading = [], 0, False
        step = ar.PromptProcessingBatch.prompt_step
        finish = ar.PromptProcessingBatch.generate

        def read(call):
            def reading(batch, *args, **kwargs):
                self._reading = True
                try:
                    return call(batch, *args, **kwargs)
                finally:
                    self._reading = False

            return reading

        def noted(batch, *args, **kwargs):
            self.types.append([type(layer) for layer in batch.prompt_cache])
            return read(finish)(batch, *args, **kwargs)

        patch.setattr(ar.PromptProcessingBatch, "prompt_step", read(step))
        patch.setattr(ar.PromptProcessingBatch, "generate", noted)
        for layer in LAYERS:
            if "merge" in vars(layer):
                merge = classmethod(self._counted(vars(layer)["merge"].__func__))
                patch.setattr(layer, "merge", merge)

    def _counted(self, merge):
        def counted(*args, **kwargs):
            layer = merge(*args, **kwargs)
            if not self._reading:
                self.copied += sum(a.nbytes for a in layer.state if a is not None)
            return layer

        return counted

    def ask(self, *prompts):
        return super().ask(*prompts, max_tokens=TOKENS)


def cold(model, *prompts, **more):
    """Tokens of each prompt by itself, with an empty cache."""
    patch = pytest.MonkeyPatch()
    run = Run(patch, model, make_manager(), **more)
    out = []
    for prompt in prompts:
        run.generator.apc_manager.clear()
        out += run.ask(prompt)[0]
    patch.undo()
    return out


@pytest.mark.parametrize("name", MODELS)
def test_the_caches_are_those_of_a_cold_row(monkeypatch, name):
    model = build_model(*MODELS[name])
    first = prompt_of(49, 1)
    second = first + prompt_of(20, 2)
    want = cold(model, second)
    run = Run(monkeypatch, model, make_manager())
    _, (none,) = run.ask(first)
    tokens, (restored,) = run.ask(second)
    assert none == 0 and restored >= 32
    assert run.types[1] == run.types[0]
    assert tokens == want
    assert run.copied == 0


@pytest.mark.parametrize("name", MODELS)
def test_another_row_joins_it(monkeypatch, name):
    model = build_model(*MODELS[name])
    first = prompt_of(49, 1)
    second, other = first + prompt_of(20, 2), prompt_of(31, 5)
    want = cold(model, second, other)
    run = Run(monkeypatch, model, make_manager())
    run.ask(first)
    (one,) = run.insert([second], TOKENS)
    for _ in range(6):
        run.step()
    (two,) = run.insert([other], TOKENS)
    run.drain()
    assert [run.said[one], run.said[two]] == want


@pytest.mark.parametrize("name", MODELS)
def test_three_warm_rows_go_together(monkeypatch, name):
    model = build_model(*MODELS[name])
    first = prompt_of(49, 1)
    prompts = [first + prompt_of(20, 2 + seed) for seed in range(3)]
    want = cold(model, *prompts)
    run = Run(monkeypatch, model, make_manager())
    run.ask(first)
    tokens, restored = run.ask(*prompts)
    assert min(restored) >= 32
    assert tokens == want


def test_with_a_draft_model_it_is_as_cold_rows_are(monkeypatch):
    model = build_model(*MODELS["hybrid"])
    first = prompt_of(49, 1)
    second = first + prompt_of(20, 2)
    run = Run(monkeypatch, model, make_manager(), build_mtp_drafter())
    run.ask(first)
    _, (restored,) = run.ask(second)
    assert restored >= 32
    assert run.types[1] == run.types[0]
