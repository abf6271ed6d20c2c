"""segment-tree, in the storage manager: blocks, hashes and files go; the trees and their budget stay."""

from tools.patch_tree import (
    AnyEdit,
    Body,
    Cut,
    Delete,
    DeleteFile,
    Edit,
    WithFile,
    after,
)

APC = "mlx_vlm/apc.py"

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
