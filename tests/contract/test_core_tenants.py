"""core/tenant_salt.py and core/tenant_headers.py: what a salt is, and who may name a tenant."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mlx_vlm_cacheplus.changes.tenant_isolation import block_name
from mlx_vlm_cacheplus.core import tenant_headers as headers
from mlx_vlm_cacheplus.core import tenant_salt as core
from mlx_vlm_cacheplus.core.session_table import Request as Asking
from mlx_vlm_cacheplus.core.session_table import Salt

from .stock import run_python

SECRET = "f" * 64


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in headers.SETTINGS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    return str(path)


# -- the salt --------------------------------------------------------------------------
def test_no_tenant_is_the_payload_as_it_was():
    for payload in (0, 5, -(1 << 63), (1 << 63) - 1):
        assert core.tenant_salt(None, payload) == payload
        assert core.tenant_salt("", payload) == payload


def test_tenant_and_payload_are_both_in_the_salt():
    names = ("a", "b", "a ", "aa", "", "ä")
    payloads = (0, 1, -1, -2, 1 << 62, -(1 << 63))
    salts = {core.tenant_salt(n, p) for n, p in itertools.product(names, payloads)}
    assert len(salts) == len(names) * len(payloads)
    assert core.tenant_salt("a", 5) == core.tenant_salt("a", 5)


def test_a_tenants_salt_has_256_bits():
    """All bits vary, and none of them fits where the salts of nobody's requests are."""
    salts = [core.tenant_salt(f"t{i}", 0) for i in range(64)]
    union = 0
    for salt in salts:
        union |= salt
        assert 64 < salt.bit_length() <= 256
    assert union == (1 << 256) - 1


def test_a_salt_is_the_same_wherever_the_key_is(secret_file):
    code = (
        "from mlx_vlm_cacheplus.core.tenant_salt import tenant_salt\n"
        "print(tenant_salt('a', 5))"
    )
    root = str(Path(core.__file__).parents[2])
    keyed = {core.KEY_FILE: secret_file}
    with_key = [run_python("-c", code, PYTHONPATH=root, **keyed) for _ in "12"]
    without = [run_python("-c", code, PYTHONPATH=root) for _ in "12"]
    for one in (*with_key, *without):
        assert one.returncode == 0, one.stderr
    assert with_key[0].stdout == with_key[1].stdout
    assert len({with_key[0].stdout, *(one.stdout for one in without)}) == 3


def test_a_stored_root_stays_what_it_was(monkeypatch, secret_file):
    """Change this value, and nothing that tenants have on disk is found again."""
    monkeypatch.setenv(core.KEY_FILE, secret_file)
    assert f"{core.tenant_salt('acme', 5):064x}" == KNOWN


KNOWN = "f547f852a2935c312baaaa5243b297fb79c85993c42c22e7a03fa687a1a49a18"


def test_another_key_is_another_salt(monkeypatch, tmp_path):
    salts = set()
    for number in range(3):
        path = tmp_path / str(number)
        path.write_bytes(bytes([65 + number]) * 32)
        monkeypatch.setenv(core.KEY_FILE, str(path))
        salts.add(core.tenant_salt("a", 5))
    assert len(salts) == 3


def test_a_key_must_be_a_secret(tmp_path):
    short = tmp_path / "short"
    short.write_bytes(b"x" * 31 + b"\n\n")
    for path, reason in ((short, "fewer than 32"), (tmp_path / "none", "No such file")):
        with pytest.raises(ValueError, match=reason):
            core.read_secret(str(path))
    with pytest.raises(ValueError, match="cannot be read"):
        core.read_secret("")


def test_a_session_salt_is_a_tenants_as_well():
    own = Salt.of(core.tenant_salt("a", 5), Asking("s", "a"))
    with core.pictures_of(own):
        marked = core.picture_key("k")
    with core.pictures_of(core.tenant_salt("a", 5)):
        assert core.picture_key("k") == marked != "k"
    for nobody in (None, 0, -1, (1 << 63) - 1):
        with core.pictures_of(nobody):
            assert core.picture_key("k") == "k"
    assert core.picture_key("k") == "k"


# -- blocks of stock's pool ------------------------------------------------------------
def test_a_block_is_named_by_all_before_it_and_its_salt():
    """hash() keeps 61 bits of an integer, and takes -1 for -2."""
    modulus = (1 << 61) - 1
    for one, two in ((5, 5 + modulus), (-1, -2), (0, modulus)):
        assert hash((0, (1, 2), one)) == hash((0, (1, 2), two))
        assert block_name(0, (1, 2), one) != block_name(0, (1, 2), two)
        assert block_name(one, (1, 2), 0) != block_name(two, (1, 2), 0)
    assert block_name(0, (1, 2), 5) == block_name(0, (1, 2), 5)
    top = (1 << 256) - 1
    assert block_name(top, (1, 2), top) != block_name(-1, (1, 2), -1)


