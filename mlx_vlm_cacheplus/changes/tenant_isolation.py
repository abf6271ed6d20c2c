"""What one tenant has stored is never another's, and a request is some tenant's or nobody's."""

from __future__ import annotations

import hashlib
import importlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from ..change import Change, Option, Target

APC = "mlx_vlm.apc"
APP = "mlx_vlm.server.app"
SERVER = "mlx_vlm.server.generation"
VISION = "mlx_vlm.vision_cache"


def check(variable: str) -> Callable[[str], None]:
    """What says whether a value of a setting will do; raises ValueError where not."""

    def checked(value: str) -> None:
        from ..core.tenant_headers import SETTINGS

        SETTINGS[variable](value)

    return checked


def block_name(parent: int, tokens: Sequence[int], salt: int) -> int:
    """The name of a block of stock's pool: 256 bits of its ids, its salt, and all before it.

    The pool compares a block's own ids when it is found; what was before it, and its salt, only by this. The patch has
    no such function: the tree compares all ids, and its roots are the salts.
    """
    digest = hashlib.blake2b(digest_size=32, person=b"apc block name")
    for number in (parent, salt):
        # A salt is signed, or 256 bits that are not.
        digest.update(number.to_bytes(33, "little", signed=True))
    digest.update(array("q", tokens).tobytes())
    return int.from_bytes(digest.digest(), "little")


class TenantIsolation(Change):
    name = "tenant-isolation"
    summary = "A tenant's salt is 256 bits of a keyed hash; empty and malformed tenants are refused; a proxy's header alone can count"
    targets = (
        Target(APC, "tenant_scoped_hash"),
        Target(APC, "_hash_tokens"),
        Target(VISION, "VisionFeatureCache._make_key"),
        Target(SERVER, "ResponseGenerator._gpu_embed"),
        Target(APP, "app"),
    )
    why = (
        "A tenant's salt is 64 bits that everybody can compute, of which Python's hash() of integers keeps 61; stored blocks "
        "are compared without it. An empty tenant is served from what all share, any client may name any tenant, and "
        "features of pictures are everybody's."
    )
    upstream = "no issue yet; the same class as https://github.com/vllm-project/vllm/security/advisories/GHSA-rm76-4mrf-v9r8"
    remove_when = "the salt is a keyed hash of at least 128 bits, and a tenant that is none is refused"
    guarantee = True
    marks = (
        "mlx_vlm.tenant_salt:tenant_salt",
        "mlx_vlm.server.tenant_headers:TenantsAreNamedAsAgreed",
    )
    options = (
        Option(
            "--cacheplus-tenant-key",
            "APC_TENANT_KEY_FILE",
            "File with the secret that tenants' salts are made with; without it they change with each start.",
            metavar="FILE",
            check=check("APC_TENANT_KEY_FILE"),
        ),
        Option(
            "--cacheplus-tenant-proxy-secret",
            "APC_TENANT_PROXY_SECRET_FILE",
            "File with the secret that the proxy sends in X-APC-Proxy-Secret; only requests that bring it may name a tenant.",
            metavar="FILE",
            check=check("APC_TENANT_PROXY_SECRET_FILE"),
        ),
        Option(
            "--cacheplus-tenant-header",
            "APC_TENANT_HEADER",
            "Header that names the tenant, in place of X-APC-Tenant and X-Tenant-Id.",
            metavar="NAME",
            check=check("APC_TENANT_HEADER"),
        ),
    )

    def apply(self, patcher: Any) -> None:
        from starlette.middleware import Middleware

        from ..core import tenant_headers
        from ..core import tenant_salt as core

        def salt(original: Any) -> Any:
            return lambda tenant, payload_hash=0: core.tenant_salt(
                tenant, int(payload_hash)
            )

        def embed(original: Any) -> Any:
            def wrapper(
                self: Any,
                raw_inputs: Any,
                images: Any = None,
                apc_semantic_hash: Any = None,
            ) -> Any:
                with core.pictures_of(apc_semantic_hash):
                    return original(self, raw_inputs, images, apc_semantic_hash)

            return wrapper

        def key(original: Any) -> Any:
            return lambda self, image_source: core.picture_key(
                original(self, image_source)
            )

        tenant_headers.check_settings()
        patcher.replace_method(APC, "tenant_scoped_hash", salt)
        patcher.replace_method(APC, "_hash_tokens", lambda original: block_name)
        patcher.replace_method(VISION, "VisionFeatureCache._make_key", key)
        patcher.replace_method(SERVER, "ResponseGenerator._gpu_embed", embed)
        # Innermost: a refusal goes out as every other answer does.
        app = importlib.import_module(APP).app
        checking = Middleware(tenant_headers.TenantsAreNamedAsAgreed)
        patcher.set_within(
            APP, "app", "user_middleware", [*app.user_middleware, checking]
        )


CHANGE = TenantIsolation()
