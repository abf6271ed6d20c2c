"""One byte-level tokenizer of 640 tokens, shared by all tiny models.

All 256 bytes are tokens, so any text survives the round trip. Keys, and values
with a leading space, are whole tokens through ``ignore_merges``: a word of the
split that is in the vocabulary is taken as it is, and only other words are put
together from merges. A new line is always a token of its own, so that a reply
put back into a history is cut exactly as it was written.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)

from .words import KEYS, VALUES, tokenizer_corpus

VOCAB_SIZE = 640
END, STOP = "<|im_end|>", "<|endoftext|>"

#: Control tokens, left out of decoded text.
SPECIAL: tuple[str, ...] = (
    STOP,
    "<|im_start|>",
    END,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|video|>",
)
#: Markers that belong to the text of a reply, so decoding keeps them.
MARKERS: tuple[str, ...] = ("<think>", "</think>", "<tool_call>", "</tool_call>")

# Words take one leading space with them; digits and new lines stand alone.
SPLIT = r"\n| ?\p{L}+|\d| ?[^\s\p{L}\d]+| +(?= )|\s"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _learn_merges(count: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Learn ``count`` merges from our own text; returns vocabulary and merges."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = _pre_tokenizer()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=256 + count, initial_alphabet=alphabet, show_progress=False
    )
    learner.train_from_iterator(tokenizer_corpus(), trainer)
    model = json.loads(learner.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return model["vocab"], merges


def build_tokenizer() -> Tokenizer:
    """Build the tokenizer; the same input always gives the same token ids."""
    whole = KEYS + ["\u0120" + value for value in VALUES]
    added = SPECIAL + MARKERS
    vocab, merges = _learn_merges(VOCAB_SIZE - 256 - len(whole) - len(added))
    for word in whole:
        vocab.setdefault(word, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False, special=t in SPECIAL) for t in added]
    )
    if tokenizer.get_vocab_size() > VOCAB_SIZE:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens, room for {VOCAB_SIZE}")
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write tokenizer.json, its configuration and the chat template to ``folder``."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": STOP,
        "additional_special_tokens": [t for t in SPECIAL if t not in (END, STOP)],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
