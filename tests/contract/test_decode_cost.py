"""A decoded token costs no array operation and no host synchronisation more than on stock.

The same generation runs with every change applied and reverted, in one process of its
own.  Counted are mlx's functions, the array type called from Python, and the methods and
operators of arrays, ``item`` and ``tolist`` among them, the model's own included.  The
cost of a token is the slope between two lengths, so that what a request costs once
falls out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = Path(__file__).with_name("decode_cost_probe.py")
BATCHES = (1, 3)
MODELS = ("dense", "hybrid")


@pytest.fixture(scope="module")
def counts():
    """{model: {batch: {"off" | "on" | "off again": {call: slope a token}}}}"""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("APC_", "MLX_VLM"))}
    ran = subprocess.run(
        [sys.executable, str(PROBE), *MODELS],
        capture_output=True,
        text=True,
        timeout=170,
        cwd=PROBE.parents[2],
        env={**env, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("model", MODELS)
def test_a_token_costs_what_it_costs_on_stock(counts, model, batch):
    found = counts[model][str(batch)]
    assert found["off"] == found["off again"]
    assert found["on"] == found["off"]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("model", MODELS)
def test_what_is_counted_is_there(counts, model, batch):
    """Otherwise two empty counts would be equal."""
    calls = counts[model][str(batch)]["off"]
    assert calls["async_eval"] == 1
    assert calls["tolist"] >= 1
    assert sum(calls.values()) > 50


@pytest.mark.parametrize("model", MODELS)
def test_core_calls_nothing_of_mlx_while_it_decodes(counts, model):
    for found in counts[model].values():
        assert found["from core"] == {}


def test_an_operation_added_to_a_step_is_seen(counts):
    """The control: one more array and one more ``item()`` a step."""
    for found in counts["dense"].values():
        for name in ("array", "item"):
            assert found["planted"].get(name, 0) == found["off"].get(name, 0) + 1
