"""What stored arrays depend on, named by its content.

Keys and values are right for one set of weights, one adapter, one way to compute and
one way to store them.  Where the files lie does not matter, nor how they are called,
nor the tokenizer or the template: these decide which token ids a prompt has, and paths
are found by their ids.

Weights are large, so they are read in two steps.  At start a *sample* of each file is
read: its header and the first bytes of each of its arrays.  The *whole* file is read
later, by another thread; a sample that turns out to stand for two different files is
not to be trusted, and what was stored under it goes.  Both are remembered for the file
as it is (device, inode, size, times), so that a file is read once.

>>> numerics({"rope_theta": 1e4, "_name_or_path": "here", "text": {"eos_token_id": 1}})
{'rope_theta': 10000.0, 'text': {}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from .disk_safetensors import parse_header, read_head

# Bytes that are sampled at the beginning of each array, and at each step through a
# file that has no header to tell them.
SAMPLE = 4096
STEP = 64 << 20
READ = 8 << 20
CONFIGS = ("config.json", "adapter_config.json", "preprocessor_config.json")
# What changes no number that the model computes for given token ids.
NOT_NUMERIC = frozenset(
    (
        *("_name_or_path", "name_or_path", "transformers_version", "chat_template"),
        *("architectures", "bos_token_id", "eos_token_id", "pad_token_id"),
        *("base_model_name_or_path", "tokenizer_class", "processor_class"),
    )
)

Recall = Callable[[str], "str | None"]


class Mismatch(Exception):
    """Two different files have one sample: what is stored under it is not to be used."""


@dataclass
class Fingerprint:
    """What a folder's weights are called.

    Attributes:
        name: the same for the same content, wherever it lies.
        facts: what to remember, for ``recall`` at the next start.
        unverified: files that were only sampled, with the name of each sample.
    """

    name: str
    facts: dict[str, str] = field(default_factory=dict)
    unverified: list[tuple[Path, str]] = field(default_factory=list)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's or an adapter's weights, links resolved."""
    found = sorted(folder.glob("*.safetensors"))
    return [Path(os.path.realpath(path)) for path in found]


def fingerprint(folders: Iterable[Path], recall: Recall) -> Fingerprint:
    """Name the weights and configuration of these folders, in this order.

    Args:
        recall: gives a fact that was remembered, or None.

    Raises:
        OSError: a file cannot be read, or a folder has no weights.
    """
    out = Fingerprint("")
    named: list[Any] = []
    for folder in folders:
        files = weight_files(folder)
        if not files:
            raise OSError(f"{folder} holds no safetensors files")
        named.append([_sampled(path, recall, out) for path in files])
        named.append([_config(folder / name) for name in CONFIGS])
    out.name = name_of(named)
    return out


def _sampled(path: Path, recall: Recall, out: Fingerprint) -> str:
    key = file_key(path)
    name = recall(f"sample {key}")
    if name is None:
        name = out.facts[f"sample {key}"] = sample(path)
    if recall(f"whole {key}") is None:
        out.unverified.append((path, name))
    return name


def verify(
    unverified: Iterable[tuple[Path, str]],
    recall: Recall,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, str]:
    """Read whole files that were sampled; returns what to remember.

    Raises:
        Mismatch: a sample stands for another file too.
        OSError: a file cannot be read.
    """
    facts: dict[str, str] = {}
    for path, name in unverified:
        key = file_key(path)
        content = whole(path, stopped)
        if content is None or file_key(path) != key:
            continue  # told to stop, or replaced meanwhile: another time
        known = facts.get(f"content {name}") or recall(f"content {name}")
        facts[f"content {name}"] = facts[f"whole {key}"] = content
        if known and known != content:
            raise Mismatch(name)
    return facts


def file_key(path: Path) -> str:
    """Names a file as it is now; anything that writes to it changes this."""
    found = os.stat(path)
    return (
        f"{found.st_dev}:{found.st_ino}:{found.st_size}:"
        f"{found.st_mtime_ns}:{found.st_ctime_ns}"
    )


def sample(path: Path) -> str:
    """A name by a file's length, header, and the first bytes of each of its arrays."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        head = read_head(file.read, size)
        digest.update(size.to_bytes(8, "little") + head)
        for place in _places(head, size):
            digest.update(os.pread(file.fileno(), SAMPLE, place))
    return digest.hexdigest()


def _places(head: bytes, size: int) -> list[int]:
    try:
        places = [array.start for array in parse_header(head, size).arrays.values()]
    except ValueError:
        places = []
    return sorted({*places, *range(0, size, STEP)})


def whole(path: Path, stopped: Callable[[], bool] = lambda: False) -> str | None:
    """A name by all bytes of a file; None where it was told to stop."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(READ):
            if stopped():
                return None
            digest.update(chunk)
    return digest.hexdigest()


def _config(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return numerics(json.loads(text))
    except ValueError:
        return text


def tokenizer_name(folder: Path) -> str:
    """Names what turns text into token ids, and back."""
    files = sorted(
        {*folder.glob("*token*"), *folder.glob("vocab*"), *folder.glob("*.txt")}
    )
    return name_of([(f.name, whole(f)) for f in files if f.is_file()])


def numerics(config: Any) -> Any:
    """A configuration without what changes no number."""
    if isinstance(config, dict):
        return {k: numerics(v) for k, v in config.items() if k not in NOT_NUMERIC}
    if isinstance(config, list):
        return [numerics(value) for value in config]
    return config


def name_of(parts: Any) -> str:
    """A short name for plain values; equal for equal values."""
    text = json.dumps(parts, sort_keys=True, default=str, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())
