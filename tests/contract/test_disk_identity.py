"""The same content has the same name wherever it lies; other content has another."""

from __future__ import annotations

import doctest
import json
import os
import shutil

import pytest

from mlx_vlm_cacheplus.core import disk_identity
from mlx_vlm_cacheplus.core.disk_identity import (
    Mismatch,
    fingerprint,
    numerics,
    verify,
    weight_files,
)


def safetensors(arrays: dict[str, bytes]) -> bytes:
    header, place = {}, 0
    for name, data in arrays.items():
        end = place + len(data)
        header[name] = {
            "dtype": "U8",
            "shape": [len(data)],
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(arrays.values())


LARGE = bytes(range(256)) * 64
ARRAYS = {"a": LARGE, "b": LARGE[::-1]}
CONFIG = {"rope_theta": 10_000.0, "text_config": {"layers": 4, "eos_token_id": 3}}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(safetensors(ARRAYS))
    (folder / "model-2.safetensors").write_bytes(safetensors({"c": LARGE}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def name(*folders, facts=None):
    return fingerprint(folders, (facts or {}).get).name


def test_doctest():
    assert doctest.testmod(disk_identity).failed == 0


def test_what_stays_warm(model, tmp_path):
    before = name(model)
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    assert name(copy) == before
    for path in model.iterdir():
        os.utime(path)
    assert name(model) == before
    (model / "tokenizer.json").write_text('{"other": 1}')
    (model / "chat_template.jinja").write_text("another")
    config = {**CONFIG, "_name_or_path": "x", "transformers_version": "9"}
    (model / "config.json").write_text(json.dumps(config))
    assert name(model) == before


def replaced(path, arrays):
    path.write_bytes(safetensors(arrays))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: replaced(m / "model-2.safetensors", {"c": LARGE[::-1]}),
        lambda m: replaced(m / "model-1.safetensors", {**ARRAYS, "b": LARGE}),
        lambda m: replaced(m / "model-1.safetensors", {"b": ARRAYS["a"]}),
        lambda m: (m / "model-2.safetensors").unlink(),
        lambda m: (m / "config.json").write_text(
            json.dumps({**CONFIG, "rope_theta": 1.0})
        ),
    ],
    ids=["a shard", "an array", "other arrays", "a shard less", "rope"],
)
def test_what_is_another_model(model, change):
    before = name(model)
    change(model)
    assert name(model) != before


def test_an_adapter_counts(model, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    replaced(adapter / "adapters.safetensors", {"lora": LARGE})
    assert name(model, adapter) != name(model)


def test_a_link_that_points_elsewhere(model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    replaced(other / "model-2.safetensors", {"c": LARGE[::-1]})
    link = tmp_path / "snapshot"
    link.symlink_to(model)
    before = name(link)
    link.unlink()
    link.symlink_to(other)
    assert name(link) != before
    (model / "model-2.safetensors").unlink()
    (model / "model-2.safetensors").symlink_to(other / "model-2.safetensors")
    assert name(model) == name(other)


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(OSError, match="no safetensors"):
        name(tmp_path)


def test_a_file_is_read_once(model, monkeypatch):
    facts = {}
    first = fingerprint([model], facts.get)
    assert [path for path, _ in first.unverified] == weight_files(model)
    facts |= first.facts
    facts |= verify(first.unverified, facts.get)
    monkeypatch.setattr(disk_identity, "sample", None)
    monkeypatch.setattr(disk_identity, "whole", None)
    again = fingerprint([model], facts.get)
    assert (again.name, again.facts, again.unverified) == (first.name, {}, [])


def test_a_change_that_no_sample_shows_is_found_later(model):
    """Only a byte far from the beginning of its array differs."""
    facts = {}
    first = fingerprint([model], facts.get)
    facts |= first.facts | verify(first.unverified, facts.get)
    path = model / "model-2.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    second = fingerprint([model], facts.get)
    assert second.name == first.name
    with pytest.raises(Mismatch):
        verify(second.unverified, facts.get)


def test_a_sample_has_the_name_that_it_always_had(tmp_path):
    """Another one would make every stored path another model's."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors(ARRAYS))
    assert disk_identity.sample(path) == "11e672dc85629c54815f62b3c172c601"
    path.write_bytes(b"no header at all" * 999)
    assert disk_identity.sample(path) == "b5054bf881bf2cddf6afb4a3775a86b9"


def test_only_samples_are_read_at_the_start(tmp_path):
    """30 GB take as long as 1,000 arrays take: what is read is counted."""
    path = tmp_path / "model.safetensors"
    header = {
        str(n): {
            "dtype": "U8",
            "shape": [1 << 25],
            "data_offsets": [n << 25, n + 1 << 25],
        }
        for n in range(900)
    }
    text = json.dumps(header).encode()
    with open(path, "wb") as file:  # 30 GB with nothing in them
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + (900 << 25))
    read = []
    real = os.pread

    def pread(handle, size, place):
        read.append(size)
        return real(handle, size, place)

    os.pread = pread
    try:
        disk_identity.sample(path)
    finally:
        os.pread = real
    assert len(read) < 1400 and sum(read) < 8 << 20


def test_told_to_stop(model):
    found = fingerprint([model], {}.get)
    assert verify(found.unverified, {}.get, stopped=lambda: True) == {}


def test_numerics_keeps_lists_and_nests():
    assert numerics([{"a": [1, {"eos_token_id": 2, "b": 3}]}]) == [{"a": [1, {"b": 3}]}]
