"""A reply enters the prefix cache when its row ends, however it ends."""

import pytest
from mlx_vlm.tests.generation_fixtures import (
    MODELS,
    Run,
    make_manager,
    prompt_of,
    tiny_model,
)


@pytest.fixture(params=MODELS)
def model(request):
    return tiny_model(request.param)


@pytest.fixture
def manager():
    return make_manager()


def assert_turn_reads_only_new(model, manager, history, new=5):
    """The next turn restores the history, up to one block, and is a cold run's."""
    prompt = history + prompt_of(new, 9)
    (tokens,), (cached,) = Run(model, manager).ask(prompt)
    assert cached >= len(history) - 16
    assert cached > len(history) - 30, "the reply itself was not restored"
    assert [tokens] == Run(model).ask(prompt)[0]


@pytest.mark.parametrize("max_tokens", [[30], [34, 30, 45]])
def test_reply_is_restored(model, manager, max_tokens):
    prompts = [prompt_of(40, seed) for seed in range(len(max_tokens))]
    replies, _ = Run(model, manager).ask(*prompts, max_tokens=max_tokens)
    for prompt, reply in zip(prompts, replies, strict=True):
        assert_turn_reads_only_new(model, manager, prompt + reply)


def begin(model, manager, prompt, max_tokens, said):
    """A run with one row that has said so many tokens; (run, uid)."""
    run = Run(model, manager)
    (uid,) = run.insert([prompt], max_tokens=max_tokens)
    run.step_until_said(uid, said)
    return run, uid


def test_removed_row_is_restored(model, manager):
    prompt = prompt_of(40, 1)
    run, uid = begin(model, manager, prompt, 60, 32)
    assert run.generator.remove(uid)
    assert_turn_reads_only_new(model, manager, prompt + run.said[uid])


def test_rows_that_joined_are_restored(model, manager):
    first, second = prompt_of(40, 1), prompt_of(33, 2)
    run, one = begin(model, manager, first, 40, 3)
    (two,) = run.insert([second], max_tokens=36)
    run.drain()
    assert_turn_reads_only_new(model, manager, first + run.said[one])
    assert_turn_reads_only_new(model, manager, second + run.said[two])


def test_layers_that_disagree_store_nothing(model, manager):
    run, uid = begin(model, manager, prompt_of(40, 1), 60, 32)
    layers = run.generator._generation_batch.prompt_cache
    layer = next(c for c in layers if getattr(c, "offset", None) is not None)
    layer.offset = layer.offset - 1
    before = manager.stats_snapshot()
    run.generator.remove(uid)
    after = manager.stats_snapshot()
    for counter in ("stores", "exact_stores"):
        assert after.get(counter) == before.get(counter)
