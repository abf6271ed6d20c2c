"""A tenant's salt cannot be guessed, and a request is some tenant's or nobody's."""

import asyncio
import importlib
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_vlm import apc, vision_cache
from mlx_vlm.server import generation
from mlx_vlm.server.app import app
from mlx_vlm.tests.generation_fixtures import Run, make_manager, prompt_of, tiny_model

SECRET = "s3cret" * 8
# None of these is set unless a test sets it.
SETTINGS = (
    "APC_TENANT_KEY_FILE",
    "APC_TENANT_PROXY_SECRET_FILE",
    "APC_TENANT_HEADER",
)


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET)
    return str(path)


def post(path, *headers):
    """Status and body of the answer to an empty request."""
    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    scope = {"type": "http", "method": "POST", "path": path, "headers": raw}
    scope.update(
        raw_path=path.encode(), query_string=b"", root_path="", http_version="1.1"
    )
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent).decode()


PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
MALFORMED = "must be sent once, with 1 to 128 visible ASCII characters"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", ["", "a b", "a,b", "x" * 129])
def test_a_tenant_that_is_none_is_refused(path, value):
    for name in ("X-APC-Tenant", "X-Tenant-Id"):
        status, text = post(path, (name, value))
        assert status == 400 and MALFORMED in text
        status, text = post(path, (name, "a"), (name, "a"))
        assert status == 400 and MALFORMED in text
    # What is sound is refused for its empty body alone.
    assert MALFORMED not in post(path, ("X-APC-Tenant", "x" * 128))[1]


@pytest.mark.parametrize("path", PATHS)
def test_only_the_proxys_tenant_counts(monkeypatch, secret_file, path):
    monkeypatch.setenv("APC_TENANT_PROXY_SECRET_FILE", secret_file)
    tenant = ("X-APC-Tenant", "a")
    for sent in ([tenant], [tenant, ("X-APC-Proxy-Secret", "guess")]):
        assert post(path, *sent)[0] == 403
    assert post(path, tenant, ("X-APC-Proxy-Secret", SECRET))[0] != 403
    assert post(path)[0] != 403


def test_a_tenants_salt_needs_the_key(monkeypatch, secret_file):
    salts = {
        apc.semantic_extra_hash(tenant=tenant, image_hash=image)
        for tenant in ("a", "b")
        for image in (0, 5)
    }
    monkeypatch.setenv("APC_TENANT_KEY_FILE", secret_file)
    salts.add(apc.semantic_extra_hash(tenant="a"))
    assert len(salts) == 5
    assert all(64 < salt.bit_length() <= 256 for salt in salts)
    assert apc.semantic_extra_hash(image_hash=5) == 5


class Embedding:
    def __init__(self):
        self.known = []

    def get_input_embeddings(self, ids, pixels, mask, vision_cache, _image_key):
        self.known.append(vision_cache.get(_image_key) is not None)
        vision_cache.put(_image_key, pixels)
        return self

    def to_dict(self):
        return {}


def test_features_of_pictures_are_a_tenants_own():
    model = Embedding()
    server = SimpleNamespace(
        model=model, vision_cache=vision_cache.VisionFeatureCache()
    )
    raw = {"input_ids": mx.zeros((1, 4)), "pixel_values": mx.ones((2, 3))}
    for tenant in ("a", "b", None, "a", "b", None):
        salt = apc.semantic_extra_hash(tenant=tenant, image_hash=5)
        generation.ResponseGenerator._gpu_embed(server, dict(raw), ["a.png"], salt)
    assert model.known == [False] * 3 + [True] * 3


@pytest.mark.parametrize("other", [5 + 2**61 - 1, 5 + 2**64, 5 + 2**255])
def test_a_prompt_is_found_under_its_whole_salt(other):
    model, manager, prompt = tiny_model("dense"), make_manager(), prompt_of(40, 1)
    run = Run(model, manager)
    found = [run.ask(prompt, salt=salt)[1] for salt in (5, other, 5, other)]
    assert found[:2] == [[0], [0]]
    assert min(found[2:]) >= [32]


def test_a_server_that_cannot_keep_its_promise_does_not_start(monkeypatch):
    headers = importlib.import_module("mlx_vlm.server.tenant_headers")
    for name in SETTINGS:
        monkeypatch.setenv(name, "/nowhere at all")
        with pytest.raises(ValueError, match=name):
            headers.check_settings()
        monkeypatch.delenv(name)
