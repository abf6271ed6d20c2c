"""row-positions: when a row is queued, and when a speculative batch runs."""

from tools.patch_tree import after, before

AR = "mlx_vlm/generate/ar.py"

CORE = {"mlx_vlm_cacheplus/core/row_positions.py": "mlx_vlm/generate/row_positions.py"}

EDITS = [
    before(
        AR,
        "from .types import GenerateKwargs",
        "from .row_positions import seat_batch_positions, with_positions_for_rows\n",
    ),
    before(
        AR,
        "        # Sort in ascending order of length\n",
        "        self._unprocessed_sequences = with_positions_for_rows(\n"
        "            self.model, self._unprocessed_sequences, uids\n"
        "        )\n",
        within="BatchGenerator.insert",
    ),
    after(
        AR,
        "        if len(self) == 0:\n            return []\n",
        "        seat_batch_positions(self)\n",
        within="SpeculativeGenerationBatch.next",
    ),
]
