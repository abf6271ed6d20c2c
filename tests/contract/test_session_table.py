"""Whose a request is, how it says so, and what `mlx-vlm-cacheplus cache` prints."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from mlx_vlm_cacheplus import cli
from mlx_vlm_cacheplus.commands import cache
from mlx_vlm_cacheplus.core import session_identity as identity
from mlx_vlm_cacheplus.core.segment_tree import SegmentTree
from mlx_vlm_cacheplus.core.session_table import (
    MOST,
    MOST_PER_NODE,
    Request,
    Salt,
    Sessions,
    standing,
)
from tests.contract.test_eviction import Part


class Server:
    """A tree and the table of who writes into it."""

    def __init__(self):
        self.tree, self.sessions = SegmentTree(), Sessions()

    def ask(self, ids, name=None, tenant=None, plain=False):
        ids = tuple(ids)
        salt = 5 if plain else Salt.of(5, Request(name, tenant, len(ids)))
        self.sessions.asks(salt, lambda: self.tree.match(ids))
        # A look-up that is repeated counts once.
        if not plain:
            self.sessions.asks(salt, lambda: self.tree.match(ids))
        known = self.tree.match(ids).length
        if known < len(ids):
            self.tree.insert(ids, Part(len(ids) - known))
        node = self.tree.node_at(ids)
        self.sessions.stands(salt, node.path())
        self.tree.check_invariants()

    def known(self):
        return {s.id: s.requests for s in self.sessions.table.values()}


def test_a_name_that_comes_again_is_a_session():
    server = Server()
    server.ask((1, 2), "a")
    server.ask((1, 2, 3), "a")
    server.ask((9,), "a")
    assert server.known() == {"a": 3}


def test_children_that_go_on_with_a_named_parent_are_sessions_of_their_own():
    server = Server()
    server.ask((1, 2), "parent")
    server.ask((1, 2, 3), "parent")
    server.ask((1, 2, 3, 4), "child")
    assert server.known() == {"parent": 2, "child": 1}


def test_two_that_begin_alike_stay_two():
    server = Server()
    for ids in ((1, 2), (1, 2, 3)):
        for name in ("a", "b"):
            server.ask(ids, name)
    assert server.known() == {"a": 2, "b": 2}


def test_without_a_name_the_conversation_decides():
    server = Server()
    server.ask((1, 2))
    server.ask((1, 2, 3))
    server.ask((1, 8))
    assert list(server.known().values()) == [2, 1]
    assert all(name.startswith("lineage-") for name in server.known())


def test_a_rewritten_turn_belongs_to_the_same_session():
    server = Server()
    for ids in ((1, 2), (1, 2, 3, 4), (1, 2, 7, 8)):
        server.ask(ids)
    assert list(server.known().values()) == [3]


def test_a_tenant_cannot_take_over_a_session_by_its_name():
    server = Server()
    server.ask((1, 2), "a", tenant="one")
    server.ask((1, 2, 3), "a", tenant="two")
    assert [s.requests for s in server.sessions.table.values()] == [1, 1]


def test_outside_a_server_a_look_up_is_a_request():
    server = Server()
    server.ask((1, 2), plain=True)
    server.ask((1, 2, 3), plain=True)
    assert sum(server.known().values()) == 2


def test_a_thousand_random_names_do_not_grow_the_table():
    server = Server()
    server.ask((1, 2), "stays")
    server.ask((1, 2, 3), "stays")
    for number in range(1000):
        server.ask((1, 1000 + number), f"random {number}")
    assert len(server.sessions.table) == len(server.sessions._by_name) == MOST
    assert server.known()["stays"] == 2
    assert max(len(node.sessions) for node in server.tree) <= MOST_PER_NODE


def test_bytes_of_all_sessions_are_what_there_is():
    server = Server()
    server.ask((1, 2, 3), "a")
    server.ask((1, 2, 4, 5), "b")
    held = standing([server.tree], server.sessions.table)
    assert sum(row["bytes"] for row in held.values()) == server.tree.nbytes == 5
    assert [row["tokens"] for row in held.values()] == [3, 4]
    assert [row["shared"] for row in held.values()] == [2, 2]


# -- how a request says whose it is -----------------------------------------------------
def served(headers, chunks, identify=identity.identify):
    """The salt of a request that is sent in these parts."""
    found = []

    async def app(scope, receive, send):
        more = True
        while more:
            more = (await receive()).get("more_body")
        found.append(await asyncio.to_thread(identity.salted, 7, "tenant"))

    parts = [
        {"type": "http.request", "body": part, "more_body": n + 1 < len(chunks)}
        for n, part in enumerate(chunks)
    ]

    async def receive():
        return parts.pop(0)

    scope = {"type": "http", "method": "POST", "headers": headers}
    middleware = identity.RequestsNameTheirSession(app, identify)
    asyncio.run(middleware(scope, receive, None))
    return found[0]


def test_the_name_travels_with_the_salt():
    salt = served([(b"x-session-id", b" mine ")], [b"{}"])
    assert salt == 7 and salt.request.name == "mine"
    assert salt.request.tenant == "tenant"
    assert identity.salted(7, None) == 7 and type(identity.salted(7, None)) is int


def test_the_body_is_read_in_parts():
    assert served([], [b'{"session', b'_id": "x"}']).request.name == "x"


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff", b'{"session_id": 3}'])
def test_a_body_without_a_name_gives_none(body):
    assert served([], [body]).request.name is None


def test_a_long_body_is_not_looked_into(monkeypatch):
    monkeypatch.setattr(identity, "LONGEST_BODY", 8)
    assert served([], [b'{"session_id":', b' "x"}']).request.name is None


@pytest.mark.parametrize("sent", ["a" * 999, "a\x00b", "a\nb"])
def test_names_are_short_and_printable(sent):
    name = served([], [json.dumps({"session_id": sent}).encode()]).request.name
    assert name is None or len(name) == identity.LONGEST_NAME


def test_a_header_wins_and_the_body_is_left_alone():
    def explode(*_):
        raise AssertionError("the body was decoded")

    body = identity.Body()
    body._read = explode
    assert identity.identify({"x-hermes-session-id": "h"}, body) == "h"


# -- the command ------------------------------------------------------------------------
ROW = {
    "id": "main",
    "state": "live",
    "pinned": True,
    "tokens": 12,
    "bytes": 2048,
    "share": 0.5,
    "requests": 3,
    "hits": 2,
    "last_use": 0.0,
}
LIST = {
    "enabled": True,
    "bytes": 2048,
    "budget_bytes": 4096,
    "fair_share_bytes": 4096,
    "sessions": [ROW],
}


@pytest.fixture
def server():
    """An HTTP server that answers and remembers what it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size) or b"null")
            asked.append((self.path.rsplit("/", 1)[1], body))
            gone = body == {"session": "gone"}
            out = {"detail": "there is no session"} if gone else LIST
            self.send_response(404 if gone else 200)
            self.end_headers()
            self.wfile.write(json.dumps(out).encode())

        do_GET = do_POST = answer

        def log_message(self, *_):
            """Nothing on stderr."""

    http = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}", asked
    http.shutdown()
    http.server_close()


