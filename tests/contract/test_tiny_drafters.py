"""The trained drafters keep what docs/MODELS.md promises of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm.speculative.drafters import load_drafter, validate_drafter_compatibility
from mlx_vlm.utils import load_model

from tests.fakes.modelkit.drafter_measure import acceptance, held_out_prompt
from tests.fakes.modelkit.drafters import DRAFTERS as SPECS
from tests.fakes.modelkit.drafters import add_noise, open_drafter
from tests.fakes.models import DRAFTERS, drafter_dir, model_dir

MIB = 2**20
LOW, HIGH = 0.5, 0.95
ONE_CHAT = 0.04  # what one chat may lie beside the band of four


@cache
def target_of(name: str) -> Any:
    target = load_model(model_dir(DRAFTERS[name]))
    target.set_dtype(mx.float32)
    return target


def test_the_tests_and_the_build_name_the_same_drafters() -> None:
    assert {name: spec.target for name, spec in SPECS.items()} == DRAFTERS


@pytest.mark.parametrize("name", DRAFTERS)
def test_stock_loads_the_drafter_and_takes_it_for_its_target(name: str) -> None:
    drafter, kind = load_drafter(str(drafter_dir(name)))
    assert kind == SPECS[name].kind
    validate_drafter_compatibility(target_of(name), drafter, kind)
    assert sum(path.stat().st_size for path in drafter_dir(name).iterdir()) < MIB


@pytest.mark.parametrize("name", DRAFTERS)
def test_acceptance_needs_the_prompt_and_is_never_whole(name: str) -> None:
    target = target_of(name)
    drafter = open_drafter(drafter_dir(name), target)
    prompt = held_out_prompt(0, "get", 20)
    (primed, with_prompt), (starved, without) = (
        acceptance(target, drafter, SPECS[name].kind, prompt, primed=whole)
        for whole in (True, False)
    )
    assert with_prompt == without and len(without) > 40
    assert LOW - ONE_CHAT <= primed.rate <= HIGH + ONE_CHAT
    assert primed.accepted < primed.drafted
    assert starved.rate < primed.rate / 2


def test_the_same_seed_gives_the_same_noise() -> None:
    name = "dense-eagle3"
    weights = []
    for seed in (1, 1, 2):
        drafter = open_drafter(drafter_dir(name), target_of(name))
        add_noise(drafter, 0.5, seed)
        weights.append(drafter.fc.weight)
    assert mx.array_equal(weights[0], weights[1])
    assert not mx.array_equal(weights[0], weights[2])
