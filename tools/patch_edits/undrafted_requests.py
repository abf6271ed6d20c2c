"""undrafted-requests: the generator decides for each prompt batch, the server no longer refuses."""

from tools.patch_tree import AnyEdit, Cut, Edit, after, before, either

AR = "mlx_vlm/generate/ar.py"
SERVER = "mlx_vlm/server/generation.py"

CORE = {
    "mlx_vlm_cacheplus/core/undrafted_requests.py": "mlx_vlm/generate/undrafted_requests.py"
}

EDITS: list[AnyEdit] = [
    before(
        AR,
        "from .types import GenerateKwargs",
        "from .undrafted_requests import (\n"
        "    choose_drafting,\n"
        "    even_out_logprobs,\n"
        "    give_whole_context,\n"
        "    rows_of_one_kind,\n"
        ")\n",
    ),
    after(
        AR,
        '        """Extend this batch with another generation batch."""\n',
        "        even_out_logprobs(self, other)\n",
        within="GenerationBatch.extend",
    ),
    Edit(
        AR,
        "            mixed = self._build_mixed_prompt_batch(sequences)\n",
        "            choose_drafting(self, sequences)\n"
        "            mixed = self._build_mixed_prompt_batch(sequences)\n"
        "            give_whole_context(mixed)\n",
        within="BatchGenerator._next",
    ),
    either(
        after(
            AR,
            "            rows_survive_errors(self),\n",
            "            rows_of_one_kind(self),\n",
            within="BatchGenerator.next",
        ),
        Edit(
            AR,
            "with mx.stream(self._stream):",
            "with mx.stream(self._stream), rows_of_one_kind(self):",
            within="BatchGenerator.next",
        ),
    ),
    before(
        SERVER,
        "from ..sample_utils import (",
        "from ..generate.undrafted_requests import drop_neutral_penalty, note_rows\n",
    ),
    Cut(
        SERVER,
        "        if self.draft_model is not None and args.logits_processors is not None:\n",
        "        rqueue: Queue = Queue()\n",
        "        drop_neutral_penalty(args)\n",
        within="ResponseGenerator.generate",
    ),
    before(
        SERVER,
        '                        "spec_snapshot": (\n',
        '                        "logprobs": bool(args.logprobs),\n',
        within="ResponseGenerator._run_impl",
    ),
    after(
        SERVER,
        '        """One batch generation step: prefill + decode."""\n',
        "        note_rows(self, batch_gen, active)\n",
        within="ResponseGenerator._step",
    ),
]
