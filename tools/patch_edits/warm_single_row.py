"""warm-single-row: the generator says what its cold rows have, the coordinator asks."""

from tools.patch_tree import after, before

AR = "mlx_vlm/generate/ar.py"
COORDINATOR = "mlx_vlm/apc_coordinator.py"

CORE = {"mlx_vlm_cacheplus/core/warm_single_row.py": "mlx_vlm/warm_single_row.py"}

EDITS = [
    before(
        AR,
        "        self.sampler = sampler or",
        "        if self.apc is not None:\n"
        '            own = hasattr(model, "make_cache")\n'
        "            self.apc.plain_rows = draft_model is None and own\n",
        within="BatchGenerator.__init__",
    ),
    after(
        COORDINATOR,
        "from .models.cache import CacheMemory\n",
        "from .warm_single_row import stays_plain\n",
    ),
    before(
        COORDINATOR,
        "        memory = self.manager.memory_plan\n",
        "        if stays_plain(self, picks, kv_quant_config):\n"
        "            (hit,) = picks\n"
        '            length = len(hit["full_input_ids"])\n'
        "            row = self.materialize_single(hit, min_capacity_tokens=length)\n"
        '            return row, hit["prefix_len"]\n\n',
        within="APCCoordinator.merge_rows",
    ),
]
