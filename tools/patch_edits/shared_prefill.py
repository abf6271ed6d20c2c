"""shared-prefill: admission to the server and to a batch; the leader's stops."""

from tools.patch_tree import AnyEdit, Edit, after, before, either

AR = "mlx_vlm/generate/ar.py"
COORDINATOR = "mlx_vlm/apc_coordinator.py"
SERVER = "mlx_vlm/server/generation.py"

CORE = {
    "mlx_vlm_cacheplus/core/shared_prefixes.py": "mlx_vlm/shared_prefixes.py",
    "mlx_vlm_cacheplus/core/shared_prefill.py": "mlx_vlm/shared_prefill.py",
}

EDITS: list[AnyEdit] = [
    before(
        AR,
        "from .types import GenerateKwargs",
        "from ..shared_prefill import rows_that_share_nothing\n",
    ),
    either(
        # Outside: who may be prefilled together is decided among those that do not wait.
        before(
            AR,
            "            rows_that_fit_together(self),\n",
            "            rows_that_share_nothing(self),\n",
            within="BatchGenerator.next",
        ),
        Edit(
            AR,
            "with mx.stream(self._stream):",
            "with mx.stream(self._stream), rows_that_share_nothing(self):",
            within="BatchGenerator.next",
        ),
    ),
    after(
        COORDINATOR,
        "from .models.cache import CacheMemory, cache_nbytes\n",
        "from .shared_prefixes import add_shared_stops\n",
    ),
    Edit(
        COORDINATOR,
        "        return segment_coordination.checkpoint_lengths(self, token_ids, media_token_ids)\n",
        "        stops = segment_coordination.checkpoint_lengths(\n"
        "            self, token_ids, media_token_ids\n"
        "        )\n"
        "        return add_shared_stops(self, token_ids, stops)\n",
        within="APCCoordinator.checkpoint_lengths",
    ),
    before(
        SERVER,
        "from ..speculative.utils import speculative_stats_since",
        "from ..shared_prefill import admit, note_rows_at_work\n",
    ),
    Edit(
        SERVER,
        "                new_items, should_stop = self._collect_pending_requests(\n"
        "                    active=active_batch,\n",
        "                new_items, should_stop = admit(\n"
        "                    self,\n"
        "                    self._collect_pending_requests,\n"
        "                    active=active_batch,\n",
        within="ResponseGenerator._run_impl",
    ),
    after(
        SERVER,
        '        """One batch generation step: prefill + decode."""\n',
        "        note_rows_at_work(self, batch_gen, active)\n",
        within="ResponseGenerator._step",
    ),
]
