"""tenant-isolation: the salt of a tenant, whose features of pictures are, and the headers that name one."""

from tools.patch_tree import AnyEdit, Body, Cut, Delete, Edit, WithFile, after, before

APC = "mlx_vlm/apc.py"
APP = "mlx_vlm/server/app.py"
SERVER = "mlx_vlm/server/generation.py"
VISION = "mlx_vlm/vision_cache.py"

CORE = {
    "mlx_vlm_cacheplus/core/tenant_salt.py": "mlx_vlm/tenant_salt.py",
    "mlx_vlm_cacheplus/core/tenant_headers.py": "mlx_vlm/server/tenant_headers.py",
}

# The pool compares a block's salt, and what is before the block, by its name alone.  A
# segment tree, which removes the pool and this file, compares ids and salts themselves.
POOL = "mlx_vlm/apc_storage.py"
BLOCK_NAME = '''\
    """Chain hash for a single block: of its ids, its salt, and all before it."""
    h = hashlib.blake2b(digest_size=32, person=b"apc block name")
    for number in (parent, extra):
        # A salt is signed, or 256 bits that are not.
        h.update(int(number).to_bytes(33, "little", signed=True))
    h.update(np.asarray(tokens, dtype=np.int64).tobytes())
    return int.from_bytes(h.digest(), "little")
'''

NAMES: list[AnyEdit] = [
    Cut(
        APC,
        "``H`` defaults to\n",
        "\nEviction is LRU",
        "``H`` is a\n256-bit BLAKE2b: a block's salt is compared by its name alone.\n",
    ),
    Delete(APC, "_hash_use_sha256"),
    Body(APC, "_hash_tokens", BLOCK_NAME),
    Edit(APC, '"sha256" if _hash_use_sha256() else "fast"', '"blake2b"'),
]

EDITS: list[AnyEdit] = [
    *(WithFile(edit, POOL) for edit in NAMES),
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
