"""What the benchmark feeds its servers: models of real size, and the recorded session."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.gpu_server import CHAIN, RANDOM
from tests.fakes.models import model_dir

DENSE, HYBRID = "dense7b", "hybrid4b"
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    DENSE: (
        "hybrid",
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "vocab_size": 32768,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
        },
    ),
    HYBRID: (
        "hybrid",
        {
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "full_attention_interval": 4,
            "intermediate_size": 9216,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_value_heads": 32,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "vocab_size": 151936,
            "rope_parameters": {
                "type": "default",
                "mrope_section": [11, 11, 10],
                "rope_theta": 10000000.0,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
}
GEMMA: dict[str, Any] = {
    "hidden_size": 4096,
    "vocab_size": 32768,
    "text_config": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "global_head_dim": 128,
        "vocab_size": 32768,
        "vocab_size_per_layer_input": 32768,
        "layer_types": ["full_attention"] * 32,
    },
}
# The same with heads of 256, for which MLX's CUDA back-end makes no plan of each length.
WIDE = {"num_attention_heads": 16, "num_key_value_heads": 4}
WIDE |= {"head_dim": 256, "global_head_dim": 256}
GEMMA_WIDE = {**GEMMA, "text_config": {**GEMMA["text_config"], **WIDE}}
EAGLE3 = {
    "model_type": "eagle3",
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
}
# Target, its bundled model, what differs from that; then the drafter's own settings.
DRAFTED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma7b": ("dense", GEMMA, EAGLE3),
    "gemma7w": ("dense", GEMMA_WIDE, EAGLE3),
    HYBRID: ("hybrid", SHAPES[HYBRID][1], {"model_type": "qwen3_5_mtp"}),
}
# Settings that an EAGLE3 drafter's layer has from its target.
LAYER = {"hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"}
LAYER |= {"num_key_value_heads", "head_dim", "rms_norm_eps"}
WORDS = "amber fox yak sun river stone lamp north cedar quill mint harbor".split()


def make_model(shape: str, folder: Path, small: bool = False) -> Path:
    """A model folder whose weights ``gpu_server`` makes; tokenizer of a bundled one.

    ``small``: the folder of a bundled model of its kind.
    """
    if small:
        return model_dir("dense" if shape == DENSE else "hybrid")
    bundled, changes = SHAPES[shape]
    config = config_of(bundled)
    if changes.get("model_type", config["model_type"]) != config["model_type"]:
        ends = ("eos_token_id", "pad_token_id", "torch_dtype")
        config = {key: config[key] for key in ends}
    return write(folder, {**config, **changes}, bundled)


def config_of(bundled: str) -> dict[str, Any]:
    """A bundled model's settings."""
    text = (model_dir(bundled) / "config.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config


def write(folder: Path, config: dict[str, Any], bundled: str = "") -> Path:
    """Make a folder of random weights, with the tokenizer of a bundled model."""
    folder.mkdir(parents=True)
    for file in model_dir(bundled).iterdir() if bundled else ():
        if file.suffix in (".json", ".jinja") and file.name != "config.json":
            shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / RANDOM).touch()
    return folder


def make_drafted(
    shape: str, folder: Path, chain: dict[str, Any], small: bool
) -> tuple[Path, Path]:
    """Folders of a target that says the chain, and of its drafter; ``small``: tiny ones."""
    bundled, changes, settings = DRAFTED[shape]
    config = config_of(bundled)
    if not small:
        text = {**config.get("text_config", {}), **changes.get("text_config", {})}
        config |= {**changes, "text_config": text} if text else changes
    text = config.get("text_config") or config
    if settings["model_type"] == "eagle3":
        layer = {key: text[key] for key in sorted(LAYER)}
        if small:
            settings = {**settings, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
        settings = {**settings, "draft_vocab_size": text["vocab_size"]}
        settings["transformer_layer_config"] = {**layer, "num_hidden_layers": 1}
    else:
        settings = {**settings, "text_config": {**text, "mtp_num_hidden_layers": 1}}
        settings["tie_word_embeddings"] = True
    target = write(folder / "target", config, bundled)
    drafter = write(folder / "drafter", {**settings, "block_size": 4})
    (target / CHAIN).write_text(json.dumps(chain), encoding="utf-8")
    return target, drafter


@dataclass
class Plan:
    """The recorded session: what the client says and what the model answers.

    Attributes:
        system, users, replies: texts, measured in tokens of the bundled tokenizer.
    """

    system: str
    users: list[str]
    replies: list[str]

    def messages(self, marker: str, said: Sequence[str]) -> list[dict[str, str]]:
        """The request of the turn after these replies."""
        out = [{"role": "system", "content": f"[{marker}]\n{self.system}"}]
        for user, reply in zip(self.users, said, strict=False):
            out.append({"role": "user", "content": user})
            out.append({"role": "assistant", "content": reply})
        return [*out, {"role": "user", "content": self.users[len(said)]}]


def make_plan(turns: int, system: int, user: int, reply: int) -> Plan:
    """Texts of fixed length in tokens, from a fixed seed; ``reply`` counts its stop."""
    from tokenizers import Tokenizer

    file = str(model_dir("hybrid") / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    cost = {
        word: len(tokenizer.encode(f" {word}", add_special_tokens=False).ids)
        for word in WORDS
    }
    rng = random.Random(3)

    def text(tokens: int) -> str:
        words: list[str] = []
        while tokens > 0:
            words.append(rng.choice(WORDS))
            tokens -= cost[words[-1]]
        return " ".join(words)

    return Plan(
        text(system),
        [text(user) for _ in range(turns)],
        [text(reply - 1) for _ in range(turns)],
    )
