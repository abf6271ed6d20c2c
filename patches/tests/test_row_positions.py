"""Positions come from the row: ragged batches, warm rows, and batches that meet."""

import mlx.core as mx
import pytest
from mlx_vlm.generate.ar import _merge_prefill_prompt_kwargs
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.tests import generation_fixtures
from mlx_vlm.tests.generation_fixtures import make_manager, prompt_of, tiny_model


class Run(generation_fixtures.Run):
    """Notes log-probabilities as well; pairs: {uid: [(token, logprob), ...]}."""

    def __init__(self, *args):
        super().__init__(*args)
        self.pairs = {}

    def step(self):
        responses = super().step()
        for response in responses:
            pair = (response.token, response.token_logprob)
            self.pairs.setdefault(response.uid, []).append(pair)
        return responses


def cold_logprobs(model, ids):
    """Log-probabilities after ids, with positions given: what every row must see."""
    positions = mx.broadcast_to(mx.arange(len(ids))[None, None], (3, 1, len(ids)))
    cache = make_prompt_cache(model.language_model)
    logits = model.language_model(
        mx.array([ids]), cache=cache, position_ids=positions
    ).logits[0, -1]
    return logits - mx.logsumexp(logits)


def assert_row_is_cold(reference, prompt, pairs):
    ids = list(prompt)
    for token, logprob in pairs:
        expected = cold_logprobs(reference, ids)
        assert logprob == pytest.approx(expected[token].item(), abs=1e-3)
        assert expected[token].item() > mx.max(expected).item() - 1e-3
        ids.append(token)


@pytest.fixture
def model():
    """Fresh for each test: the object must not carry positions from one to the next."""
    return tiny_model("hybrid")


@pytest.fixture
def reference():
    return tiny_model("hybrid")


@pytest.mark.parametrize("lengths", [(13,), (5, 31, 13)])
def test_cold_rows_equal_single_rows(model, reference, lengths):
    prompts = [prompt_of(n, seed) for seed, n in enumerate(lengths)]
    run = Run(model)
    uids = run.insert(prompts)
    run.drain()
    for uid, prompt in zip(uids, prompts, strict=True):
        assert len(run.pairs[uid]) == 8
        assert_row_is_cold(reference, prompt, run.pairs[uid])


def test_warm_first_request_of_a_process(model, reference):
    manager = make_manager()
    prompt = prompt_of(40, 1)
    Run(model, manager).ask(prompt)

    # The cache outlives the model object, as it does on disk.
    fresh = tiny_model("hybrid")
    run = Run(fresh, manager)
    longer = prompt + prompt_of(9, 2)
    (uid,) = run.insert([longer])
    run.drain()
    assert_row_is_cold(reference, longer, run.pairs[uid])
    assert manager.stats_snapshot()["lookups_hit"] == 1


def test_row_joins_a_decoding_row(model, reference):
    first, second = prompt_of(21, 1), prompt_of(6, 2)
    run = Run(model)
    (one,) = run.insert([first], max_tokens=16)
    run.step_until_said(one, 3)
    (two,) = run.insert([second])
    run.drain()
    assert_row_is_cold(reference, first, run.pairs[one])
    assert_row_is_cold(reference, second, run.pairs[two])


def test_positions_count_on_through_the_padding():
    """Where a family takes a chunk's place from its first column, it is the row's own."""
    rows = [
        {"inputs_embeds": mx.zeros((1, n, 4)), "position_ids": mx.arange(n)[None]}
        for n in (2, 4)
    ]
    _, merged = _merge_prefill_prompt_kwargs(rows, [[1] * 2, [1] * 4])
    assert merged["position_ids"].tolist() == [[-2, -1, 0, 1], [0, 1, 2, 3]]


def test_a_decode_step_finds_its_deltas_on_the_model(model, monkeypatch):
    """Some families look there before they take the deltas that are passed."""
    language_model = type(model.language_model)
    forward, seen = language_model.__call__, []

    def noted(self, *args, **kwargs):
        seen.append(self._rope_deltas is not None)
        return forward(self, *args, **kwargs)

    run = Run(model)
    (uid,) = run.insert([prompt_of(6, 1)])
    run.step_until_said(uid, 2)
    # As a request does that is embedded meanwhile.
    model.language_model._rope_deltas = None
    monkeypatch.setattr(language_model, "__call__", noted)
    run.drain()
    assert seen and all(seen)
