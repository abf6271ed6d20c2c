"""Import, patch and unpatch in every order, each in a process of its own."""

from __future__ import annotations

import itertools

import pytest

STEPS = ("import", "defer", "activate", "deactivate")
CODE = {
    "import": "import mlx_vlm.server",
    "defer": "c.activate(defer=True)",
    "activate": "c.activate(['fast', 'second'])",
    "deactivate": "c.deactivate()",
}
PRELUDE = """
import importlib, os, sys
import mlx_vlm_cacheplus as c
from mlx_vlm_cacheplus import activation
sys.argv = ["mlx_vlm.server", "--cacheplus=fast,second"]
names = ("filter", "pack", "make", "extra")
"""
# What the class of the stock holds, before and after; read without the module's help where it is not imported yet.
EPILOGUE = """
active = {active}
ar = importlib.import_module("mlx_vlm.generate.ar")
importlib.import_module("mlx_vlm.server")
batch = ar.GenerationBatch
activation._process.patcher.check_invariants()
assert batch().filter(1) == (["fast", "stock", 1] if active else ["stock", 1]), batch().filter(1)
assert batch.pack(1) == (["second", "stock", 1] if active else ["stock", 1])
assert hasattr(batch, "extra") is active
assert len(activation._process.patcher) == (3 if active else 0)
assert (c.status() is not None and c.status().applied == ("fast", "second")) is active
assert ("APC_ENABLED" in os.environ) is active
c.deactivate()
assert type(vars(batch)["filter"]).__name__ == "function" and batch().filter(1) == ["stock", 1]
assert type(vars(batch)["pack"]) is staticmethod and not hasattr(batch, "extra")
print("good")
"""
ORDERS = [
    order
    for length in (1, 2, 3)
    for order in itertools.product(STEPS, repeat=length)
    if "import" in order
] + [
    ("activate", "deactivate", "activate", "import"),
    ("defer", "deactivate", "import", "activate"),
    ("import", "activate", "deactivate", "activate", "deactivate"),
    ("defer", "import", "deactivate", "defer"),
]


def is_active(order: tuple[str, ...]) -> bool:
    """The last verb decides; the import may come at any time."""
    verbs = [step for step in order if step != "import"]
    return bool(verbs) and verbs[-1] != "deactivate"


def test_every_order_of_up_to_three_steps_is_there():
    assert len(ORDERS) == 1 + 7 + 37 + 4


def run_orders(stock, orders):
    """Each order in a child of one interpreter: a fork costs less than a start, and shares nothing afterwards."""
    text = "import os, sys, traceback\n" + PRELUDE
    for order in orders:
        body = "\n".join(CODE[step] for step in order)
        body += EPILOGUE.replace("{active}", str(is_active(order)))
        text += (
            f"if os.fork() == 0:\n    code = {body!r}\n    try:\n        exec(code, globals())\n"
            f"    except BaseException:\n        print({order!r}); traceback.print_exc()\n"
            "    sys.stdout.flush(); os._exit(0)\n"
            "os.wait()\n"
        )
    return stock.code(text)


@pytest.mark.parametrize("first", STEPS)
def test_orders(stock, first):
    orders = [order for order in ORDERS if order[0] == first]
    result = run_orders(stock, orders)
    assert result.returncode == 0, result.stderr
    failed = [line for line in result.stdout.splitlines() if line != "good"]
    assert not failed and result.stdout.count("good") == len(orders), (
        failed,
        result.stderr[-3000:],
    )
