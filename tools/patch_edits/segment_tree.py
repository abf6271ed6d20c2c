"""segment-tree: the coordinator's methods call the tree; what it replaces is deleted."""

from tools.patch_edits.segment_tree_coordinator import COORDINATION
from tools.patch_edits.segment_tree_generation import GENERATION
from tools.patch_edits.segment_tree_storage import STORAGE

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

EDITS = [*GENERATION, *COORDINATION, *STORAGE]
