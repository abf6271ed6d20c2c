"""output-tokens: a ledger opens when a row starts to decode, and is committed when it ends."""

from tools.patch_tree import AnyEdit, Edit, after, before, either

AR = "mlx_vlm/generate/ar.py"
APC = "mlx_vlm/apc.py"
COORDINATOR = "mlx_vlm/apc_coordinator.py"

CORE = {
    "mlx_vlm_cacheplus/core/output_tokens.py": "mlx_vlm/generate/output_tokens.py",
    "mlx_vlm_cacheplus/core/superseded_states.py": "mlx_vlm/superseded_states.py",
}

EDITS: list[AnyEdit] = [
    before(
        AR,
        "from .types import GenerateKwargs",
        "from .output_tokens import (\n"
        "    attach_rows,\n"
        "    commit_ended_rows,\n"
        "    merge_rows,\n"
        "    open_rows,\n"
        "    rows_survive_errors,\n"
        "    step_recorded,\n"
        ")\n",
    ),
    Edit(
        AR,
        "= self._step()",
        "= step_recorded(self, self._step)",
        within="GenerationBatch.next",
    ),
    after(
        AR,
        '        """Filter the batch to keep only the specified indices."""\n',
        "        commit_ended_rows(self, keep)\n",
        within="GenerationBatch.filter",
    ),
    after(
        AR,
        "        self.uids.extend(other.uids)\n",
        "        merge_rows(self, other)\n",
        within="GenerationBatch.extend",
    ),
    before(
        AR,
        "        self.uids = []\n        self.prompt_cache = []\n",
        "        attach_rows(gen_batch, open_rows(self))\n",
        within="PromptProcessingBatch.generate",
    ),
    either(
        Edit(
            AR,
            "with mx.stream(self._stream), rows_that_fit_together(self):",
            "with (\n"
            "            mx.stream(self._stream),\n"
            "            rows_survive_errors(self),\n"
            "            rows_that_fit_together(self),\n"
            "        ):",
            within="BatchGenerator.next",
        ),
        Edit(
            AR,
            "with mx.stream(self._stream):",
            "with mx.stream(self._stream), rows_survive_errors(self):",
            within="BatchGenerator.next",
        ),
    ),
    after(
        APC,
        "from .models.cache import cache_nbytes as _cache_nbytes\n",
        "from .superseded_states import make_room_for_successor\n",
    ),
    after(
        APC,
        "        size = _cache_nbytes(prompt_cache)\n",
        "        if size <= self.memory_max_bytes:\n"
        "            make_room_for_successor(self, token_tuple, extra_hash, size)\n",
        within="APCManager.store_exact_cache",
    ),
    after(
        COORDINATOR,
        "from .models.cache import CacheMemory\n",
        "from .superseded_states import bounded_captures\n",
    ),
    Edit(
        COORDINATOR,
        "return sorted(lengths)",
        "return bounded_captures(sorted(lengths))",
        within="APCCoordinator.checkpoint_lengths",
    ),
]
