"""A warm row that is alone has the caches of a cold one, and is decoded as one."""

import importlib
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_vlm.apc import APCManager
from mlx_vlm.generate import ar
from mlx_vlm.models import cache as caches
from mlx_vlm.models import llama, qwen3_5_text

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
DENSE = {**TEXT, "model_type": "llama", "rope_theta": 10000.0}
HYBRID = {
    **TEXT,
    "model_type": "qwen3_5_text",
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [1, 1, 0],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
MODELS = {"dense": (llama, DENSE), "hybrid": (qwen3_5_text, HYBRID)}
LAYERS = (caches.KVCache, caches.BatchKVCache, caches.ArraysCache)
TOKENS = 12


class NeverStop:
    def add_eos_token_ids(self, ids):
        pass

    def __call__(self, token):
        return False


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


def prompt_of(length, seed):
    return [(7 * i * i + 3 * i + 11 * seed) % 90 + 2 for i in range(length)]


class Run:
    """A generator, what its prompt batches had, and what decoding copies.

    types: of the layers of each prompt batch.
    copied: bytes of layers that were put together from rows while decoding.
    """

    def __init__(self, patch, model, manager, drafter=None, **more):
        self.model = model
        self.types, self.copied, self._reading = [], 0, False
        self.generator = ar.BatchGenerator(
            model.language_model,
            SimpleNamespace(stopping_criteria=NeverStop()),
            apc_manager=manager,
            prefill_step_size=16,
            compute_logprobs=False,
            draft_model=drafter,
            draft_kind=None if drafter is None else "mtp",
            **more,
        )
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

    def insert(self, prompts, max_tokens=TOKENS):
        kwargs = []
        for prompt in prompts:
            inputs = self.model.get_input_embeddings(mx.array([prompt])).to_dict()
            inputs = {key: value for key, value in inputs.items() if value is not None}
            kwargs.append({**inputs, "_apc_semantic_hash": 1})
        return self.generator.insert(
            prompts, max_tokens=max_tokens, prompt_kwargs=kwargs
        )

    def drain(self):
        """({uid: tokens}, {uid: cached tokens of its prompt})."""
        tokens, cached = {}, {}
        while self.generator.has_work:
            progress, responses = self.generator.next()
            cached.update({p.uid: p.cached_tokens for p in progress})
            for response in responses:
                tokens.setdefault(response.uid, []).append(response.token)
        return tokens, cached

    def ask(self, *prompts):
        """Tokens and restored lengths of prompts that arrive at once."""
        uids = self.insert(list(prompts))
        tokens, cached = self.drain()
        return [tokens[uid] for uid in uids], [cached[uid] for uid in uids]


def manager():
    return APCManager(num_blocks=256, block_size=16)


def cold(model, *prompts, **more):
    """Tokens of each prompt by itself, with an empty cache."""
    patch = pytest.MonkeyPatch()
    run = Run(patch, model, manager(), **more)
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
    run = Run(monkeypatch, model, manager())
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
    run = Run(monkeypatch, model, manager())
    run.ask(first)
    (one,) = run.insert([second])
    tokens = {}
    for _ in range(6):
        for response in run.generator.next()[1]:
            tokens.setdefault(response.uid, []).append(response.token)
    (two,) = run.insert([other])
    for uid, more in run.drain()[0].items():
        tokens.setdefault(uid, []).extend(more)
    assert [tokens[one], tokens[two]] == want


@pytest.mark.parametrize("name", MODELS)
def test_three_warm_rows_go_together(monkeypatch, name):
    model = build_model(*MODELS[name])
    first = prompt_of(49, 1)
    prompts = [first + prompt_of(20, 2 + seed) for seed in range(3)]
    want = cold(model, *prompts)
    run = Run(monkeypatch, model, manager())
    run.ask(first)
    tokens, restored = run.ask(*prompts)
    assert min(restored) >= 32
    assert tokens == want


def test_with_a_draft_model_it_is_as_cold_rows_are(monkeypatch):
    model = build_model(*MODELS["hybrid"])
    first = prompt_of(49, 1)
    second = first + prompt_of(20, 2)
    run = Run(monkeypatch, model, manager(), build_drafter())
    run.ask(first)
    _, (restored,) = run.ask(second)
    assert restored >= 32
    assert run.types[1] == run.types[0]
