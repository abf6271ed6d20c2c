"""speculative-turns: speculative batches stand beside the plain one, a step gives each a turn."""

from tools.patch_tree import AnyEdit, Edit, after, before

AR = "mlx_vlm/generate/ar.py"
SERVER = "mlx_vlm/server/generation.py"

CORE = {
    "mlx_vlm_cacheplus/core/prefill_pace.py": "mlx_vlm/generate/prefill_pace.py",
    "mlx_vlm_cacheplus/core/speculative_turns.py": "mlx_vlm/generate/speculative_turns.py",
}

EDITS: list[AnyEdit] = [
    before(
        AR,
        "from .types import GenerateKwargs",
        "from .speculative_turns import (\n"
        "    chunk_primed,\n"
        "    open_turns,\n"
        "    own_drafter,\n"
        "    remove_row,\n"
        "    seat_beside,\n"
        "    take_turns,\n"
        "    whole_round,\n"
        ")\n",
    ),
    Edit(
        AR,
        "        with recorded_round(self):\n            return self._next()\n",
        "        return whole_round(self, self._emit)\n"
        "\n"
        "    def _emit(self) -> List[GenerationBatch.Response]:\n"
        "        with recorded_round(self):\n"
        "            return self._next()\n",
        within="SpeculativeGenerationBatch.next",
    ),
    after(
        AR,
        "        draft_state.restore_rows(self)\n",
        "        own_drafter(self)\n        chunk_primed(self, prefill_step_size)\n",
        within="PromptProcessingBatch.__init__",
    ),
    before(
        AR,
        "        self._wire_stack = contextlib.ExitStack()\n",
        "        open_turns(self)\n",
        within="BatchGenerator.__init__",
    ),
    before(
        AR,
        "        with mx.stream(self._stream):\n            # Waiting in the queue.\n",
        "        if remove_row(self, uid):\n            return True\n",
        within="BatchGenerator.remove",
    ),
    Edit(
        AR,
        "            len(self._generation_batch) > 0\n",
        "            len(self._generation_batch) > 0\n"
        "            or len(self.speculative_batches) > 0\n",
        within="BatchGenerator.has_work",
    ),
    Edit(
        AR,
        "        if len(self._generation_batch) == 0:\n",
        "        if seat_beside(self, gen_batch):\n"
        "            return\n"
        "        if len(self._generation_batch) == 0:\n",
        within="BatchGenerator._extend_generation_batch",
    ),
    after(
        AR,
        "    def next(self, **kwargs):\n",
        "        return take_turns(self, functools.partial(self._advance, **kwargs))\n"
        "\n"
        "    def _advance(self, **kwargs):\n",
        within="BatchGenerator.next",
    ),
    before(
        SERVER,
        "from ..generate.undrafted_requests import",
        "from ..generate.speculative_turns import drafts_since\n",
    ),
    Edit(
        SERVER,
        "from ..speculative.utils import speculative_stats_since, speculative_stats_snapshot\n",
        "from ..speculative.utils import speculative_stats_snapshot\n",
    ),
    before(
        SERVER,
        "        note_rows(self, batch_gen, active)\n",
        "        batch_gen.requests_in_flight = active\n",
        within="ResponseGenerator._step",
    ),
    Edit(
        SERVER,
        "speculative_stats_since(\n",
        "drafts_since(\n",
        within="ResponseGenerator._step_rows",
    ),
]