# -- who may name a tenant -------------------------------------------------------------
async def echo(request: Request) -> JSONResponse:
    return JSONResponse({name: request.headers.getlist(name) for name in SEEN})


SEEN = ("x-apc-tenant", "x-tenant-id", "x-scope-orgid", "x-apc-proxy-secret")
APP = Starlette(
    routes=[Route("/", echo, methods=["GET", "POST"])],
    middleware=[Middleware(headers.TenantsAreNamedAsAgreed)],
)


def ask(*sent, method="POST"):
    """Status, and what the application sees, or the refusal's body."""
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in sent]
    scope = {"type": "http", "method": method, "path": "/", "headers": raw}
    scope.update(query_string=b"", root_path="", http_version="1.1")
    got = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        got.append(message)

    asyncio.run(APP(scope, receive, send))
    return got[0]["status"], json.loads(got[1]["body"])


def tenant_of(*sent):
    status, seen = ask(*sent)
    assert status == 200, seen
    assert seen["x-tenant-id"] == seen["x-apc-proxy-secret"] == []
    return (seen["x-apc-tenant"] or [None])[0]


def refused(*sent):
    status, body = ask(*sent)
    assert status != 200
    # Where clients of each protocol look for it.
    assert body["detail"] == body["error"]["message"] and body["type"] == "error"
    return status, body["detail"]


def test_who_names_nobody_is_served():
    assert tenant_of() is None
    assert ask(method="GET")[0] == 200


def test_the_first_header_counts():
    assert tenant_of(("X-APC-Tenant", "a")) == "a"
    assert tenant_of(("x-tenant-id", "b")) == "b"
    assert tenant_of(("X-Tenant-Id", "b"), ("X-APC-Tenant", "a")) == "a"


GOOD = ("a", "Acme-1.2_3", "arn:aws:iam::1:user/x", "me@example.org", "x" * 128, "!~")
BAD = ("", " ", "a b", "a,b", "x" * 129, "\xe4", "a\tb", "\x00", "a\x7f")


@pytest.mark.parametrize("value", GOOD)
def test_names_that_are_taken(value):
    assert tenant_of(("x-apc-tenant", value)) == value


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", headers.HEADERS)
def test_names_that_are_refused(name, value):
    status, message = refused((name, value))
    assert status == 400 and message.startswith(f"{name} must be sent once")
    assert value.strip() == "" or value not in message, "nothing is echoed"


def test_a_header_that_comes_twice_is_refused():
    for name in headers.HEADERS:
        assert refused((name, "a"), (name, "a"))[0] == 400
    assert refused(("x-apc-tenant", "a"), ("x-tenant-id", ""))[0] == 400


def test_another_header_can_name_the_tenant(monkeypatch):
    monkeypatch.setenv(headers.HEADER_NAME, "X-Scope-OrgID")
    assert tenant_of(("x-scope-orgid", "a")) == "a"
    # What a client sent beside it does not count, whatever it is.
    assert tenant_of(("x-scope-orgid", "a"), ("x-apc-tenant", "b c")) == "a"
    status, message = refused(("x-apc-tenant", "b"))
    assert status == 400 and "x-scope-orgid does" in message


class TestProxy:
    """The secret decides, and nothing else does."""

    @pytest.fixture(autouse=True)
    def with_secret(self, monkeypatch, secret_file):
        monkeypatch.setenv(headers.PROXY_SECRET_FILE, secret_file)

    def test_a_tenant_counts_with_the_secret_alone(self):
        secret = ("X-APC-Proxy-Secret", SECRET)
        assert tenant_of(secret, ("x-apc-tenant", "a")) == "a"
        assert tenant_of(secret) is None
        assert tenant_of() is None
        for wrong in (
            [],
            [("x-apc-proxy-secret", "")],
            [("x-apc-proxy-secret", SECRET[:-1])],
            [secret, secret],
            [("x-apc-proxy-secret", "\xe4")],
        ):
            for name in headers.HEADERS:
                status, message = refused(*wrong, (name, "a"))
                assert status == 403 and "proxy" in message
            assert not wrong or refused(*wrong)[0] == 403

    def test_a_malformed_name_is_malformed_from_the_proxy_too(self):
        secret = ("x-apc-proxy-secret", SECRET)
        assert refused(secret, ("x-apc-tenant", ""))[0] == 400
        assert refused(secret, ("x-apc-tenant", "a"), ("x-apc-tenant", "b"))[0] == 400

    def test_a_header_that_the_proxy_passes_on_does_not_count(self):
        own, secret = ("x-tenant-id", "victim"), ("x-apc-proxy-secret", SECRET)
        status, message = refused(secret, own)
        assert status == 400 and "x-apc-tenant does" in message
        assert tenant_of(secret, own, ("x-apc-tenant", "a")) == "a"

    def test_the_trusted_header_wins(self, monkeypatch):
        monkeypatch.setenv(headers.HEADER_NAME, "x-scope-orgid")
        own, secret = ("x-apc-tenant", "mine"), ("x-apc-proxy-secret", SECRET)
        assert tenant_of(own, secret, ("x-scope-orgid", "theirs")) == "theirs"
        assert refused(own, ("x-scope-orgid", "theirs"))[0] == 403
        assert refused(own)[0] == 403
        assert refused(own, secret)[0] == 400


