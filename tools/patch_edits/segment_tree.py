"""segment-tree: the coordinator's methods call the tree; what it replaces is deleted."""

from tools.patch_tree import (
    AnyEdit,
    Body,
    Cut,
    Delete,
    DeleteFile,
    Edit,
    WithFile,
    after,
    before,
    either,
)

AR = "mlx_vlm/generate/ar.py"
DISPATCH = "mlx_vlm/generate/dispatch.py"
DIFFUSION = "mlx_vlm/generate/diffusion.py"
ROWS = "mlx_vlm/generate/recurrent_rows.py"
APC = "mlx_vlm/apc.py"
COORDINATOR = "mlx_vlm/apc_coordinator.py"

CORE = {
    "mlx_vlm_cacheplus/core/segment_tree.py": "mlx_vlm/segment_tree.py",
    "mlx_vlm_cacheplus/core/eviction.py": "mlx_vlm/segment_eviction.py",
    "mlx_vlm_cacheplus/core/companions.py": "mlx_vlm/segment_companions.py",
    "mlx_vlm_cacheplus/core/segment_layers.py": "mlx_vlm/segment_layers.py",
    "mlx_vlm_cacheplus/core/segments.py": "mlx_vlm/segments.py",
    "mlx_vlm_cacheplus/core/resumable.py": "mlx_vlm/segment_resumable.py",
    "mlx_vlm_cacheplus/core/segment_tier.py": "mlx_vlm/segment_tier.py",
    "mlx_vlm_cacheplus/core/boundaries.py": "mlx_vlm/segment_boundaries.py",
    "mlx_vlm_cacheplus/core/segment_cache.py": "mlx_vlm/segment_cache.py",
    "mlx_vlm_cacheplus/core/segment_coordination.py": "mlx_vlm/segment_coordination.py",
}

# -- generation --------------------------------------------------------------------

