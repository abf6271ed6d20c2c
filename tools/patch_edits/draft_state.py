"""draft-state: the drafter is restored with a prompt batch, and offered where it commits."""

from tools.patch_tree import AnyEdit, Edit, after, before

AR = "mlx_vlm/generate/ar.py"
DFLASH = "mlx_vlm/speculative/dflash.py"

CORE = {
    "mlx_vlm_cacheplus/core/draft_state.py": "mlx_vlm/draft_state.py",
    "mlx_vlm_cacheplus/core/round_features.py": "mlx_vlm/speculative/round_features.py",
}

EDITS: list[AnyEdit] = [
    before(AR, "from .. import apc as _apc\n", "from .. import draft_state\n"),
    after(
        AR,
        "            configure(self.apc, self.tokenizer, plain_rows=draft_model is None)\n",
        "            draft_state.configure(self.apc, draft_model, draft_kind)\n",
        within="BatchGenerator.__init__",
    ),
    after(
        AR,
        "        draft_priming.prime(self)\n",
        "        draft_state.restore_rows(self)\n",
        within="PromptProcessingBatch.__init__",
    ),
    Edit(
        AR,
        "        try:\n"
        "            return self._prompt_step()\n"
        "        except Exception:\n"
        "            for index in range(len(self.uids)):\n"
        "                keep_prefilled(self, index, with_state=False)\n"
        "            raise\n",
        "        with draft_state.offered_while_read(self):\n"
        "            try:\n"
        "                return self._prompt_step()\n"
        "            except Exception:\n"
        "                for index in range(len(self.uids)):\n"
        "                    keep_prefilled(self, index, with_state=False)\n"
        "                raise\n",
        within="PromptProcessingBatch.prompt_step",
    ),
    after(
        AR,
        '        """Process final tokens and transition to GenerationBatch."""\n',
        "        with draft_state.offered_while_read(self):\n"
        "            batch = self._generate(\n"
        "                sampler, stop_criteria, compute_logprobs, top_logprobs_k\n"
        "            )\n"
        "        draft_state.attach(self, batch)\n"
        "        return batch\n"
        "\n"
        "    def _generate(\n"
        "        self, sampler, stop_criteria, compute_logprobs, top_logprobs_k\n"
        "    ) -> GenerationBatch:\n",
        within="PromptProcessingBatch.generate",
    ),
    Edit(
        AR,
        "        keep_removed(self, uid)\n",
        "        with draft_state.offered_while_read(self._prompt_batch, uid):\n"
        "            keep_removed(self, uid)\n",
        within="BatchGenerator.remove",
    ),
    before(
        DFLASH,
        "from .common import (",
        "from .round_features import note_features\n",
    ),
    before(
        DFLASH,
        "        return output, output.gdn_states\n",
        "        note_features(output.hidden_states)\n",
        within="_dflash_verify",
    ),
    Edit(
        DFLASH,
        "    return verify_forward(lm, inputs, cache, capture_layer_ids=capture_layer_ids)\n",
        "    output, transaction = verify_forward(\n"
        "        lm, inputs, cache, capture_layer_ids=capture_layer_ids\n"
        "    )\n"
        "    note_features(output.hidden_states)\n"
        "    return output, transaction\n",
        within="_dflash_verify",
    ),
    before(
        DFLASH,
        "            return captured, gdn_states, target_tokens\n",
        "            note_features(captured)\n",
        within="_dflash_verify_greedy",
    ),
]
