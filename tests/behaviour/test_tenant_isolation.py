"""No tenant is ever served from what another has stored, and nobody is a tenant by mistake."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import mlx.core as mx
import pytest

from tests.behaviour.sessions import common
from tests.behaviour.stored import leases
from tests.fakes.replies import RequestFailed
from tests.fakes.server import system, user

pytestmark = pytest.mark.change("tenant-isolation")
guard = pytest.mark.guard

apc = importlib.import_module("mlx_vlm.apc")
vision = importlib.import_module("mlx_vlm.vision_cache")
generation = importlib.import_module("mlx_vlm.server.generation")

RULES = system("You look words up.\n" + "amber = fox yak sun\n" * 12)
ASK = [RULES, user("get: amber")]
ENDPOINTS = ["chat", "responses", "messages"]
SECRET = "s3cret" * 8
PROXY = {"X-APC-Proxy-Secret": SECRET}


def of(tenant, name="X-APC-Tenant"):
    return {name: tenant}


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET)
    return path


def refusal(ask, headers, **body):
    """Status and message of a request that must not be served."""
    try:
        ask(ASK, max_tokens=2, headers=headers, **body)
    except RequestFailed as failed:
        return failed.status, failed.text
    raise AssertionError(f"served with {headers}")


# -- a, b, a ---------------------------------------------------------------------------
@guard
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_c58_a_hit_is_the_tenants_own(make_server, endpoint, stream):
    server = make_server("hybrid", apc_checkpoint_entries=8)
    ask = getattr(server, endpoint)
    who = [of("a"), of("b"), of("a"), None, of("b", "X-Tenant-Id"), None]
    got = [ask(ASK, max_tokens=4, stream=stream, headers=h) for h in who]
    hits = [reply.cached_tokens > 0 for reply in got]
    assert hits == [False, False, True, False, True, True]
    assert all(reply.ids == got[0].ids for reply in got)
    server.wait_idle()
    assert leases(server.manager) == 0


@guard
def test_c60_children_share_what_is_their_owners(make_server):
    """Sub-agents with sessions of their own reuse rules and tools, within one tenant."""
    server = make_server("dense")
    secret = "the parent's own words"

    def ask(text, session, tenant):
        named = {"x-session-id": session, **of(tenant)}
        return server.chat([RULES, user(text)], max_tokens=4, headers=named)

    parent = ask(secret, "parent", "a")
    children = [ask(f"{i} child", f"child{i}", "a") for i in range(3)]
    for child in children:
        shared = common(child.prompt_ids, parent.prompt_ids)
        assert 0 < child.cached_tokens <= shared
    stranger = ask(secret, "parent", "b")
    assert stranger.cached_tokens == 0 and stranger.ids == parent.ids


@guard
@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_tenants_in_one_batch(make_server, model):
    server = make_server(model, apc_checkpoint_entries=8)
    first = server.chat(ASK, max_tokens=4, headers=of("a"))
    asks = [{"messages": ASK, "max_tokens": 4, "headers": of(t)} for t in "abc"]
    replies = server.together(asks)
    assert [reply.cached_tokens > 0 for reply in replies] == [True, False, False]
    assert all(reply.ids == first.ids for reply in replies)


# -- the salt --------------------------------------------------------------------------
def test_a_tenants_salt_cannot_be_computed_without_the_key(monkeypatch, secret_file):
    salts = set()
    for key in (None, secret_file, None):
        if key is None:
            monkeypatch.delenv("APC_TENANT_KEY_FILE", raising=False)
        else:
            monkeypatch.setenv("APC_TENANT_KEY_FILE", str(key))
        for payload in (0, 5):
            salt = apc.semantic_extra_hash(tenant="a", image_hash=payload)
            assert salt.bit_length() > 64
            salts.add(salt)
    assert len(salts) == 4
    assert apc.semantic_extra_hash(image_hash=5) == 5


# -- features of pictures --------------------------------------------------------------
class Embedding:
    """A model that embeds a picture as Qwen3.5 and Gemma 4 do: once, if it is known."""

    def __init__(self, language_model):
        self.language_model = language_model
        self.known = []

    def get_input_embeddings(self, ids, pixels, mask, vision_cache, _image_key):
        self.known.append(vision_cache.get(_image_key) is not None)
        vision_cache.put(_image_key, pixels)
        return self

    def to_dict(self):
        return {}


def test_features_of_pictures_are_a_tenants_own(make_server):
    """A picture that is embedded sooner tells that another has sent it."""
    model = Embedding(make_server("dense").language_model)
    server = SimpleNamespace(model=model, vision_cache=vision.VisionFeatureCache())
    raw = {"input_ids": mx.zeros((1, 4)), "pixel_values": mx.ones((2, 3))}
    for tenant in ("a", "b", None, "a", "b", None):
        salt = apc.semantic_extra_hash(tenant=tenant, image_hash=5)
        generation.ResponseGenerator._gpu_embed(server, dict(raw), ["a.png"], salt)
    assert model.known == [False] * 3 + [True] * 3


# -- who is refused --------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_no_tenant_by_mistake(make_server, endpoint, stream):
    server = make_server("dense")
    ask = getattr(server, endpoint)
    for name in ("X-APC-Tenant", "X-Tenant-Id"):
        for value in ("", "a b", "a,b", "x" * 129):
            status, text = refusal(ask, of(value, name), stream=stream)
            assert status == 400 and "must be sent once, with 1 to 128 visible" in text
    status, _ = refusal(ask, {**of("a"), **of("", "X-Tenant-Id")}, stream=stream)
    assert status == 400
    assert ask(ASK, max_tokens=2, stream=stream, headers=of("x" * 128)).text
    assert server.recorder.decode_calls, "what is sound is served"


def test_a_tenant_that_comes_twice_is_refused(make_server):
    server = make_server("dense")
    twice = [("X-APC-Tenant", "a"), ("X-APC-Tenant", "b")]
    assert refusal(server.chat, twice)[0] == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_only_the_proxys_header_counts(make_server, secret_file, endpoint, stream):
    server = make_server(
        "dense", env={"APC_TENANT_PROXY_SECRET_FILE": str(secret_file)}
    )
    ask = getattr(server, endpoint)
    for headers in (of("a"), {**of("a"), "X-APC-Proxy-Secret": SECRET[:-1]}):
        status, text = refusal(ask, headers, stream=stream)
        assert status == 403 and "Only the server's proxy" in text
    who = [{**PROXY, **of("a")}, {**PROXY, **of("b")}, {**PROXY, **of("a")}, None]
    got = [ask(ASK, max_tokens=2, stream=stream, headers=h) for h in who]
    assert [r.cached_tokens > 0 for r in got] == [False, False, True, False]


def test_the_proxys_own_header_wins_over_the_clients(make_server, secret_file):
    env = {
        "APC_TENANT_PROXY_SECRET_FILE": str(secret_file),
        "APC_TENANT_HEADER": "X-Scope-OrgID",
    }
    server = make_server("dense", env=env)

    def ask(theirs, mine):
        sent = {**PROXY, **of(theirs, "X-Scope-OrgID"), **of(mine)}
        return server.chat(ASK, max_tokens=2, headers=sent).cached_tokens > 0

    assert [ask("a", "x"), ask("b", "x"), ask("a", "y")] == [False, False, True]
    assert refusal(server.chat, of("x"))[0] == 403
    assert refusal(server.chat, {**PROXY, **of("x")})[0] == 400


@guard
def test_who_names_nobody_shares_with_nobodies(make_server, monkeypatch):
    server = make_server("dense")
    hits = []
    for default in (None, None, "team", "team", ""):
        monkeypatch.delenv("APC_DEFAULT_TENANT", raising=False)
        if default is not None:
            monkeypatch.setenv("APC_DEFAULT_TENANT", default)
        hits.append(server.chat(ASK, max_tokens=2).cached_tokens > 0)
    assert hits == [False, True, False, True, True]
