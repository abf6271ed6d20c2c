"""Requests of every kind to a real server, and the records they leave: one JSON object.

Run as a program, in a process of its own. The argument names the changes, all of them by default.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from tests.contract.usage_matrix import user
from tests.fakes.replies import RequestFailed

LINES: list[str] = []
PATH = "/v1/cacheplus/report"
TALK = "copy: fox yak one two three four five six seven eight nine ten"


class Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LINES.append(record.getMessage())


def records(server: Any, last: int) -> list[dict[str, Any]]:
    return server.get(f"{PATH}?last={last}")["records"]


def facts(reply: Any) -> dict[str, int]:
    """What the fixture counted itself: ids, emitted ids, and tokens that were really forwarded."""
    return {
        "prompt": len(reply.prompt_ids),
        "generated": len(reply.ids),
        "prefilled": reply.prefilled,
    }


def session(server: Any, turns: int = 4) -> dict[str, Any]:
    """A conversation, by length and by stop token in turn."""
    talk, counted = [user(TALK)], []
    for turn in range(turns):
        # What a half-trained model writes by itself need not come back as it was.
        script = "lion bear cat" if turn % 2 else "fox yak owl " * 8
        reply = server.chat(talk, max_tokens=12, script=script, stream=turn % 2 == 0)
        counted.append({**facts(reply), "finish": reply.finish_reason})
        talk = [*talk, reply.message(), user(f"go on {turn}")]
    return {"records": records(server, turns), "counted": counted}


def ends(server: Any) -> dict[str, Any]:
    """One after another: cancelled, several at once, one that fails."""
    cancelled = server.cancel([user("copy: cat owl fox bear")], after=3)
    out: dict[str, Any] = {"cancel": [records(server, 1)[0], facts(cancelled)]}
    requests = [
        {"messages": [user(f"copy: {i} fox yak")], "max_tokens": 4 + i}
        for i in range(3)
    ]
    counted = [facts(reply) for reply in server.together(requests)]
    out["together"] = [records(server, 3), counted]
    out["error"] = fail_once(server)
    return out


def fail_once(server: Any) -> dict[str, Any]:
    """The record of a request whose decode step raises, and what its client was told."""
    kind = type(server.language_model)
    call, seen = kind.__call__, []

    def broken(self: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(ids.shape[1])
        if seen.count(1) == 4:
            raise RuntimeError("broken on purpose")
        return call(self, ids, *args, **kwargs)

    kind.__call__ = broken
    try:
        told = server.chat([user("copy: bear fox bear")], max_tokens=12).text
    except RequestFailed as failure:
        told = str(failure)
    finally:
        kind.__call__ = call
    server.wait_idle()
    return {**records(server, 1)[0], "told": told}


def door(server: Any) -> dict[str, Any]:
    """The endpoint's answers: counts, and the key."""
    client = server.host.client
    out = {q: client.get(f"{PATH}?last={q}").status_code for q in ("0", "-1", "x", "")}
    out["post"] = client.post(PATH).status_code
    os.environ["MLX_VLM_SERVER_API_KEY"] = "secret"
    try:
        out["no key"] = client.get(PATH).status_code
        out["stock, no key"] = client.get("/v1/cache/stats").status_code
        key = {"Authorization": "Bearer secret"}
        out["key"] = client.get(PATH, headers=key).status_code
    finally:
        del os.environ["MLX_VLM_SERVER_API_KEY"]
    return out


def disk(make: Any, folder: str) -> dict[str, Any]:
    """The same prompt from the disk tier, after the RAM was emptied."""
    server = make("hybrid", disk=folder)
    first = server.chat([user(TALK)], max_tokens=4)
    if server.manager.disk is not None:
        server.manager.disk.flush()
    server.reload()
    again = server.chat([user(TALK)], max_tokens=4)
    return {"counted": [facts(first), facts(again)], "records": records(server, 2)}


def paths(app: Any) -> list[str | None]:
    return [getattr(route, "path", None) for route in app.router.routes]


def main() -> None:
    import tempfile

    import mlx_vlm_cacheplus

    names = sys.argv[1].split(",") if len(sys.argv) > 1 else None
    report = mlx_vlm_cacheplus.activate(names)
    from tests.fakes.host import Settings, resolve_model, serving
    from tests.fakes.server import TinyServer

    logging.getLogger("mlx_vlm.server").setLevel(logging.INFO)
    logging.getLogger("mlx_vlm.server").addHandler(Listener())
    out: dict[str, Any] = {"states": {f.name: f.state.value for f in report.findings}}
    with serving() as host, tempfile.TemporaryDirectory() as folder:

        def make(model: str, **settings: Any) -> TinyServer:
            settings.setdefault("apc_checkpoint_entries", 8)
            return TinyServer(host, Settings(resolve_model(model), **settings))

        for model in ("hybrid", "dense", "window"):
            server = make(model)
            out[model] = {"session": session(server), "ends": ends(server)}
        out["door"] = door(server)
        out["off"] = session(make("hybrid", apc=False), 2)
        out["disk"] = disk(make, folder)
        out["report"] = server.get(f"{PATH}?last=1000")
        out["lines"] = [line for line in LINES if "cacheplus: request=" in line]
    app = host.app_module.app
    out["routes"] = [PATH in paths(app)]
    mlx_vlm_cacheplus.deactivate()
    out["routes"].append(PATH in paths(app))
    print(json.dumps(out))


if __name__ == "__main__":
    main()
