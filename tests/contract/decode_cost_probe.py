"""Counts calls into mlx per decoded token, with the changes off and on; prints JSON.

Run by test_decode_cost.py in a process of its own, with names of bundled models.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import mlx.core as mx  # noqa: E402

from tests.fakes.models import model_dir  # noqa: E402

# Within one growth step of stock's caches.
LENGTHS = (8, 24)
PROMPT = list(range(40, 72))
CORE = "mlx_vlm_cacheplus"


class Counting:
    """Counts calls of mlx's functions and array methods while the block runs."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.from_core: Counter[str] = Counter()
        self.undo: list[tuple[Any, str, Any]] = []

    def note(self, name: str) -> None:
        self.calls[name] += 1
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if caller.startswith(CORE):
            self.from_core[name] += 1

    def __enter__(self) -> Counting:
        for owner in (mx, mx.fast, mx.array):
            for name, value in list(vars(owner).items()):
                if type(value).__name__ in ("nb_func", "nb_method"):
                    self._wrap(owner, name, value)
        self.undo.append((mx, "array", mx.array))
        mx.array = constructor(mx.array, self.note)
        return self

    def _wrap(self, owner: Any, name: str, original: Any) -> None:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.note(name)
            return original(*args, **kwargs)

        self.undo.append((owner, name, original))
        setattr(owner, name, counted)

    def __exit__(self, *_: Any) -> None:
        for owner, name, original in self.undo:
            setattr(owner, name, original)


def constructor(real: type, note: Any) -> type:
    """Stand for the array type where it is called; everywhere else, be it."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            note("array")
            return real(*args, **kwargs)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, real)

        def __getattr__(cls, name: str) -> Any:
            return getattr(real, name)

    return Meta("array", (), {})


def load(name: str) -> tuple[Any, Any]:
    utils = importlib.import_module("mlx_vlm.utils")
    model, processor = utils.load(str(model_dir(name)))
    return model, getattr(processor, "tokenizer", processor)


def decode(
    model: Any, tokenizer: Any, batch: int, tokens: int, ledgers: int | None = None
) -> Counting:
    """Prefill ``batch`` rows; return the counts of the next ``tokens`` decode steps."""
    ar = importlib.import_module("mlx_vlm.generate.ar")
    apc = importlib.import_module("mlx_vlm.apc")
    manager = apc.from_env(
        model_namespace=None, overrides={"enabled": True, "disk_enabled": False}
    )
    generator = ar.BatchGenerator(
        model.language_model,
        tokenizer,
        max_tokens=200,
        apc_manager=manager,
        prefill_batch_size=batch,
    )
    prompts = [[*PROMPT, 80 + row] for row in range(batch)]
    kwargs = [
        {
            k: v
            for k, v in model.get_input_embeddings(mx.array([ids])).to_dict().items()
            if v is not None
        }
        for ids in prompts
    ]
    # No token ends a row, so that every run has the same rows to its end.
    generator.insert(prompts, max_tokens=[200] * batch, prompt_kwargs=kwargs)
    generator.tokenizer = tokenizer
    while len(generator._generation_batch) < batch:
        generator.next()
    generator.next()
    with Counting() as counted:
        for _ in range(tokens):
            generator.next()
    decoding = generator._generation_batch
    assert len(decoding) == batch, "a row has ended"
    rows = getattr(decoding, "output_rows", {})
    assert ledgers is None or len(rows) == ledgers, f"{len(rows)} ledgers"
    generator.close()
    return counted


def slope(
    model: Any, tokenizer: Any, batch: int, ledgers: int = 0
) -> tuple[dict, dict]:
    short, long = (decode(model, tokenizer, batch, n, ledgers) for n in LENGTHS)
    steps = LENGTHS[1] - LENGTHS[0]
    names = sorted(set(short.calls) | set(long.calls))
    out = {n: (long.calls[n] - short.calls[n]) / steps for n in names}
    return {n: v for n, v in out.items() if v}, dict(long.from_core)


def never_stops(tokenizer: Any) -> None:
    class Never:
        eos_token_ids: list[int] = []

        def __call__(self, token: int) -> bool:
            return False

        def add_eos_token_ids(self, *_: Any) -> None:
            pass

    tokenizer.stopping_criteria = Never()


def plant(ar: Any) -> Any:
    """Make every step one ``item()`` dearer; returns the undo."""
    original = ar.GenerationBatch._step

    def dearer(batch: Any) -> Any:
        mx.array(0).item()
        return original(batch)

    ar.GenerationBatch._step = dearer
    return lambda: setattr(ar.GenerationBatch, "_step", original)


def main(names: list[str]) -> None:
    import mlx_vlm_cacheplus as plugin

    ar = importlib.import_module("mlx_vlm.generate.ar")
    importlib.import_module("mlx_vlm.server")
    os.environ["APC_ENABLED"] = "1"
    out: dict[str, dict] = {}
    for name in names:
        model, tokenizer = load(name)
        never_stops(tokenizer)
        batches = out[name] = {}
        for batch in (1, 3):
            found = batches[batch] = {}
            decode(model, tokenizer, batch, 2)  # compiled, caches of the process filled
            found["off"], _ = slope(model, tokenizer, batch)
            report = plugin.activate(defer=False)
            assert report.applied, report.lines()
            found["on"], found["from core"] = slope(
                model, tokenizer, batch, ledgers=batch
            )
            plugin.deactivate()
            found["off again"], _ = slope(model, tokenizer, batch)
            undo = plant(ar)
            found["planted"], _ = slope(model, tokenizer, batch)
            undo()
    print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1:])
