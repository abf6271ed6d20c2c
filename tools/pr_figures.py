"""The before/after figures of the PR texts, on whichever mlx_vlm is imported.

    python tools/pr_figures.py                              stock
    python tools/make_patches.py --tree DIR
    PYTHONPATH=DIR python tools/pr_figures.py               patched

The models, prompts and generators are those of the tests that go upstream (patches/tests): tiny, random, float32.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType

os.environ["MLX_VLM_CACHEPLUS"] = "0"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "patches" / "tests"))

from tools import pr_figures_drafting as drafting  # noqa: E402
from tools import pr_figures_plain as plain  # noqa: E402

# Stock has not got them yet: the tests that go upstream find them there. In the order in
# which they import each other.
tests = sys.modules["mlx_vlm.tests"] = ModuleType("mlx_vlm.tests")
for name in ("generation_fixtures", "drafting_fixtures", "server_fixtures"):
    fixtures = importlib.import_module(name)
    sys.modules[f"mlx_vlm.tests.{name}"] = fixtures
    setattr(tests, name, fixtures)


def main() -> int:
    spec = importlib.util.find_spec("mlx_vlm")
    if spec is None or spec.origin is None:
        print("error: mlx_vlm is not installed", file=sys.stderr)
        return 2
    patched = (Path(spec.origin).parent / "CACHEPLUS_PATCHED").is_file()
    print("patched tree" if patched else "stock")
    logging.disable(logging.ERROR)
    for figures in (
        plain.warm_single_row,
        plain.row_positions,
        plain.recurrent_rows,
        plain.row_errors,
        plain.output_tokens,
        plain.segment_tree,
        drafting.drafted_replies,
        drafting.draft_priming,
        drafting.draft_state,
        plain.shared_prefill,
        drafting.undrafted_requests,
        plain.row_samplers,
        drafting.speculative_turns,
        drafting.speculative_merge,
        plain.fair_queue,
    ):
        print(f"{figures.__name__.replace('_', '-')}: {figures.__doc__}")
        figures()
    return 0


if __name__ == "__main__":
    sys.exit(main())