@pytest.mark.parametrize(
    "name, value",
    [
        (headers.HEADER_NAME, "two words"),
        (headers.HEADER_NAME, ""),
        (headers.PROXY_SECRET_FILE, "/nowhere"),
        (core.KEY_FILE, "/nowhere"),
    ],
)
def test_settings_that_cannot_be(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name):
        headers.check_settings()


@pytest.mark.parametrize("content", [b"\xff" * 40, b"a" * 40 + b"\n" + b"b" * 40])
def test_a_proxys_secret_fits_into_a_header(monkeypatch, tmp_path, content):
    path = tmp_path / "secret"
    path.write_bytes(content)
    monkeypatch.setenv(headers.PROXY_SECRET_FILE, str(path))
    with pytest.raises(ValueError, match="PROXY_SECRET_FILE: the secret is not one"):
        headers.check_settings()
    monkeypatch.delenv(headers.PROXY_SECRET_FILE)
    monkeypatch.setenv(headers.HEADER_NAME, "X-APC-Proxy-Secret")
    with pytest.raises(ValueError, match="brings the proxy's secret"):
        headers.check_settings()


def test_settings_that_can_be(monkeypatch, secret_file):
    """They pass, and what they say holds."""
    headers.check_settings()
    assert tenant_of(("x-apc-tenant", "acme")) == "acme"
    monkeypatch.setenv(headers.HEADER_NAME, "X-Scope-OrgID")
    monkeypatch.setenv(headers.PROXY_SECRET_FILE, secret_file)
    monkeypatch.setenv(core.KEY_FILE, secret_file)
    headers.check_settings()
    sent, secret = ("x-scope-orgid", "acme"), ("x-apc-proxy-secret", SECRET)
    assert tenant_of(sent, secret) == "acme"
    assert refused(sent)[0] == 403
    assert f"{core.tenant_salt('acme', 5):064x}" == KNOWN


def test_other_connections_pass():
    passed = []

    async def app(scope, receive, send):
        passed.append(scope)

    scope = {"type": "lifespan"}
    asyncio.run(headers.TenantsAreNamedAsAgreed(app)(scope, None, None))
    assert passed == [scope]


# -- stock's pool ----------------------------------------------------------------------
def test_stocks_pool_compares_ids_and_salt(monkeypatch):
    """Without the tree: salts that hash() takes for one, and low halves that are the same."""
    apc = pytest.importorskip("mlx_vlm.apc")
    mx = pytest.importorskip("mlx.core")
    if not hasattr(apc, "_hash_tokens"):
        pytest.skip("this stock has no pool of blocks")
    ids = list(range(32))
    layers = [mx.zeros((1, 1, 32, 4))]
    own = core.tenant_salt("a", 0)
    others = (own + (1 << 61) - 1, own ^ (1 << 200), own & (1 << 64) - 1, 0)

    def found():
        manager = apc.APCManager(num_blocks=8, block_size=16, disk=None)
        manager.release(manager.store_kv_blocks(ids, layers, layers, extra_hash=own))
        return [
            manager.lookup_prefix(prompt, extra_hash=salt)[1]
            for prompt, salt in (
                (ids, own),
                *((ids, other) for other in others),
                ([99, *ids[1:]], own),
                ([*ids[:20], 99, *ids[21:]], own),
            )
        ]

    assert found()[1] == 32, "stock takes the first of the others for the tenant's own"
    monkeypatch.setattr(apc, "_hash_tokens", block_name)
    assert found() == [32, 0, 0, 0, 0, 0, 16]
