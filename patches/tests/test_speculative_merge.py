"""Speculative batches that run side by side become one between two rounds."""

import pytest
from mlx_vlm.tests import drafting_fixtures
from mlx_vlm.tests.drafting_fixtures import DRAFTERS, build_drafter, build_target
from mlx_vlm.tests.generation_fixtures import make_manager, prompt_of

MODE = "MLX_VLM_DRAFT_MERGE"


@pytest.fixture(params=list(DRAFTERS))
def kind(request):
    return request.param


@pytest.fixture
def model():
    return build_target()


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setenv(MODE, "always")


def drafted(model, kind, manager=None, **more):
    drafter = build_drafter(kind)
    return drafting_fixtures.drafted(model, drafter, kind, manager, **more)


def alone(model, kind, prompt, max_tokens):
    run = drafted(model, kind)
    run.insert([prompt], max_tokens=max_tokens)
    return run.drain()[0]


def batches(run):
    """Uids of each speculative batch; none where none stand side by side."""
    return [batch.uids for batch in getattr(run.generator, "speculative_batches", [])]


def until_said(run, uid):
    while uid not in run.said:
        run.step()


def test_a_newcomer_joins_after_its_first_round(model, kind):
    prompts = prompt_of(40, 1), prompt_of(20, 2)
    wants = [
        alone(model, kind, prompt, tokens)
        for prompt, tokens in zip(prompts, (40, 24), strict=True)
    ]
    run = drafted(model, kind)
    (first,) = run.insert(prompts[:1], max_tokens=40)
    until_said(run, first)
    (second,) = run.insert(prompts[1:], max_tokens=24)
    until_said(run, second)
    assert batches(run) == [[first], [second]], "nobody is admitted"
    run.step()
    assert batches(run) == [[first], [second]]
    run.step()
    assert batches(run) == [[first, second]]
    figures = run.generator.speculative_batches[0].draft_figures
    assert [figures[uid].batching for uid in (first, second)] == ["merged"] * 2
    assert run.drain() == {first: wants[0], second: wants[1]}


def test_rows_come_and_go(model, kind):
    """Eight rows, some of them removed."""
    prompts = [prompt_of(18 + 5 * seed, seed) for seed in range(8)]
    wants = [alone(model, kind, prompt, 20) for prompt in prompts]
    manager = make_manager()
    run = drafted(model, kind, manager)
    uids, left, together = {}, set(), 0
    for seed, prompt in enumerate(prompts):
        (uid,) = run.insert([prompt], max_tokens=20)
        uids[uid] = seed
        for _ in range(3 + seed % 3):
            run.step()
            together = max([together, *map(len, batches(run))])
        if seed in (2, 5):
            assert run.generator.remove(uid)
            left.add(uid)
    run.drain()
    assert together >= 3 and not run.generator.speculative_batches
    for uid, seed in uids.items():
        said = run.said.get(uid, [])
        assert said == wants[seed][: len(said)]
        assert uid in left or len(said) == 20


def test_what_was_slower_together_takes_turns(model, kind, monkeypatch):
    monkeypatch.setenv(MODE, "auto")
    prompts = prompt_of(40, 1), prompt_of(20, 2)
    run = drafted(model, kind)
    (first,) = run.insert(prompts[:1], max_tokens=30)
    until_said(run, first)
    run.step()
    from mlx_vlm.generate.speculative_merge import pace_of

    (batch,) = run.generator.speculative_batches
    for _ in range(20):
        pace_of(batch).add(
            rows=1, width=drafting_fixtures.BLOCK, seconds=1e-9, tokens=2
        )
        pace_of(batch).add(rows=2, width=drafting_fixtures.BLOCK, seconds=1.0, tokens=2)
    run.insert(prompts[1:], max_tokens=24)
    while not run.ended:
        run.step()
        assert all(len(uids) == 1 for uids in batches(run))
    assert "slower together" in batch.draft_figures[first].batching_reason


def test_joining_can_be_switched_off(model, kind, monkeypatch):
    monkeypatch.setenv(MODE, "never")
    run = drafted(model, kind)
    (first,) = run.insert([prompt_of(40, 1)], max_tokens=30)
    until_said(run, first)
    run.insert([prompt_of(20, 2)], max_tokens=24)
    while not run.ended:
        run.step()
        assert all(len(uids) == 1 for uids in batches(run))
