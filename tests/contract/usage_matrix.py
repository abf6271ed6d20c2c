"""What every endpoint says of cached tokens, beside the tokens that were really forwarded.

Run as a program, in a process of its own: one JSON list of rows. `--plain` leaves the plugin off, which shows stock.
"""

from __future__ import annotations

import json
import sys
from typing import Any

ENDPOINTS = ("chat", "responses", "messages")
MODELS = ("dense", "hybrid")
HEAD = "copy: fox yak one two three four five six seven eight nine ten eleven twelve"


def usages(raw: Any) -> list[dict[str, Any]]:
    """Every usage object of a reply, as sent."""
    events = raw if isinstance(raw, list) else [raw]
    found = []
    for event in events:
        for holder in (event, event.get("message"), event.get("response")):
            if isinstance(holder, dict) and holder.get("usage"):
                found.append(holder["usage"])
    return found


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def row(
    model: str, endpoint: str, stream: bool, kind: str, reply: Any
) -> dict[str, Any]:
    return {
        "model": model,
        "endpoint": endpoint,
        "stream": stream,
        "kind": kind,
        "ids": len(reply.prompt_ids),
        "prompt": reply.prompt_tokens,
        "cached": reply.cached_tokens,
        "forwarded": reply.prefilled,
        "usages": usages(reply.raw),
    }


def rows_of(server: Any, model: str) -> list[dict[str, Any]]:
    """Cold, an exact repeat, the next turn, and a turn that is answered by a stop token alone."""
    rows = []
    for endpoint in ENDPOINTS:
        for stream in (False, True):
            server.clear_cache()
            ask = getattr(server, endpoint)
            talk, said = [user(HEAD)], ""
            for kind in ("cold", "full", "turn", "empty"):
                if kind in ("turn", "empty"):
                    answer = {"role": "assistant", "content": said or "lion"}
                    talk = [*talk, answer, user("and then")]
                script = [] if kind == "empty" else None
                reply = ask(talk, max_tokens=6, stream=stream, script=script)
                said = reply.text
                rows.append(row(model, endpoint, stream, kind, reply))
    return rows


def repeats_of(server: Any, model: str) -> list[dict[str, Any]]:
    """Exact repeats around a whole number of blocks, and of the shortest prompt."""

    def repeat(text: str) -> dict[str, Any]:
        server.clear_cache()
        for _ in range(2):
            reply = server.chat([user(text)], max_tokens=1)
        return row(model, "chat", False, "repeat", reply)

    def words(count: int) -> str:
        return "copy:" + " fox" * count

    # A word is a token here.
    short = repeat(words(10))
    whole = 10 + (-short["ids"]) % 16
    return [repeat("a"), short, *(repeat(words(whole + n)) for n in (-1, 0, 1))]


def main() -> None:
    if "--plain" not in sys.argv:
        import mlx_vlm_cacheplus

        mlx_vlm_cacheplus.activate()
    from tests.fakes.host import Settings, resolve_model, serving
    from tests.fakes.server import TinyServer

    rows: list[dict[str, Any]] = []
    with serving() as host:
        for model in MODELS:
            settings = Settings(resolve_model(model), apc_checkpoint_entries=8)
            server = TinyServer(host, settings)
            rows += rows_of(server, model) + repeats_of(server, model)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
