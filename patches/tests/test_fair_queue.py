"""A waiting prompt is overtaken by no more tokens of later ones than it has itself."""

import pytest
from mlx_vlm.tests.generation_fixtures import Run, tiny_model

LONG, SHORT = 60, 6


@pytest.fixture
def model():
    return tiny_model("dense")


def start(model, places):
    """A generator that prefills each prompt at once, so many together."""
    return Run(
        model, prefill_step_size=64, prefill_batch_size=places, compute_logprobs=False
    )


def insert(run, *lengths):
    prompts = [[2 + i % 90 for i in range(length)] for length in lengths]
    return run.insert(prompts, max_tokens=2)


def order_of_first_tokens(run):
    """Uids, in the order in which they are answered."""
    return list(run.drain())


@pytest.mark.parametrize("places", [1, 4])
def test_a_long_prompt_waits_for_as_many_tokens_as_it_has(model, places):
    run = start(model, places)
    (long,) = insert(run, LONG)
    insert(run, *[SHORT] * 30)
    order = order_of_first_tokens(run)
    assert len(order) == 31
    assert LONG // SHORT - places < order.index(long) <= LONG // SHORT


def test_it_does_not_wait_for_those_that_keep_coming(model):
    run = start(model, 1)
    (long,) = insert(run, LONG)
    insert(run, SHORT, SHORT)
    for _ in range(200):
        insert(run, SHORT)
        run.step()
        if long in run.said:
            break
    assert list(run.said).index(long) <= LONG // SHORT


@pytest.mark.parametrize("places", [1, 4])
def test_the_shortest_still_goes_first(model, places):
    run = start(model, places)
    uids = insert(run, LONG, LONG - 1, LONG - 2, LONG - 3, SHORT)
    assert uids[-1] in order_of_first_tokens(run)[:places]
