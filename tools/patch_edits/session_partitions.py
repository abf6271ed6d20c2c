"""session-partitions: the segment cache gets another policy; a request says whose it is."""

from tools.patch_tree import AnyEdit, Edit, after, before

AR = "mlx_vlm/generate/ar.py"
APC = "mlx_vlm/apc.py"
COORDINATOR = "mlx_vlm/apc_coordinator.py"
SERVER = "mlx_vlm/server/generation.py"
APP = "mlx_vlm/server/app.py"

CORE = {
    "mlx_vlm_cacheplus/core/session_policy.py": "mlx_vlm/session_policy.py",
    "mlx_vlm_cacheplus/core/session_table.py": "mlx_vlm/session_table.py",
    "mlx_vlm_cacheplus/core/session_identity.py": "mlx_vlm/server/session_identity.py",
    "mlx_vlm_cacheplus/core/session_admin.py": "mlx_vlm/server/session_admin.py",
}

EDITS: list[AnyEdit] = [
    after(
        APC,
        "from .segment_coordination import attach, make_room, release\n",
        "from .session_table import attach as attach_sessions\n",
    ),
    after(
        APC,
        "        attach(self)\n",
        "        attach_sessions(self)\n",
        within="APCManager.__init__",
    ),
    after(
        COORDINATOR,
        "from .models.cache import CacheMemory, cache_nbytes\n",
        "from .session_table import note_prompt\n",
    ),
    before(
        COORDINATOR,
        "        return segment_coordination.lookup(\n",
        "        note_prompt(self, token_ids, extra_hash)\n",
        within="APCCoordinator.lookup",
    ),
    Edit(
        AR,
        "            return int(precomputed)\n",
        "            return precomputed\n",
        within="BatchGenerator._apc_extra_hash",
    ),
    before(
        SERVER,
        "from .runtime import runtime\n",
        "from .session_identity import salted\n",
    ),
    before(
        SERVER,
        '        request_id = f"{id(rqueue):x}"\n',
        "        if apc_semantic_hash is not None:\n"
        '            tenant = getattr(args, "tenant_id", None)\n'
        "            apc_semantic_hash = salted(apc_semantic_hash, tenant)\n",
        within="ResponseGenerator.generate",
    ),
    before(
        APP,
        "from .model_discovery import",
        "from .session_admin import make_routes\n"
        "from .session_identity import RequestsNameTheirSession\n",
    ),
    before(
        APP,
        "MAX_IMAGES = 10",
        "app.add_middleware(RequestsNameTheirSession)\n\n",
    ),
    before(
        APP,
        '@app.get("/v1/cache/stats")\n',
        "app.router.routes.extend(make_routes(sys.modules[__name__]))\n\n\n",
    ),
]
