"""A reply that comes back as text is read with the ids that the model chose."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_vlm.generate.output_tokens import OutputRow
from mlx_vlm.generate.reply_ids import note_ended_rows, respell_inputs

STOP = 9
PIECES = {
    1: "a",
    2: "b",
    3: "ab",
    4: "c",
    5: "\n",
    6: "user:",
    7: "model:",
    STOP: "<e>",
}


class Tokenizer:
    """Greedy, longest piece first: "ab" is one id, and a model may choose two."""

    stopping_criteria = SimpleNamespace(eos_token_ids=[STOP])

    def encode(self, text):
        ids = []
        while text:
            piece, token = max(
                ((p, t) for t, p in PIECES.items() if text.startswith(p)),
                key=lambda pair: len(pair[0]),
            )
            ids.append(token)
            text = text[len(piece) :]
        return ids

    def decode(self, ids, **kwargs):
        return "".join(PIECES[i] for i in ids)


@pytest.fixture
def server():
    return SimpleNamespace(apc_manager=SimpleNamespace(), tokenizer=Tokenizer())


def read(server, text, media=()):
    ids = server.tokenizer.encode(text)
    inputs = {
        "input_ids": mx.array([ids]),
        "attention_mask": mx.array([[1] * len(ids)]),
    }
    out = respell_inputs(server, text, inputs, media, None)
    assert out["attention_mask"].shape == out["input_ids"].shape
    return out["input_ids"].tolist()[0]


def write(server, prompt_ids, reply_ids, committed=True):
    ids = [*prompt_ids, *reply_ids]
    coordinator = SimpleNamespace(manager=server.apc_manager)
    row = OutputRow(coordinator, ids, len(prompt_ids), extra_hash=0)
    row.committed = len(ids) if committed else 0
    note_ended_rows([row])
    return ids


PROMPT = "user:c<e>model:"
NEXT = "ab<e>\nuser:ab<e>model:"


def test_returned_reply_keeps_the_ids_that_were_chosen(server):
    prompt = read(server, PROMPT)
    written = write(server, prompt, [1, 2, STOP])
    again = read(server, PROMPT + NEXT)
    assert again[: len(written)] == written
    # What the user wrote is tokenized as ever, though it is the same text.
    assert again[len(written) :] == server.tokenizer.encode("\nuser:ab<e>model:")
    assert server.tokenizer.decode(again) == PROMPT + NEXT


def test_reply_cut_before_its_stop_token(server):
    prompt = read(server, PROMPT)
    written = write(server, prompt, [1, 2])
    again = read(server, PROMPT + NEXT)
    assert again[: len(written) + 1] == [*written, STOP]


def test_changed_reply_is_tokenized_anew(server):
    prompt = read(server, PROMPT)
    write(server, prompt, [1, 2, STOP])
    text = PROMPT + "abc<e>\nuser:c<e>model:"
    assert read(server, text) == server.tokenizer.encode(text)


def test_reply_that_was_not_stored_is_not_remembered(server):
    prompt = read(server, PROMPT)
    write(server, prompt, [1, 2, STOP], committed=False)
    assert read(server, PROMPT + NEXT) == server.tokenizer.encode(PROMPT + NEXT)


def test_media_and_missing_cache_leave_the_inputs_alone(server):
    prompt = read(server, PROMPT)
    write(server, prompt, [1, 2, STOP])
    plain = server.tokenizer.encode(PROMPT + NEXT)
    assert read(server, PROMPT + NEXT, media=(["picture"],)) == plain
    server.apc_manager = None
    assert read(server, PROMPT + NEXT) == plain
