"""A waiting prompt is overtaken by no more tokens of later ones than it has itself."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_vlm.generate.ar import BatchGenerator
from mlx_vlm.models import qwen3

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
LONG, SHORT = 60, 6


class NeverStop:
    def add_eos_token_ids(self, ids):
        pass

    def __call__(self, token):
        return False


@pytest.fixture
def model():
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelConfig.from_dict(CONFIG))
    mx.eval(model.parameters())
    return model


def make_generator(model, places):
    return BatchGenerator(
        model.language_model,
        SimpleNamespace(stopping_criteria=NeverStop()),
        prefill_batch_size=places,
        compute_logprobs=False,
    )


def insert(generator, model, *lengths):
    prompts = [[2 + i % 90 for i in range(length)] for length in lengths]
    kwargs = [
        {"inputs_embeds": model.get_input_embeddings(mx.array([prompt])).inputs_embeds}
        for prompt in prompts
    ]
    return generator.insert(prompts, max_tokens=2, prompt_kwargs=kwargs)


def order_of_first_tokens(generator):
    """Uids, in the order in which they are answered."""
    seen = []
    while generator.has_work:
        for response in generator.next()[1]:
            if response.uid not in seen:
                seen.append(response.uid)
    return seen


@pytest.mark.parametrize("places", [1, 4])
def test_a_long_prompt_waits_for_as_many_tokens_as_it_has(model, places):
    generator = make_generator(model, places)
    (long,) = insert(generator, model, LONG)
    insert(generator, model, *[SHORT] * 30)
    order = order_of_first_tokens(generator)
    assert len(order) == 31
    assert LONG // SHORT - places < order.index(long) <= LONG // SHORT


def test_it_does_not_wait_for_those_that_keep_coming(model):
    generator = make_generator(model, 1)
    (long,) = insert(generator, model, LONG)
    insert(generator, model, SHORT, SHORT)
    order = []
    for _ in range(200):
        insert(generator, model, SHORT)
        order += [r.uid for r in generator.next()[1] if r.uid not in order]
        if long in order:
            break
    assert order.index(long) <= LONG // SHORT


@pytest.mark.parametrize("places", [1, 4])
def test_the_shortest_still_goes_first(model, places):
    generator = make_generator(model, places)
    uids = insert(generator, model, LONG, LONG - 1, LONG - 2, LONG - 3, SHORT)
    assert uids[-1] in order_of_first_tokens(generator)[:places]
