"""While a speculative batch runs, others are admitted and take turns with it."""

import pytest
from mlx_vlm.tests.drafting_fixtures import (
    DRAFTERS,
    build_drafter,
    build_target,
    drafted,
)
from mlx_vlm.tests.generation_fixtures import make_manager, prompt_of


@pytest.fixture(params=list(DRAFTERS))
def kind(request):
    return request.param


@pytest.fixture
def model():
    return build_target()


@pytest.fixture(autouse=True)
def turns(monkeypatch):
    """Also where batches could join."""
    monkeypatch.setenv("MLX_VLM_DRAFT_MERGE", "never")


def alone(model, kind, prompt, max_tokens):
    """The reply of a request by itself, and what is proposed for it."""
    drafter = build_drafter(kind)
    run = drafted(model, drafter, kind)
    run.insert([prompt], max_tokens=max_tokens)
    return run.drain()[0], drafter.proposed


def test_a_newcomer_is_served_beside_a_running_reply(model, kind):
    prompts = prompt_of(40, 1), prompt_of(20, 2)
    wants = [
        alone(model, kind, prompt, tokens)
        for prompt, tokens in zip(prompts, (40, 6), strict=True)
    ]
    drafter = build_drafter(kind)
    run = drafted(model, drafter, kind)
    (first,) = run.insert(prompts[:1], max_tokens=40)
    run.step_until_said(first)
    (second,) = run.insert(prompts[1:], max_tokens=6)
    # A chunk of 16, one of 3, and the last column, each with a round of the other.
    for _ in range(3):
        assert second not in run.said
        run.step()
    assert len(run.said[second]) == 1 and first not in run.ended
    while second not in run.ended:
        run.step()
    assert first not in run.ended
    assert run.drain() == {first: wants[0][0], second: wants[1][0]}
    proposed = [tuple(row) for row in drafter.proposed]
    assert sorted(proposed) == sorted(tuple(r) for _, want in wants for r in want)


def test_rows_come_and_go(model, kind):
    """Up to four at once, some of them removed."""
    prompts = [prompt_of(18 + 5 * seed, seed) for seed in range(8)]
    wants = [alone(model, kind, prompt, 12)[0] for prompt in prompts]
    manager = make_manager()
    run = drafted(model, build_drafter(kind), kind, manager)
    uids, left = {}, set()
    for seed, prompt in enumerate(prompts):
        (uid,) = run.insert([prompt], max_tokens=12)
        uids[uid] = seed
        for _ in range(2 + seed % 3):
            run.step()
        if seed in (2, 5):
            assert run.generator.remove(uid)
            left.add(uid)
    run.drain()
    assert not run.generator.speculative_batches
    for uid, seed in uids.items():
        said = run.said.get(uid, [])
        assert said == wants[seed][: len(said)]
        assert uid in left or len(said) == 12


def test_an_error_in_a_round_fails_its_own_batch(model, kind):
    prompts = prompt_of(40, 1), prompt_of(20, 2)
    want, _ = alone(model, kind, prompts[0], 20)
    run = drafted(model, build_drafter(kind), kind)
    run.generator.row_faults = []
    (first,) = run.insert(prompts[:1], max_tokens=20)
    run.step_until_said(first)
    (second,) = run.insert(prompts[1:], max_tokens=6)
    run.step_until_said(second)

    def fail(*args, **kwargs):
        raise RuntimeError("planted")

    broken = run.generator.speculative_batches[-1]
    broken.draft_model.draft_block = broken.draft_model.draft_block_greedy = fail
    assert run.drain()[first] == want
    ((uid, error),) = run.generator.row_faults
    assert uid == second and str(error) == "planted"


def test_places_are_counted(model):
    run = drafted(model, build_drafter("mtp"), "mtp")
    run.generator.completion_batch_size, run.generator.prefill_batch_size = 2, 1
    uids = run.insert([prompt_of(20, seed) for seed in range(3)], max_tokens=12)
    while not run.ended:
        run.step()
        assert sum(len(b) for b in run.generator.speculative_batches) <= 2
        assert uids[2] not in run.said
    run.drain()
    assert run.ended == set(uids)


def test_chunks_are_smaller_beside_running_rows(model, monkeypatch):
    from mlx_vlm.generate import speculative_turns

    monkeypatch.setattr(speculative_turns, "CHUNK_BESIDE_ROWS", 8)
    run = drafted(model, build_drafter("mtp"), "mtp", prefill_step_size=64)
    run.insert([prompt_of(40, 1)], max_tokens=30)
    run.step()
    assert run.generator._prompt_batch.prefill_step_size == 64
    while not run.said:
        run.step()
    run.insert([prompt_of(40, 2)], max_tokens=4)
    run.step()
    assert run.generator._prompt_batch.prefill_step_size == 8
    assert run.generator.prefill_step_size == 64
