"""row-samplers: a request brings its sampling; batches are settled where rows join or leave."""

from tools.patch_tree import AnyEdit, after, before, either, within_either

AR = "mlx_vlm/generate/ar.py"
SERVER = "mlx_vlm/server/generation.py"

CORE = {
    "mlx_vlm_cacheplus/core/row_samplers.py": "mlx_vlm/generate/row_samplers.py",
    "mlx_vlm_cacheplus/core/request_sampling.py": "mlx_vlm/server/request_sampling.py",
}

BATCH: list[AnyEdit] = [
    before(
        AR,
        "from .types import GenerateKwargs",
        "from .row_samplers import (\n"
        "    hand_over_sampling,\n"
        "    hide_unasked,\n"
        "    join_sampling,\n"
        "    sample_prompt_rows,\n"
        "    sampling_of,\n"
        "    settle_sampling,\n"
        ")\n",
    ),
    after(
        AR,
        "            self._rope_deltas = mx.concatenate([self._rope_deltas, other._rope_deltas])\n",
        "        join_sampling(self, other)\n",
        within="GenerationBatch.extend",
    ),
    after(
        AR,
        "                self._rope_deltas = self._rope_deltas[keep_arr]\n",
        "        settle_sampling(self)\n",
        within="GenerationBatch.filter",
    ),
    before(
        AR,
        "        if len(keep) < len(self.uids):\n",
        "        if lp_list is not None:\n"
        "            hide_unasked(sampling_of(self), responses)\n",
        within="GenerationBatch.next",
    ),
    within_either(
        before(
            AR,
            "        call_kwargs = dict(self._prompt_kwargs)\n",
            "        sampler, compute_logprobs, top_logprobs_k = sample_prompt_rows(\n"
            "            self, sampler, compute_logprobs, top_logprobs_k\n"
            "        )\n",
        ),
        "PromptProcessingBatch._generate",
        "PromptProcessingBatch.generate",
    ),
    either(
        before(
            AR,
            "        rows = open_rows(self)\n",
            "        hand_over_sampling(self, gen_batch)\n",
            within="PromptProcessingBatch._generate",
        ),
        before(
            AR,
            "        self.uids = []\n        self.prompt_cache = []\n",
            "        hand_over_sampling(self, gen_batch)\n",
            within="PromptProcessingBatch.generate",
        ),
    ),
]

REQUEST: list[AnyEdit] = [
    before(
        SERVER,
        "from ..generate.undrafted_requests import",
        "from ..generate.row_samplers import Sampling, note_sampling\n",
    ),
    before(
        SERVER,
        "from .runtime import runtime\n",
        "from .request_sampling import make_sampling\n",
    ),
    after(
        SERVER,
        "    request_id: Optional[str] = None\n",
        "    sampling: Optional[Sampling] = None\n",
        within="QueuedGenerationRequest",
    ),
    after(
        SERVER,
        "        drop_neutral_penalty(args)\n",
        "        sampling = make_sampling(self, args)\n",
        within="ResponseGenerator.generate",
    ),
    after(
        SERVER,
        "            request_id=request_id,\n",
        "            sampling=sampling,\n",
        within="ResponseGenerator.generate",
    ),
    before(
        SERVER,
        '                        "spec_snapshot": (\n',
        '                        "sampling": (\n'
        "                            request.sampling or make_sampling(self, args)\n"
        "                        ),\n",
        within="ResponseGenerator._run_impl",
    ),
    before(
        SERVER,
        "        note_rows(self, batch_gen, active)\n",
        "        note_sampling(batch_gen, active)\n",
        within="ResponseGenerator._step",
    ),
]

EDITS = [*BATCH, *REQUEST]
