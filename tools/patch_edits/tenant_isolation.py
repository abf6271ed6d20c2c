"""tenant-isolation: the salt of a tenant, whose features of pictures are, and the headers that name one."""

from tools.patch_tree import AnyEdit, Body, Edit, after, before

APC = "mlx_vlm/apc.py"
APP = "mlx_vlm/server/app.py"
SERVER = "mlx_vlm/server/generation.py"
VISION = "mlx_vlm/vision_cache.py"

CORE = {
    "mlx_vlm_cacheplus/core/tenant_salt.py": "mlx_vlm/tenant_salt.py",
    "mlx_vlm_cacheplus/core/tenant_headers.py": "mlx_vlm/server/tenant_headers.py",
}

EDITS: list[AnyEdit] = [
    after(
        APC,
        "from .kv_quant import kv_quant_fingerprint\n",
        "from .tenant_salt import tenant_salt\n",
    ),
    Body(
        APC,
        "tenant_scoped_hash",
        '    """APC salt for tenant-scoped multimodal context."""\n'
        "    return tenant_salt(tenant, int(payload_hash))\n",
    ),
    after(
        VISION,
        "from .apc import semantic_extra_hash\n",
        "from .tenant_salt import picture_key\n",
    ),
    *(
        Edit(
            VISION,
            "key = self._make_key(image_source)",
            "key = picture_key(self._make_key(image_source))",
            within=f"VisionFeatureCache.{name}",
        )
        for name in ("get", "put", "__contains__")
    ),
    before(
        SERVER,
        "from ..tokenizer_utils import _ServerTokenStreamer",
        "from ..tenant_salt import pictures_of\n",
    ),
    Edit(
        SERVER,
        "        embed = self.model.get_input_embeddings(\n"
        "            input_ids, pixel_values, mask=mask, **data_kwargs\n"
        "        )\n",
        "        with pictures_of(apc_semantic_hash):\n"
        "            embed = self.model.get_input_embeddings(\n"
        "                input_ids, pixel_values, mask=mask, **data_kwargs\n"
        "            )\n",
        within="ResponseGenerator._gpu_embed",
    ),
    after(
        APP,
        "from .schemas import ChatLogprobContent, ModelsResponse, TopLogprob\n",
        "from .tenant_headers import TenantsAreNamedAsAgreed\n"
        "from .tenant_headers import check_settings as check_tenant_settings\n",
    ),
    before(
        APP,
        "app.add_middleware(\n    CORSMiddleware,\n",
        "check_tenant_settings()\napp.add_middleware(TenantsAreNamedAsAgreed)\n",
    ),
]
