"""Many agents on one server: each keeps its own conversation, and none costs another its."""

from __future__ import annotations

import importlib
from typing import Any

from ..change import Change, Target

AR = "mlx_vlm.generate.ar"
APC = "mlx_vlm.apc"
APP = "mlx_vlm.server.app"
COORDINATOR = "mlx_vlm.apc_coordinator"


class SessionPartitions(Change):
    name = "session-partitions"
    summary = "Each session has a fair share of the cache; sessions can be listed, pinned and forgotten"
    targets = (
        Target(APC, "APCManager.__init__"),
        Target(APC, "semantic_extra_hash"),
        Target(COORDINATOR, "APCCoordinator.lookup"),
        Target(AR, "BatchGenerator._apc_extra_hash"),
        Target(APP, "app"),
    )
    why = (
        "What was used least recently goes first, whoever it belongs to: a client that sends one long prompt after another "
        "takes the cache from every agent on the server, and titles and rewritten turns are kept as long as conversations."
    )
    upstream = "no issue yet; the same fault in https://github.com/ggml-org/llama.cpp/issues/22756 and others"
    remove_when = "the prefix cache knows whose a prefix is"
    requires = ("segment-tree",)
    marks = ("mlx_vlm.session_table:Sessions",)

    def apply(self, patcher: Any) -> None:
        from ..core import session_table as core

        def init(original: Any) -> Any:
            def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
                original(self, *args, **kwargs)
                core.attach(self)

            return wrapper

        def lookup(original: Any) -> Any:
            def wrapper(
                self: Any, token_ids: Any, *, extra_hash: int, **kwargs: Any
            ) -> Any:
                core.note_prompt(self, token_ids, extra_hash)
                return original(self, token_ids, extra_hash=extra_hash, **kwargs)

            return wrapper

        def extra_hash(original: Any) -> Any:
            # Stock makes a plain integer of it.
            def wrapper(self: Any, prompt_kwargs: Any) -> int:
                given = (prompt_kwargs or {}).get("_apc_semantic_hash")
                if isinstance(given, core.Salt) and self.apc_manager is not None:
                    return given
                return original(self, prompt_kwargs)

            return wrapper

        patcher.replace_method(APC, "APCManager.__init__", init)
        patcher.replace_method(COORDINATOR, "APCCoordinator.lookup", lookup)
        patcher.replace_method(AR, "BatchGenerator._apc_extra_hash", extra_hash)
        _apply_to_server(patcher)


def _apply_to_server(patcher: Any) -> None:
    from starlette.middleware import Middleware

    from ..core import session_admin, session_identity
    from ..plugins import identify_session
    from ..reports.tracker import forget_all

    def salt(original: Any) -> Any:
        def wrapper(*, tenant: Any = None, **kwargs: Any) -> int:
            return session_identity.salted(original(tenant=tenant, **kwargs), tenant)

        return wrapper

    patcher.replace_method(APC, "semantic_extra_hash", salt)
    server = importlib.import_module(APP)
    app = server.app
    naming = Middleware(
        session_identity.RequestsNameTheirSession, identify=identify_session
    )
    patcher.set_within(APP, "app", "user_middleware", [*app.user_middleware, naming])
    # Upstream's place, and the one where the plugin's other endpoints are.
    paths = (session_admin.PATH, "/v1/cacheplus/sessions")
    routes = [
        route
        for path in paths
        for route in session_admin.make_routes(server, [forget_all], path)
    ]
    patcher.set_within(APP, "app", "router.routes", [*app.router.routes, *routes])


CHANGE = SessionPartitions()
