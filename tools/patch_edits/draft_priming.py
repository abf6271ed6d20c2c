"""draft-priming: a prompt batch primes a drafter of its own, the decoding batch uses it."""

from tools.patch_tree import AnyEdit, after, before

AR = "mlx_vlm/generate/ar.py"

CORE = {
    "mlx_vlm_cacheplus/core/batch_drafter.py": "mlx_vlm/speculative/batch_drafter.py",
    "mlx_vlm_cacheplus/core/draft_priming.py": "mlx_vlm/speculative/draft_priming.py",
}

EDITS: list[AnyEdit] = [
    before(
        AR,
        "from ..speculative.utils import",
        "from ..speculative import batch_drafter, draft_priming\n",
    ),
    after(
        AR,
        "                prefix_lengths=self._cached_tokens_per_row,\n"
        "                prefill_step_size=self.prefill_step_size,\n"
        "            )\n",
        "\n        draft_priming.prime(self)\n",
        within="PromptProcessingBatch.__init__",
    ),
    before(
        AR,
        "        self.uids = []\n        self.prompt_cache = []\n",
        "        batch_drafter.attach(self, gen_batch)\n",
        within="PromptProcessingBatch.generate",
    ),
    after(
        AR,
        "    def _refresh_uids(self):\n",
        "        batch_drafter.report_back(self)\n",
        within="SpeculativeGenerationBatch._refresh_uids",
    ),
    after(
        AR,
        "        if not self.uids:\n            self._release()\n",
        "            batch_drafter.let_go(self)\n",
        within="SpeculativeGenerationBatch._refresh_uids",
    ),
]