GENERATION: list[AnyEdit] = [
    before(
        AR,
        "from .types import GenerateKwargs",
        "from ..segment_coordination import configure, keep_prefilled, keep_removed\n",
    ),
    # One coordinator, always: the branches for callers without one go.
    Edit(
        AR,
        "        apc_mode: Optional[str] = None,\n",
        "",
        within="PromptProcessingBatch.__init__",
    ),
    Edit(AR, "        self._apc_mode = apc_mode\n", ""),
    Body(
        AR,
        "PromptProcessingBatch._apc_uses_checkpoints",
        '    coordinator = getattr(self, "_apc_coordinator", None)\n'
        "    return coordinator is not None and coordinator.is_checkpoint\n",
    ),
    Delete(AR, "PromptProcessingBatch._apc_prompt_cache_for_store"),
    Cut(
        AR,
        '            coordinator = getattr(self, "_apc_coordinator", None)\n',
        '            meta["checkpoint_stored"] = checkpoint_len\n',
        "            stored = self._apc_coordinator.store_checkpoint(\n"
        '                meta["full_input_ids"][:checkpoint_len],\n'
        "                self.prompt_cache,\n"
        "                batch_idx=batch_idx,\n"
        '                extra_hash=meta.get("extra_hash", 0),\n'
        "            )\n",
        within="PromptProcessingBatch._store_apc_exact_checkpoints",
    ),
    after(
        AR,
        '        """Process one chunk of the prompt. Returns tokens processed."""\n',
        "        try:\n"
        "            return self._prompt_step()\n"
        "        except Exception:\n"
        "            for index in range(len(self.uids)):\n"
        "                keep_prefilled(self, index, with_state=False)\n"
        "            raise\n"
        "\n"
        "    def _prompt_step(self) -> int:\n",
        within="PromptProcessingBatch.prompt_step",
    ),
    Edit(
        AR,
        "harvest the post-prefill K/V into hashed blocks. Done after the",
        "take in what the prefill added. Done after the",
        within="PromptProcessingBatch.generate",
    ),
    Edit(
        AR,
        "        # so the block tensors snapshot the prompt prefix.\n",
        "        # so that the copies are of the prompt alone.\n",
        within="PromptProcessingBatch.generate",
    ),
    Cut(
        AR,
        "                        # A third, full-prompt copy",
        '                        self._apc_manager.release(meta.get("apc_blocks", []))\n'
        "                        continue\n",
        "                        # The guard checkpoint also serves conversation\n"
        "                        # extensions.\n",
        within="PromptProcessingBatch.generate",
    ),
    Cut(
        AR,
        '                    coordinator = getattr(self, "_apc_coordinator", None)\n',
        "            except Exception as e:\n"
        '                logger.warning("APC harvest failed',
        "                    self._apc_coordinator.commit(\n"
        "                        self.prompt_cache,\n"
        '                        meta["full_input_ids"],\n'
        "                        batch_idx=batch_idx,\n"
        '                        extra_hash=meta.get("extra_hash", 0),\n'
        '                        skip_first_n_tokens=meta.get("prefix_len", 0),\n'
        '                        blocks_in_use=meta.get("apc_blocks", []),\n'
        "                    )\n",
        within="PromptProcessingBatch.generate",
    ),
    Edit(
        AR,
        '            own = hasattr(model, "make_cache")\n'
        "            self.apc.plain_rows = draft_model is None and own\n",
        "            configure(self.apc, self.tokenizer, plain_rows=draft_model is None)\n",
        within="BatchGenerator.__init__",
    ),
    Cut(
        AR,
        '        if self.apc_manager is None or getattr(self, "apc_mode"',
        "    def _apc_exact_checkpoint_lengths(",
        "        return 0\n\n",
        within="BatchGenerator",
    ),
    Cut(
        AR,
        "        boundary = self._apc_exact_checkpoint_len(ids_list)\n",
        "    def _apc_pick_for(",
        "        return []\n\n",
        within="BatchGenerator",
    ),
    Edit(
        AR,
        "Returns dict with matched\n        blocks + suffix metadata",
        "Returns dict with its\n        lease + suffix metadata",
    ),
    Cut(
        AR,
        '        coordinator = getattr(self, "apc", None)\n        lookup_kwargs = {\n',
        "    def _build_mixed_prompt_batch(",
        "        return self.apc.lookup(\n"
        "            ids_list,\n"
        "            extra_hash=self._apc_extra_hash(prompt_kwargs or {}),\n"
        "            safe_lookup_min=self._apc_safe_prefix_lookup_min(ids_list),\n"
        "            suffix_is_text_only=lambda pl: self._apc_suffix_is_text_only(\n"
        "                ids_list, pl\n"
        "            ),\n"
        "            prefix_has_media=lambda pl: self._apc_prefix_has_media_tokens(\n"
        "                ids_list, pl\n"
        "            ),\n"
        "        )\n"
        "\n",
        within="BatchGenerator",
    ),
    Edit(AR, '        apc_mode = getattr(self, "apc_mode", "block")\n', ""),
    Cut(
        AR,
        '        coordinator = getattr(self, "apc", None)\n        if coordinator is not None:\n            warm_cache',
        "        if warm_cache is None:\n",
        "        warm_cache, _ = self.apc.merge_rows(\n"
        "            picks,\n"
        "            prefix_lens,\n"
        "            kv_quant_config=_quant_cfg,\n"
        "        )\n",
        within="BatchGenerator._build_mixed_prompt_batch",
    ),
    Edit(AR, "            apc_mode=apc_mode,\n", ""),
    Edit(AR, "                apc_mode=self.apc_mode,\n", ""),
    after(
        AR,
        '        """Remove a sequence from the batch by uid."""\n',
        "        keep_removed(self, uid)\n",
        within="BatchGenerator.remove",
    ),
    Edit(
        DISPATCH,
        "apc_blocks_in_use: List[_apc.APCBlock] = []",
        "apc_blocks_in_use: List[Any] = []",
    ),
    Edit(
        DISPATCH,
        "    # APC: cross-request, hash-based prefix",
        "    # APC: cross-request prefix",
    ),
    Edit(DISPATCH, "from ..kv_quant import from_legacy as kv_quant_from_legacy\n", ""),
    Edit(DISPATCH, '            warm_cache = plan.get("warm_cache")\n', ""),
    Cut(
        DISPATCH,
        "                _quant_policy = kv_quant_from_legacy(\n",
        "                apc_coordinator.release_hit(plan)\n",
        '                kwargs["prompt_cache"] = apc_coordinator.materialize_single(plan)\n'
        "            else:\n",
    ),
    Cut(
        DIFFUSION,
        "                apc_hit,\n                min_capacity_tokens",
        "            )\n            if apc is not None and apc_hit is not None",
        "                apc_hit\n",
    ),
    Edit(
        DISPATCH,
        "    # APC: harvest new blocks from the post-generation KV state.\n",
        "    # APC: take in what the generation added.\n",
    ),
    # What recurrent-rows has brought, where it is there.
    WithFile(
        Cut(
            ROWS,
            '    segments = getattr(manager, "segments", None)\n',
            None,
            "    return manager.segments.peek(ids, extra_hash)\n",
            within="_prefix_len",
        )
    ),
]

