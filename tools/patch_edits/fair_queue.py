"""fair-queue: the queue is put in order before a step decides whom it admits."""

from tools.patch_tree import AnyEdit, before

AR = "mlx_vlm/generate/ar.py"

CORE = {"mlx_vlm_cacheplus/core/fair_queue.py": "mlx_vlm/generate/fair_queue.py"}

EDITS: list[AnyEdit] = [
    before(
        AR,
        "from .types import GenerateKwargs",
        "from .fair_queue import in_fair_order\n",
    ),
    before(
        AR,
        "            rows_of_one_kind(self),\n",
        "            in_fair_order(self),\n",
    ),
]