def test_the_command_lists_sessions(server, capsys):
    url, asked = server
    assert cli.main(["cache", "sessions", "--url", url]) == 0
    out = capsys.readouterr().out
    assert "main" in out and "2 KB" in out and "50.0 %" in out
    assert cli.main(["cache", "sessions", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == LIST
    assert asked == [("sessions", None)] * 2


def test_sessions_of_one_name_are_told_apart_by_their_tenants(monkeypatch, capsys):
    rows = [{**ROW, "tenant": "red"}, {**ROW, "tenant": None}]
    monkeypatch.setattr(cache, "_ask", lambda options: {**LIST, "sessions": rows})
    assert cli.main(["cache", "sessions"]) == 0
    lines = capsys.readouterr().out.splitlines()
    red, none = [line for line in lines if " main " in line]
    assert "red" in red and "red" not in none


def test_the_command_asks_for_changes(server, capsys):
    url, asked = server
    for words in (["pin", "a"], ["unpin", "a"], ["forget", "a"]):
        assert cli.main(["cache", *words, "--url", url]) == 0
    assert cli.main(["cache", "reset", "--scope", "all", "--url", url]) == 0
    assert asked == [
        ("pin", {"session": "a"}),
        ("unpin", {"session": "a"}),
        ("forget", {"session": "a"}),
        ("reset", {"scope": "all"}),
    ]
    assert "pin" in capsys.readouterr().out


def test_what_the_command_says_when_it_is_not_done(server, capsys):
    url, _ = server
    assert cli.main(["cache", "pin", "gone", "--url", url]) == 1
    assert "there is no session" in capsys.readouterr().err
    assert cli.main(["cache", "sessions", "--url", "http://127.0.0.1:9"]) == 1
    assert cli.main(["cache", "pin", "--url", url]) == 2
    assert cli.main(["cache", "reset", "main", "--url", url]) == 2


@pytest.mark.parametrize(
    "url", ["x", "file:///etc/hosts", "http://h:99999", "http://["]
)
def test_an_address_that_is_none_is_refused(url, capsys):
    with pytest.raises(SystemExit) as leaving:
        cli.main(["cache", "sessions", "--url", url])
    error = capsys.readouterr().err
    assert leaving.value.code == 2 and error.count("\n") == 1
    assert f"give an address such as http://127.0.0.1:8080, not {url!r}" in error


@pytest.mark.parametrize("key", ["schl\u00fcssel", "a\nb"])
def test_a_key_that_no_header_holds_is_refused(server, key, capsys):
    url, asked = server
    assert cli.main(["cache", "sessions", "--url", url, "--key", key]) == 2
    error = capsys.readouterr().err
    assert "--key" in error and key not in error and not asked
