"""drafted-replies: each round is cut before it is committed; a row that ends is committed."""

from tools.patch_tree import AnyEdit, Edit, after, before

AR = "mlx_vlm/generate/ar.py"
MTP = "mlx_vlm/speculative/mtp.py"
EAGLE3 = "mlx_vlm/speculative/eagle3.py"
DFLASH = "mlx_vlm/speculative/dflash.py"

CORE = {
    "mlx_vlm_cacheplus/core/drafted_replies.py": "mlx_vlm/generate/drafted_replies.py"
}

IMPORT = "from ..generate.drafted_replies import cut_at_row_ends\n"
CUT_ONE = "            (accepted,), (new_tokens,) = cut_at_row_ends([accepted], [new_tokens])\n"
CUT = (
    "            accepted_list, new_tokens_list = cut_at_row_ends(\n"
    "                accepted_list, new_tokens_list\n"
    "            )\n"
)

BATCH: list[AnyEdit] = [
    before(
        AR,
        "from .types import GenerateKwargs",
        "from .drafted_replies import (\n"
        "    attach_drafted_rows,\n"
        "    commit_drafted_rows,\n"
        "    recorded_round,\n"
        "    watched_stop_check,\n"
        ")\n",
    ),
    Edit(
        AR,
        "        attach_rows(gen_batch, open_rows(self))\n",
        "        rows = open_rows(self)\n"
        "        attach_rows(gen_batch, rows)\n"
        "        attach_drafted_rows(gen_batch, rows)\n",
        within="PromptProcessingBatch.generate",
    ),
    after(
        AR,
        "    def next(self) -> List[GenerationBatch.Response]:\n",
        "        with recorded_round(self):\n"
        "            return self._next()\n"
        "\n"
        "    def _next(self) -> List[GenerationBatch.Response]:\n",
        within="SpeculativeGenerationBatch.next",
    ),
    after(
        AR,
        "    def _refresh_uids(self):\n",
        "        commit_drafted_rows(self)\n",
        within="SpeculativeGenerationBatch._refresh_uids",
    ),
    Edit(
        AR,
        "            stop_check=stop_check,\n",
        "            stop_check=watched_stop_check(stop_check),\n",
        within="SpeculativeGenerationBatch._start_rounds",
    ),
]

# Between what a round has decided and everything that follows from it.
ROUNDS: list[AnyEdit] = [
    *(
        before(path, "from .cache_state import", IMPORT)
        for path in (MTP, EAGLE3, DFLASH)
    ),
    before(
        MTP,
        "            # Keep the adaptive block-size history on a per-round basis so\n",
        CUT,
        within="_mtp_rounds_batch",
    ),
    before(
        EAGLE3,
        "            _record_speculative_round(draft_model, accepted, bs - 1)\n",
        CUT_ONE,
        within="_eagle3_rounds",
    ),
    before(
        EAGLE3,
        "            _record_speculative_round(\n",
        CUT,
        within="_eagle3_rounds_batch",
    ),
    before(
        DFLASH,
        "            _record_speculative_round(draft_model, accepted, bs - 1)\n",
        CUT_ONE,
        within="_dflash_rounds",
    ),
    before(
        DFLASH,
        "            hidden_segments = _dflash_committed_hidden_segments(\n",
        CUT,
        within="_dflash_rounds_batch",
    ),
]

EDITS = [*BATCH, *ROUNDS]
