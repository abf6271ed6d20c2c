"""Tiny random models, and a generator to run them, for tests of batched generation."""

from types import SimpleNamespace

import mlx.core as mx
from mlx.utils import tree_map
from mlx_vlm.apc import APCManager
from mlx_vlm.generate.ar import BatchGenerator
from mlx_vlm.models import qwen3, qwen3_5_text
from mlx_vlm.speculative.drafters import qwen3_5_mtp

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
DENSE = {
    **TEXT,
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "rope_theta": 10000.0,
}
HYBRID = {
    **TEXT,
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
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
MTP = {
    "model_type": "qwen3_5_mtp",
    "text_config": {**HYBRID, "mtp_num_hidden_layers": 1},
    "block_size": 4,
}
# More than any test needs: a generator that never ends must not hang the others.
STEPS = 2000
MODELS = {"dense": (qwen3, DENSE), "hybrid": (qwen3_5_text, HYBRID)}


def build_model(module, config, seed=0):
    """A random model; wide weights, so that greedy text varies."""
    mx.random.seed(seed)
    model = module.Model(module.ModelConfig.from_dict(config))
    model.update(tree_map(lambda w: w * 3 if w.ndim > 1 else w, model.parameters()))
    mx.eval(model.parameters())
    return model


def tiny_model(name):
    return build_model(*MODELS[name])


def build_mtp_drafter():
    """A random drafter for the hybrid model; nothing it proposes is right."""
    return build_model(qwen3_5_mtp, MTP)


def prompt_of(length, seed):
    return [(7 * i * i + 3 * i + 11 * seed) % 90 + 2 for i in range(length)]


def positions_of(model, prompt):
    """A text prompt's positions as a model with positions of several axes takes them."""
    ids = mx.array([prompt])
    position_ids, deltas = model.language_model.get_rope_index(ids, None, None, None)
    return {"position_ids": position_ids, "rope_deltas": mx.reshape(deltas, (1, 1))}


def make_manager():
    return APCManager(
        num_blocks=256, block_size=16, overrides={"checkpoint_entries": 8}
    )


class StopAt:
    def __init__(self, *tokens):
        self.tokens = tokens

    def add_eos_token_ids(self, ids):
        pass

    def __call__(self, token):
        return token in self.tokens


class Run:
    """One generator, what its rows have said, and which of them have ended.

    said: {uid: tokens}; cached: {uid: tokens of its prompt that were restored}.
    options: of the generator, beside the chunk of 16 tokens in which it prefills.
    """

    def __init__(self, model, manager=None, stop=(), special_ids=(), **options):
        tokenizer = SimpleNamespace(
            stopping_criteria=StopAt(*stop), all_special_ids=list(special_ids)
        )
        self.generator = BatchGenerator(
            model.language_model,
            tokenizer,
            apc_manager=manager,
            **{"prefill_step_size": 16, **options},
        )
        self.model = model
        self.said, self.cached, self.ended = {}, {}, set()

    def insert(self, prompts, max_tokens=8, salt=1, positioned=False, **rows):
        """Queue prompts; their uids. rows: further arguments, a list with one a row.

        positioned: rows bring their rotary positions, so that rows of different length
        can share a batch whoever else keeps positions.
        """
        kwargs = []
        for prompt in prompts:
            inputs = self.model.get_input_embeddings(mx.array([prompt])).to_dict()
            inputs = {key: value for key, value in inputs.items() if value is not None}
            if positioned:
                inputs |= positions_of(self.model, prompt)
            kwargs.append({**inputs, "_apc_semantic_hash": salt})
        return self.generator.insert(
            list(prompts), max_tokens=max_tokens, prompt_kwargs=kwargs, **rows
        )

    def step(self):
        """One step of the generator; its responses."""
        progress, responses = self.generator.next()
        self.cached.update({p.uid: p.cached_tokens for p in progress})
        for response in responses:
            if response.token is not None:
                self.said.setdefault(response.uid, []).append(response.token)
            if response.finish_reason is not None:
                self.ended.add(response.uid)
        return responses

    def step_until_said(self, uid, count=1):
        """Run until a row has said so many tokens."""
        while len(self.said.get(uid, ())) < count:
            assert self.generator.has_work, f"row {uid} ended before {count} tokens"
            self.step()

    def steps(self):
        """Step to the end; yields each step's responses."""
        for _ in range(STEPS):
            if not self.generator.has_work:
                return
            yield self.step()
        raise AssertionError(f"work is left after {STEPS} steps")

    def drain(self):
        """Run to the end; {uid: tokens}."""
        for _ in self.steps():
            pass
        return self.said

    def ask(self, *prompts, max_tokens=8, **rows):
        """Answer prompts that arrive at once: their tokens, and what each restored."""
        uids = self.insert(prompts, max_tokens, **rows)
        self.drain()
        return [self.said[uid] for uid in uids], [self.cached[uid] for uid in uids]
