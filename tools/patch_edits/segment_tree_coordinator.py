"""segment-tree, in the coordinator: its methods call ``segment_coordination``."""

from tools.patch_tree import AnyEdit, Body, Cut, Delete, Edit, before, either

COORDINATOR = "mlx_vlm/apc_coordinator.py"

COORDINATION: list[AnyEdit] = [
    before(
        COORDINATOR,
        "from .apc_adapters import (",
        "from . import segment_coordination\n",
    ),
    Edit(
        COORDINATOR,
        "The storage manager owns hashes, blocks, eviction and persistence.",
        "The storage manager owns the segment trees and their memory budget.",
    ),
    Cut(
        COORDINATOR,
        "    Native dense K/V layouts use the block pool.",
        "    def __init__(self, manager: Any, model: Any):",
        "    Keys and values are stored by segment and can be cut at any token.  Windowed,\n"
        "    recurrent and custom layers are stored as end states of segments.  The\n"
        "    distinction is deliberately private to the segment cache.\n"
        '    """\n'
        "\n",
    ),
    Delete(COORDINATOR, "PrefillMemoryPlan.observe_kv"),
    Delete(COORDINATOR, "PrefillMemoryPlan.restore_bytes"),
    Cut(
        COORDINATOR,
        "        from .apc import _cache_nbytes\n",
        "        if live_bytes is None:",
        within="PrefillMemoryPlan.observe_cache",
    ),
    Edit(
        COORDINATOR,
        "_cache_nbytes(prompt_cache)",
        "cache_nbytes(prompt_cache)",
        within="PrefillMemoryPlan.observe_cache",
    ),
    # With output-tokens and without it.
    either(
        *(
            Edit(
                COORDINATOR,
                "from .models.cache import CacheMemory\n"
                f"{line}from .warm_single_row import stays_plain\n",
                "from .models.cache import CacheMemory, cache_nbytes\n",
            )
            for line in ("from .superseded_states import bounded_captures\n", "")
        )
    ),
    Body(
        COORDINATOR,
        "APCCoordinator.lookup",
        '    """Find the longest restorable prefix; a hit holds a lease on its path."""\n'
        "    return segment_coordination.lookup(\n"
        "        self,\n"
        "        token_ids,\n"
        "        extra_hash=extra_hash,\n"
        "        safe_lookup_min=safe_lookup_min,\n"
        "        suffix_is_text_only=suffix_is_text_only,\n"
        "        prefix_has_media=prefix_has_media,\n"
        "    )\n",
    ),
    Body(
        COORDINATOR,
        "APCCoordinator.checkpoint_lengths",
        '    """Where a prefill of these tokens stops to keep an end state."""\n'
        "    return segment_coordination.checkpoint_lengths(\n"
        "        self, token_ids, media_token_ids\n"
        "    )\n",
    ),
    Body(
        COORDINATOR,
        "APCCoordinator.merge_rows",
        '    """Build the cache of a batch of warm and cold rows."""\n'
        "    return segment_coordination.merge_rows(\n"
        "        self, picks, prefix_lens, kv_quant_config\n"
        "    )\n",
    ),
    Cut(
        COORDINATOR,
        "        self,\n        hit: dict,\n",
        "    ) -> List[Any]:\n",
        "        self, hit: dict\n",
        within="APCCoordinator.materialize_single",
    ),
    Body(
        COORDINATOR,
        "APCCoordinator.materialize_single",
        '    """Build the cache of one hit, outside the batch generator."""\n'
        "    return segment_coordination.materialize_single(self, hit)\n",
    ),
    Body(
        COORDINATOR,
        "APCCoordinator.store_checkpoint",
        '    """Take in what a row has read so far, with its end state."""\n'
        "    return segment_coordination.commit(\n"
        "        self,\n"
        "        token_ids,\n"
        "        prompt_cache,\n"
        "        batch_idx=batch_idx,\n"
        "        extra_hash=extra_hash,\n"
        "    )\n",
    ),
    Body(
        COORDINATOR,
        "APCCoordinator.commit",
        '    """Take in what a row holds and release its lease."""\n'
        "    try:\n"
        "        return segment_coordination.commit(\n"
        "            self,\n"
        "            token_ids,\n"
        "            prompt_cache,\n"
        "            batch_idx=batch_idx,\n"
        "            extra_hash=extra_hash,\n"
        "        )\n"
        "    finally:\n"
        "        segment_coordination.release(blocks_in_use)\n",
    ),
]
