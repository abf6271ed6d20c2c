"""A drafter has read the whole prompt, however the prefill is cut."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_vlm.generate.ar import BatchGenerator
from mlx_vlm.models import qwen3_5_text
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.speculative.drafters import eagle3, qwen3_5_mtp, qwen3_dflash
from mlx_vlm.speculative.utils import (
    speculative_hidden_state,
    speculative_prefill_kwargs,
)

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
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [1, 1, 0],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
LAYER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
}
BLOCK = 4
DRAFTERS = {
    "mtp": (
        qwen3_5_mtp,
        {
            "model_type": "qwen3_5_mtp",
            "text_config": {**HYBRID, "mtp_num_hidden_layers": 1},
        },
    ),
    "eagle3": (
        eagle3,
        {
            "model_type": "eagle3",
            "transformer_layer_config": LAYER,
            "draft_vocab_size": 96,
            "target_layer_ids": [1, 2, 3],
        },
    ),
    "dflash": (
        qwen3_dflash,
        {
            **LAYER,
            "model_type": "qwen3",
            "mask_token_id": 1,
            "target_layer_ids": [0, 2],
            "num_target_layers": 4,
        },
    ),
}


def build(module, config, seed=0):
    """A random model; wide weights, so that greedy text varies."""
    mx.random.seed(seed)
    model = module.Model(module.ModelConfig.from_dict(config))
    model.update(tree_map(lambda w: w * 3 if w.ndim > 1 else w, model.parameters()))
    mx.eval(model.parameters())
    return model


def build_drafter(kind, seed=0):
    """A random drafter, which notes its proposals in ``proposed``: rows of tokens."""
    module, config = DRAFTERS[kind]
    drafter = build(module, {**config, "block_size": BLOCK}, seed)
    base, proposed = type(drafter), []
    name = "draft_block" + ("_greedy" if hasattr(base, "draft_block_greedy") else "")

    def propose(self, *args, **kwargs):
        tokens = getattr(base, name)(self, *args, **kwargs)
        proposed.extend(tokens.tolist())
        return tokens

    drafter.__class__ = type("Proposing", (base,), {name: propose})
    drafter.proposed = proposed
    return drafter


def prompt_of(length, seed):
    return [(7 * i * i + 3 * i + 11 * seed) % 90 + 2 for i in range(length)]


class NoStop:
    def add_eos_token_ids(self, ids):
        pass

    def __call__(self, token):
        return False


def greedy(logits):
    return mx.argmax(logits, axis=-1)


def reply_to(model, prompts, drafter, kind, step, max_tokens=6):
    """Let one generator answer the prompts together."""
    generator = BatchGenerator(
        model.language_model,
        SimpleNamespace(stopping_criteria=NoStop()),
        prefill_step_size=step,
        greedy_sampling=True,
        draft_model=drafter,
        draft_kind=kind,
        draft_block_size=BLOCK,
    )
    kwargs = [
        {
            key: value
            for key, value in model.get_input_embeddings(mx.array([prompt]))
            .to_dict()
            .items()
            if value is not None
        }
        for prompt in prompts
    ]
    generator.insert(prompts, max_tokens=max_tokens, prompt_kwargs=kwargs)
    said = {}
    while generator.has_work:
        for response in generator.next()[1]:
            if response.token is not None:
                said.setdefault(response.uid, []).append(response.token)
    return [said[uid] for uid in sorted(said)]


def unchunked_proposal(model, kind, prompt):
    """What a drafter proposes first that was given the whole prompt at once."""
    drafter, target = build_drafter(kind), model.language_model
    drafter.bind(model)
    ids = mx.array([prompt])
    # Positions of a row that was read before must not reach this one.
    target._rope_deltas = target._position_ids = None
    wanted = speculative_prefill_kwargs(kind, drafter)
    out = target(ids, cache=make_prompt_cache(target), **wanted)
    hidden = speculative_hidden_state(kind, out)
    bonus = int(mx.argmax(out.logits[0, -1]).item())
    cache, options = drafter.reset(model), {}
    if kind != "dflash":
        options = {"greedy": True}
        drafter.prefill_from_target_hidden(
            ids, hidden, bonus, greedy, ids.dtype, **options
        )
        hidden = hidden[:, -1:]
    drafter.draft_block(bonus, hidden, cache, BLOCK, greedy, ids.dtype, **options)
    return drafter.proposed[0]


@pytest.fixture(params=list(DRAFTERS))
def kind(request):
    return request.param


@pytest.fixture
def model():
    return build(qwen3_5_text, HYBRID)


def test_proposals_depend_on_the_prompt(model, kind):
    """Otherwise the tests below would show nothing."""
    first, second = (
        unchunked_proposal(model, kind, prompt_of(20, seed) + prompt_of(20, 1))
        for seed in (3, 4)
    )
    assert first != second


@pytest.mark.parametrize("step", [1, 7, 16, 4096])
def test_chunks_of_any_size(model, kind, step):
    prompt, drafter = prompt_of(40, 1), build_drafter(kind)
    reply_to(model, [prompt], drafter, kind, step)
    assert drafter.proposed[0] == unchunked_proposal(model, kind, prompt)


@pytest.mark.parametrize("lengths", [(40, 40), (11, 40, 23)])
def test_rows_of_one_prefill(model, kind, lengths):
    prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    drafter = build_drafter(kind)
    reply_to(model, prompts, drafter, kind, 16)
    wanted = [unchunked_proposal(model, kind, prompt) for prompt in prompts]
    assert drafter.proposed[: len(prompts)] == wanted


def test_replies_are_those_without_a_drafter(model, kind):
    prompts = [prompt_of(length, length) for length in (40, 17)]
    drafted = reply_to(model, prompts, build_drafter(kind), kind, 16, max_tokens=12)
    plain = [reply_to(model, [p], None, None, 16, max_tokens=12)[0] for p in prompts]
    assert drafted == plain


def test_the_loaded_drafter_keeps_counts_and_no_state(model, kind):
    drafter = build_drafter(kind)
    reply_to(model, [prompt_of(40, 1)], drafter, kind, 16)
    assert drafter.speculative_total_drafted > 0
    state = getattr(drafter, "_cache", None) or []
    assert all(entry.empty() for entry in state)
