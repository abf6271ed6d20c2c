"""speculative-merge: batches join before a step's rounds; a round loop starts where rows stand."""

from tools.patch_tree import AnyEdit, Edit, after, before

AR = "mlx_vlm/generate/ar.py"
MTP = "mlx_vlm/speculative/mtp.py"
EAGLE3 = "mlx_vlm/speculative/eagle3.py"
DFLASH = "mlx_vlm/speculative/dflash.py"

CORE = {
    "mlx_vlm_cacheplus/core/speculative_merge.py": "mlx_vlm/generate/speculative_merge.py",
    "mlx_vlm_cacheplus/core/joined_drafters.py": "mlx_vlm/speculative/joined_drafters.py",
    "mlx_vlm_cacheplus/core/merge_pace.py": "mlx_vlm/generate/merge_pace.py",
    "mlx_vlm_cacheplus/core/row_acceptance.py": "mlx_vlm/generate/row_acceptance.py",
    "mlx_vlm_cacheplus/core/ragged_cache.py": "mlx_vlm/models/ragged_cache.py",
}

JOINING: list[AnyEdit] = [
    before(
        AR,
        "from .speculative_turns import (",
        "from .speculative_merge import (\n"
        "    join_batches,\n"
        "    keep_rows_apart,\n"
        "    row_numbers,\n"
        "    sampler_of,\n"
        "    timed_round,\n"
        "    tokens_left,\n"
        ")\n",
    ),
    Edit(
        AR,
        "            max_tokens=max(self.max_tokens) if self.max_tokens else 0,\n"
        "            sampler=self.sampler,\n",
        "            max_tokens=tokens_left(self),\n            sampler=sampler_of(self),\n",
        within="SpeculativeGenerationBatch._start_rounds",
    ),
    Edit(
        AR,
        "            row_ids=[0] * len(self._all_uids),\n",
        "            row_ids=row_numbers(self),\n",
        within="SpeculativeGenerationBatch._start_rounds",
    ),
    Edit(
        AR,
        "        return whole_round(self, self._emit)\n",
        "        return timed_round(self, functools.partial(whole_round, self, self._emit))\n",
        within="SpeculativeGenerationBatch.next",
    ),
    before(
        AR,
        "        return take_turns(self, functools.partial(self._advance, **kwargs))\n",
        "        join_batches(self)\n",
        within="BatchGenerator.next",
    ),
    before(
        MTP,
        "\n\n@dataclass\nclass _MTPVerifyResult:",
        "from .round_features import note_features\n",
    ),
    after(
        MTP,
        "                hidden_full = verify.hidden  # [B_active, bs, H]\n",
        "                note_features([hidden_full])\n",
        within="_mtp_rounds_batch",
    ),
]

# A round is clamped where drafter or caches need it, not where the target's rollback does.
UNIFORM = "_requires_uniform_batch_acceptance"
ACCEPTANCE: list[AnyEdit] = [
    before(
        AR,
        "        self._rounds_iter = run_speculative_server_rounds(\n",
        "        keep_rows_apart(self)\n",
        within="SpeculativeGenerationBatch._start_rounds",
    ),
    *(
        Edit(
            path,
            "from ..generate.drafted_replies import cut_at_row_ends\n",
            "from ..generate.drafted_replies import cut_at_row_ends, rows_accept_alike\n"
            "from ..generate.row_acceptance import commit_round\n",
        )
        for path in (MTP, EAGLE3, DFLASH)
    ),
    *(Edit(path, f"    {UNIFORM},\n", "") for path in (MTP, EAGLE3, DFLASH)),
    *(
        Edit(path, f"{UNIFORM}(draft_model, lm)", "rows_accept_alike(draft_model, lm)")
        for path in (MTP, EAGLE3, DFLASH)
    ),
    Edit(
        MTP,
        f"{UNIFORM}(draft_model, target_model)",
        "rows_accept_alike(draft_model, target_model)",
    ),
    Edit(MTP, "    commit_speculative_round,\n", ""),
    Edit(
        MTP,
        "commit_speculative_round(\n",
        "commit_round(\n",
        within="_MTPVerifyResult.commit",
    ),
    *(
        Edit(path, "commit_speculative_round(\n", "commit_round(\n", within=within)
        for path, within in (
            (EAGLE3, "_eagle3_rounds_batch"),
            (DFLASH, "_dflash_rounds_batch"),
        )
    ),
]

EDITS = [*JOINING, *ACCEPTANCE]
