"""fair-queue: the queue is put in order before a step decides whom it admits."""

from tools.patch_tree import AnyEdit, Edit, before, either

AR = "mlx_vlm/generate/ar.py"

CORE = {"mlx_vlm_cacheplus/core/fair_queue.py": "mlx_vlm/generate/fair_queue.py"}

EDITS: list[AnyEdit] = [
    before(
        AR,
        "from .types import GenerateKwargs",
        "from .fair_queue import in_fair_order\n",
    ),
    either(
        before(
            AR,
            "            rows_of_one_kind(self),\n",
            "            in_fair_order(self),\n",
        ),
        Edit(
            AR,
            "with mx.stream(self._stream):",
            "with mx.stream(self._stream), in_fair_order(self):",
            within="BatchGenerator.next",
        ),
    ),
]