# -- the coordinator ---------------------------------------------------------------

CALLS: list[AnyEdit] = [
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

# -- the storage manager -------------------------------------------------------------

HELPERS = (
    "default_disk_path _hash_use_sha256 _hash_tokens _copy_mlx_array "
    "_pad_kv_for_capacity _clone_prompt_cache_for_apc _dense_checkpoint_trimmable "
    "_checkpoint_match_len _dense_checkpoint_prefix _clone_layer_major_kv_cache_for_apc "
    "_sequence_hash APCBlock APCExactCacheEntry _DiskLayerMajorBlock "
    "_DiskLayerMajorSnapshot _DiskExactCacheSnapshot _safe_namespace "
    "_read_safetensors_header _read_safetensors_metadata _numel _mlx_dtype_from_name "
    "_extract_empty_tensor_specs _restore_empty_tensor_entries _encode_checkpoint_tree "
    "_decode_checkpoint_tree _resolve_checkpoint_class _safetensors_dtype_info "
    "_safetensors_tensor_bounds _mlx_array_from_safetensors_bytes "
    "_read_safetensors_tensor _read_safetensors_axis0_slice_bytes "
    "_read_safetensors_axis0_slice DiskBlockStore _fill_stream_layer_cache "
    "make_warm_kv_cache make_warm_kv_cache_from_layers make_warm_batch_kv_cache "
    "make_warm_batch_kv_cache_multi extract_prompt_cache_from_batch "
    "_prompt_cache_is_batch_shaped snapshot_prompt_cache_row layer_kv_for_apc "
    "harvest_blocks_from_batch_cache commit_prefix_blocks apc_lookup_plan"
).split()
METHODS = (
    "_record_disk_writes _record_disk_write_failures _free_push _free_remove _evict_lru "
    "_make_tensor_room _acquire_existing _release_one _resident_bytes_locked "
    "lookup_exact_cache store_exact_cache lookup_prefix_disk_cache lookup_prefix "
    "store_kv_blocks"
).split()

STORAGE: list[AnyEdit] = [
    *(Delete(APC, name) for name in HELPERS),
    *(Delete(APC, f"APCManager.{name}") for name in METHODS),
    # Module.
    Cut(
        APC,
        "Hash-based model-cache reuse across requests.",
        "Numerical note:",
        "What the model has read is kept in a prefix tree (``segment_tree``): a node is the\n"
        "span of tokens that one prefill or one reply added. It stores keys and values of\n"
        "exactly that span, one array a layer and side, and, for layers that cannot be cut\n"
        "at a token (recurrent, windowed, custom), their state after its last token.\n"
        "``extra_hash`` carries multimodal context (e.g. an image content hash) and tenant,\n"
        "so identical token IDs with different images don't collide: each has its own tree.\n"
        "\n"
        "Eviction keeps what was read last and leased paths. A byte budget bounds the tree;\n"
        "prefill admission evicts idle segments to leave room for the incoming request.\n"
        "\n",
    ),
    Edit(
        APC,
        "The K/V tensors stored in the block\npool are byte-identical",
        "The K/V tensors stored in the\ntree are byte-identical",
    ),
    Edit(APC, "import importlib\nimport json\n", ""),
    Edit(APC, "import queue\n", ""),
    Edit(APC, "from typing import Any, Callable, Dict", "from typing import Any, Dict"),
    Edit(APC, "import time\nfrom collections import OrderedDict\n", ""),
    Edit(APC, "from pathlib import Path\n", ""),
    Edit(APC, "from ._stream_cleanup import clear_mlx_streams\n", ""),
    Edit(APC, "from .apc_adapters import reserve_checkpoint_capacity\n", ""),
    Edit(APC, "from .apc_storage import APCNode, ComponentId, StateHandle\n", ""),
    Edit(
        APC,
        "from .models.cache import cache_nbytes as _cache_nbytes\n",
        "from .segment_coordination import attach, make_room, release\n",
    ),
    # What output-tokens has brought, where it is there.
    WithFile(
        Edit(APC, "from .superseded_states import make_room_for_successor\n", ""),
        there="mlx_vlm/superseded_states.py",
    ),
    Cut(
        APC,
        "DEFAULT_BLOCK_SIZE = 16\n",
        "SEED_PARENT_HASH",
    ),
    Cut(APC, "_EMPTY_TENSORS_METADATA =", "def _free_ram_bytes("),
    # Statistics.
    Edit(APC, "    pool_used: int = 0\n", "", within="APCStats"),
    Cut(
        APC, "    disk_hits: int = 0\n", "    memory_evictions: int", within="APCStats"
    ),
    Edit(
        APC,
        "def snapshot(self, num_blocks: int, block_size: int)",
        "def snapshot(self)",
        within="APCStats",
    ),
    Cut(
        APC,
        '            "block_size": block_size,\n',
        '            "lookups_hit"',
        within="APCStats",
    ),
    Cut(
        APC,
        '            "disk_hits": self.disk_hits,\n',
        '            "memory_evictions"',
        within="APCStats",
    ),
    # The manager.
    Edit(
        APC,
        '"""Block pool, hash table, LRU free queue, and stats."""',
        '"""Segment cache, its memory budget, and stats.\n'
        "\n"
        "    Args:\n"
        "        num_blocks, block_size: not used; callers of earlier releases give them.\n"
        '    """',
    ),
    Cut(
        APC,
        "        num_blocks: int = DEFAULT_NUM_BLOCKS,\n",
        "        *,\n        overrides",
        "        num_blocks: Optional[int] = None,\n"
        "        block_size: Optional[int] = None,\n",
        within="APCManager.__init__",
    ),
    Cut(
        APC,
        "        self.block_size = block_size\n",
        "        self.stats = APCStats()\n",
        within="APCManager.__init__",
    ),
    Cut(
        APC,
        "        self.disk = disk\n",
        "        self.exact_cache_guard_tokens = max(",
        within="APCManager.__init__",
    ),
    Cut(
        APC,
        "        self.exact_cache_min_tokens = max(",
        "        self.checkpoint_interval_tokens",
        within="APCManager.__init__",
    ),
    Cut(
        APC,
        "        # If free RAM (best-effort reading) drops",
        "        self._working_set_bytes =",
        within="APCManager.__init__",
    ),
    after(
        APC,
        "        self._prefill_reserve_bytes = 0\n",
        "        attach(self)\n",
        within="APCManager.__init__",
    ),
    Edit(
        APC,
        "def release(self, blocks: Iterable[APCBlock])",
        "def release(self, blocks: Iterable[Any])",
    ),
    Body(
        APC,
        "APCManager.release",
        '    """Give leases back."""\n    release(list(blocks))\n',
    ),
    Body(APC, "APCManager.resident_bytes", "    return self.segments.nbytes\n"),
    Body(
        APC,
        "APCManager._make_room",
        '    """Evict idle segments before allocating; leased paths stay."""\n'
        "    return make_room(self, allocation_bytes, retain_bytes)\n",
    ),
    Cut(
        APC,
        "        if self.disk is not None:\n",
        "        self._prefill_reserve_bytes",
        within="APCManager.prepare_prefill",
    ),
    Body(
        APC,
        "APCManager.stats_snapshot",
        "    with self.lock:\n"
        "        snap = self.stats.snapshot()\n"
        '        snap["memory_max_bytes"] = self.memory_max_bytes\n'
        '        snap["prefill_reserve_bytes"] = self._prefill_reserve_bytes\n'
        "    # A commit holds the segments' lock when it asks for this one.\n"
        '    snap["resident_bytes"] = self.segments.nbytes\n'
        "    return {**snap, **self.segments.statistics()}\n",
    ),
    Body(
        APC,
        "APCManager.clear",
        "    with self.lock:\n"
        "        self.stats = APCStats()\n"
        "    self.segments.clear()\n",
    ),
    Body(
        APC,
        "APCManager.close",
        '    """Stop what runs behind the cache: nothing, without a disk tier."""\n',
    ),
    # Start-up.
    Cut(
        APC,
        "    def _ov_int(",
        None,
        "    disk_enabled = str(\n"
        '        _setting(overrides, "disk_enabled", "APC_DISK_ENABLED", True)\n'
        '    ).lower() in ("1", "true", "yes")\n'
        "    if disk_enabled:\n"
        "        logger.warning(\n"
        '            "APC: nothing is kept on disk; segment trees live in memory alone "\n'
        '            "(APC_DISK_ENABLED=0 says the same without this line)"\n'
        "        )\n"
        "    manager = APCManager(overrides=overrides)\n"
        "    logger.info(\n"
        '        "APC enabled (segment trees, at most %.1f GB)",\n'
        "        manager.memory_max_bytes / (1 << 30),\n"
        "    )\n"
        "    return manager\n",
        within="from_env",
    ),
    DeleteFile("mlx_vlm/apc_storage.py"),
    WithFile(DeleteFile("mlx_vlm/superseded_states.py")),
]

EDITS = [*GENERATION, *CALLS, *STORAGE]
