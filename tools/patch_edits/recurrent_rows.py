"""recurrent-rows: around the generator's decision which rows it admits."""

from tools.patch_tree import Edit, before

AR = "mlx_vlm/generate/ar.py"

CORE = {
    "mlx_vlm_cacheplus/core/recurrent_rows.py": "mlx_vlm/generate/recurrent_rows.py"
}

EDITS = [
    before(
        AR,
        "from .types import GenerateKwargs",
        "from .recurrent_rows import rows_that_fit_together\n",
    ),
    Edit(
        AR,
        "with mx.stream(self._stream):",
        "with mx.stream(self._stream), rows_that_fit_together(self):",
        within="BatchGenerator.next",
    ),
]
