"""row-positions: when a row is queued or padded, and when a batch runs."""

from tools.patch_tree import after, before

AR = "mlx_vlm/generate/ar.py"

CORE = {"mlx_vlm_cacheplus/core/row_positions.py": "mlx_vlm/generate/row_positions.py"}

EDITS = [
    before(
        AR,
        "from .types import GenerateKwargs",
        "from .row_positions import (\n"
        "    continued_to_the_left,\n"
        "    seat_batch_positions,\n"
        "    with_positions_for_rows,\n"
        ")\n",
    ),
    before(
        AR,
        "        # Sort in ascending order of length\n",
        "        self._unprocessed_sequences = with_positions_for_rows(\n"
        "            self.model, self._unprocessed_sequences, uids\n"
        "        )\n",
        within="BatchGenerator.insert",
    ),
    before(
        AR,
        "    sequence_axis = 2",
        "    padded = continued_to_the_left(key, v, target_length, left=left)\n"
        "    if padded is not None:\n"
        "        return padded\n",
        within="_pad_sequence_aligned_prompt_kwarg",
    ),
    before(
        AR,
        "        self._current_tokens = self._next_tokens\n",
        "        seat_batch_positions(self)\n",
        within="GenerationBatch._step",
    ),
    after(
        AR,
        "        if len(self) == 0:\n            return []\n",
        "        seat_batch_positions(self)\n",
        within="SpeculativeGenerationBatch.next",
    ),
]
