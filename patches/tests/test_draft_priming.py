"""A drafter has read the whole prompt, however the prefill is cut."""

import mlx.core as mx
import pytest
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.speculative.utils import (
    speculative_hidden_state,
    speculative_prefill_kwargs,
)
from mlx_vlm.tests.drafting_fixtures import (
    BLOCK,
    DRAFTERS,
    build_drafter,
    build_target,
    drafted,
)
from mlx_vlm.tests.generation_fixtures import prompt_of


def greedy(logits):
    return mx.argmax(logits, axis=-1)


def reply_to(model, prompts, drafter, kind, step, max_tokens=6):
    """Let one generator answer the prompts together."""
    run = drafted(model, drafter, kind, prefill_step_size=step)
    return run.ask(*prompts, max_tokens=max_tokens, positioned=True)[0]


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
    proposal = drafter.draft_block(
        bonus, hidden, cache, BLOCK, greedy, ids.dtype, **options
    )
    return proposal.tolist()[0]


@pytest.fixture(params=list(DRAFTERS))
def kind(request):
    return request.param


@pytest.fixture
def model():
    return build_target()


def test_proposals_depend_on_the_prompt(model, kind):
    """Otherwise the tests below would show nothing."""
    prompts = [prompt_of(20, seed) + prompt_of(20, 1) for seed in range(6)]
    proposals = [unchunked_proposal(model, kind, prompt) for prompt in prompts]
    assert any(proposal != proposals[0] for proposal in proposals)


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
    # The generator may have taken the rows in another order.
    assert sorted(drafter.proposed[: len(prompts)]) == sorted(wanted)


def test_replies_are_those_without_a_drafter(model, kind):
    prompts = [prompt_of(length, length) for length in (40, 17)]
    replies = reply_to(model, prompts, build_drafter(kind), kind, 16, max_tokens=12)
    plain = [reply_to(model, [p], None, None, 16, max_tokens=12)[0] for p in prompts]
    assert replies == plain


def test_the_loaded_drafter_keeps_counts_and_no_state(model, kind):
    drafter = build_drafter(kind)
    reply_to(model, [prompt_of(40, 1)], drafter, kind, 16)
    assert drafter.speculative_total_drafted > 0
    state = getattr(drafter, "_cache", None) or []
    assert all(entry.empty() for entry in state)
