"""A warm row that is alone has the caches of a cold one, and is decoded as one."""

from __future__ import annotations

import importlib

import pytest

from tests.behaviour.test_rejoin import records
from tests.fakes.oracle import Oracle, make_drafter
from tests.fakes.server import user

change = pytest.mark.change("warm-single-row")
MODELS = ["dense", "hybrid", "window"]
TOKENS = 24

ar = importlib.import_module("mlx_vlm.generate.ar")
caches = importlib.import_module("mlx_vlm.models.cache")
LAYERS = (
    caches.KVCache,
    caches.BatchKVCache,
    caches.RotatingKVCache,
    caches.BatchRotatingKVCache,
    caches.ArraysCache,
)


class Decoding:
    """What decode steps do to the caches, since ``clear``.

    types: of the layers of each batch whose prompts were read, by their lengths.
    copied: bytes of layers that were put together from rows.
    taken: how often a row was taken out of a layer.
    growths: how often a layer got a larger buffer.
    """

    def __init__(self, monkeypatch):
        self.types, self.reading = {}, 0
        self.clear()
        batch = ar.PromptProcessingBatch
        self._wrap(monkeypatch, batch, "prompt_step", self._read)
        self._wrap(monkeypatch, batch, "generate", self._read)
        self._wrap(monkeypatch, batch, "generate", self._noted)
        for layer in LAYERS:
            for name, make in (
                ("merge", self._merged),
                ("extract", self._taken),
                ("update_and_fetch", self._updated),
            ):
                if name in vars(layer):
                    self._wrap(monkeypatch, layer, name, make)

    def clear(self):
        self.copied = self.taken = self.growths = 0

    def of(self, reply):
        """The types of layers that a reply's row had when it was alone; None if not."""
        return self.types.get((len(reply.prompt_ids),))

    def _wrap(self, monkeypatch, owner, name, make):
        held = vars(owner)[name]
        if isinstance(held, classmethod):
            monkeypatch.setattr(owner, name, classmethod(make(held.__func__)))
        else:
            monkeypatch.setattr(owner, name, make(held))

    def _read(self, original):
        def read(*args, **kwargs):
            self.reading += 1
            try:
                return original(*args, **kwargs)
            finally:
                self.reading -= 1

        return read

    def _noted(self, original):
        def generate(batch, *args, **kwargs):
            lengths = tuple(batch._prompt_tokens_per_row)
            self.types[lengths] = [type(layer) for layer in batch.prompt_cache]
            return original(batch, *args, **kwargs)

        return generate

    def _merged(self, original):
        def merge(*args, **kwargs):
            layer = original(*args, **kwargs)
            if not self.reading:
                self.copied += sum(a.nbytes for a in layer.state if a is not None)
            return layer

        return merge

    def _taken(self, original):
        def extract(*args, **kwargs):
            self.taken += not self.reading
            return original(*args, **kwargs)

        return extract

    def _updated(self, original):
        def update(layer, *args, **kwargs):
            before = 0 if layer.keys is None else layer.keys.shape[2]
            out = original(layer, *args, **kwargs)
            self.growths += not self.reading and layer.keys.shape[2] != before
            return out

        return update


@pytest.fixture
def decoding(monkeypatch):
    return Decoding(monkeypatch)


def ask(server, lines=14, **body):
    """A prompt of its own, cold; and its conversation's next turn, warm."""
    asked = [records(lines), user("get: amber3")]
    first = server.chat(asked, max_tokens=TOKENS, **body)
    asked += [first.message(), user("dump")]
    return asked, first


@change
@pytest.mark.parametrize("model", MODELS)
def test_the_caches_are_those_of_a_cold_row(make_server, decoding, model):
    server = make_server(model)
    asked, cold = ask(server)
    warm = server.chat(asked, max_tokens=TOKENS)
    assert cold.cached_tokens == 0 < warm.cached_tokens
    assert decoding.of(warm) == decoding.of(cold) is not None
    server.assert_cold(warm)


@change
def test_no_token_copies_the_cache(make_server, decoding):
    """The model takes a single row out of batch caches, and puts it back."""
    server = make_server("hybrid")
    asked, cold = ask(server)
    spent = decoding.copied, decoding.taken, decoding.growths
    decoding.clear()
    warm = server.chat(asked, script=[5] * TOKENS, max_tokens=TOKENS)
    assert warm.cached_tokens and len(warm.ids) == TOKENS
    assert decoding.copied == 0
    # The row leaves its layers once, when the reply has ended.
    layers = len(decoding.of(cold))
    assert max(spent[1], decoding.taken) <= layers
    assert decoding.growths <= spent[2] + layers


@pytest.mark.guard
@pytest.mark.parametrize("model", MODELS)
def test_others_join_it_and_leave_it(make_server, model):
    server = make_server(model)
    asked, _ = ask(server)
    other = [user(f"{records(5)['content']}\nget: amber2")]
    replies = server.staggered(
        [
            (0, {"messages": asked, "script": [5] * TOKENS, "max_tokens": TOKENS}),
            (4, {"messages": other, "max_tokens": 6}),
        ]
    )
    assert replies[0].cached_tokens > 0 and len(replies[0].ids) == TOKENS
    server.assert_cold(replies[1])
    again = server.chat(asked, max_tokens=TOKENS)
    server.assert_cold(again)


@pytest.mark.guard
@pytest.mark.parametrize("model", MODELS)
def test_two_warm_rows_have_batch_caches(make_server, decoding, model):
    server = make_server(model)
    asked, _ = ask(server)
    request = {"messages": asked, "max_tokens": 8}
    replies = server.together([request, request])
    assert all(reply.cached_tokens > 0 for reply in replies)
    for reply in replies:
        server.assert_cold(reply)


@pytest.mark.guard
def test_with_a_draft_model_it_is_as_cold_rows_are(make_server, decoding, tmp_path):
    drafter = make_drafter(tmp_path / "mtp")
    server = make_server("hybrid", draft_model=drafter)
    Oracle([], 0).install(server.generator.draft_model)
    asked, cold = ask(server)
    warm = server.chat(asked, max_tokens=TOKENS)
    assert cold.cached_tokens == 0 < warm.cached_tokens
    assert decoding.of(warm) == decoding.of(cold) is not None
    server.assert_cold(warm)


@pytest.mark.guard
def test_with_a_quantized_cache_it_is_as_cold_rows_are(make_server, decoding):
    server = make_server("dense", kv_bits=8, kv_group_size=32)
    asked, cold = ask(server)
    warm = server.chat(asked, max_tokens=TOKENS)
    assert cold.cached_tokens == 0 < warm.cached_tokens
    assert decoding.of(warm) == decoding.of(cold) is not None
