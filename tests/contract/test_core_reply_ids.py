"""A reply's ids found again by its text; the tokenizer is a fake of one letter a token, with two pairs that merge."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_vlm_cacheplus.core import reply_ids as core

END, OTHER_END = 1, 2
SPECIAL = {"<end>": END, "<eot>": OTHER_END}
MERGED = {"ab": 900, "cd": 901}
STOPS = [END, OTHER_END]


class Tokenizer:
    """Splits at special tokens, merges pairs, else one id a character."""

    stopping_criteria = SimpleNamespace(eos_token_ids=STOPS)

    def encode(self, text):
        ids, i = [], 0
        while i < len(text):
            for piece, token in {**SPECIAL, **MERGED}.items():
                if text.startswith(piece, i):
                    ids.append(token)
                    i += len(piece)
                    break
            else:
                ids.append(ord(text[i]))
                i += 1
        return ids

    def decode(self, ids, **_):
        names = {v: k for k, v in {**SPECIAL, **MERGED}.items()}
        return "".join(names.get(i) or chr(i) for i in ids)


TOKENIZER = Tokenizer()
PROMPT = "say:"
# The model wrote "abab" letter by letter, which the tokenizer never does.
ODD = [ord(c) for c in "abab"]


def spell(store, text, stops=STOPS):
    ids = store.spell(text, TOKENIZER.encode(text), TOKENIZER, stops, None)
    assert TOKENIZER.decode(ids) == text
    return ids


def remember(store, prompt=PROMPT, reply=(*ODD, END)):
    ids = TOKENIZER.encode(prompt)
    store.note_prompt(prompt, ids, None)
    store.note_reply([*ids, *reply], len(ids))
    return [*ids, *reply]


@pytest.fixture
def store():
    return core.ReplyIds()


def test_the_models_own_ids_stand_for_its_text(store):
    known = remember(store)
    text = PROMPT + "abab<end>" + "and cd"
    assert spell(store, text) == [*known, *TOKENIZER.encode("and cd")]


@pytest.mark.parametrize(
    "text",
    [
        PROMPT + "abac<end>and",
        PROMPT + "ababx<end>and",
        PROMPT + "aba",
        PROMPT + "abab",
        "Say:abab<end>and",
        "",
    ],
    ids=["edited", "longer", "shorter", "no end", "other prompt", "empty"],
)
def test_any_other_text_keeps_its_own_tokenization(store, text):
    remember(store)
    assert spell(store, text) == TOKENIZER.encode(text)


def test_a_reply_cut_by_its_budget_is_spelled_too(store):
    known = remember(store, reply=ODD)
    assert spell(store, PROMPT + "abab<end>x") == [*known, END, ord("x")]


def test_a_reply_that_another_stop_token_ended(store):
    """The template writes its own stop token; the emitted one is not in the text."""
    known = remember(store, reply=[*ODD, OTHER_END])
    assert spell(store, PROMPT + "abab<end>x") == [*known[:-1], END, ord("x")]


def test_a_stop_token_that_the_template_repeats_is_kept(store):
    known = remember(store, reply=[*ODD, OTHER_END])
    assert spell(store, PROMPT + "abab<eot>x") == [*known, ord("x")]


@pytest.mark.parametrize("tail", ["x", "a <end> b", "<end><end>", "cd<eot>ab<end>"])
@pytest.mark.parametrize("prompt", [PROMPT, "one <end> two <end>:", "<end>"])
def test_stop_tokens_in_user_text_are_counted(store, prompt, tail):
    known = remember(store, prompt)
    text = prompt + "abab<end>" + tail
    assert spell(store, text) == [*known, *TOKENIZER.encode(tail)]


def test_a_stop_token_that_is_text_to_the_tokenizer_changes_nothing(store):
    """Ids and text disagree on how many there are: where the reply ends is unknown."""
    remember(store)
    text = PROMPT + "abab<end>x"
    plain = [ord(c) for c in text]
    assert store.spell(text, plain, TOKENIZER, STOPS, None) == plain


def test_the_longest_known_conversation_wins(store):
    first = remember(store)
    second = remember(
        store, PROMPT + "abab<end>more:", [*(ord(c) for c in "cdcd"), END]
    )
    assert spell(store, PROMPT + "abab<end>more:cdcd<end>z") == [*second, ord("z")]
    other = spell(store, PROMPT + "abab<end>else")
    assert other == [*first, *TOKENIZER.encode("else")]


def test_a_reply_to_an_unknown_prompt_is_not_noted(store):
    store.note_reply([5, 6, 7], 2)
    assert spell(store, PROMPT) == TOKENIZER.encode(PROMPT)
    assert not store._replies


def test_the_tables_are_bounded_and_the_oldest_go_first():
    store = core.ReplyIds(capacity=3)
    for i in range(10):
        remember(store, f"{i}:")
    assert len(store._prompts) == len(store._replies) == 3
    text = "{}:abab<end>x"
    assert spell(store, text.format(9)) != TOKENIZER.encode(text.format(9))
    assert spell(store, text.format(0)) == TOKENIZER.encode(text.format(0))


def test_noting_a_reply_again_takes_no_second_place(store):
    remember(store)
    remember(store)
    assert len(store._prompts) == len(store._replies) == 1


def test_only_rows_that_were_committed_are_noted():
    manager = SimpleNamespace()
    store = core.reply_ids_of(manager)
    assert core.reply_ids_of(manager) is store
    ids = TOKENIZER.encode(PROMPT)
    store.note_prompt(PROMPT, ids, None)
    row = SimpleNamespace(
        coordinator=SimpleNamespace(manager=manager),
        ids=[*ids, *ODD, END],
        prompt_len=len(ids),
        committed=0,
    )
    core.note_ended_rows([row])
    assert not store._replies
    row.committed = len(row.ids)
    core.note_ended_rows([row])
    assert len(store._replies) == 1


def test_rows_that_end_are_told_from_those_that_stay():
    batch = SimpleNamespace(uids=[7, 8, 9], output_rows={7: "a", 9: "c"})
    assert core.ending_rows(batch, [0]) == ["c"]
    assert core.ending_rows(SimpleNamespace(uids=[7]), []) == []


def inputs(text, **more):
    ids = TOKENIZER.encode(text)
    return {
        "input_ids": mx.array([ids]),
        "attention_mask": mx.array([[1] * len(ids)]),
        **more,
    }


def respell(generator, text, raw, media=((), None, None)):
    return core.respell_inputs(generator, text, raw, media, None)


@pytest.fixture
def generator(store):
    remember(store)
    return SimpleNamespace(
        apc_manager=SimpleNamespace(reply_ids=store), tokenizer=TOKENIZER
    )


TURN = PROMPT + "abab<end>x"


def test_inputs_of_a_turn_are_respelled_with_a_mask_of_their_length(generator):
    out = respell(generator, TURN, inputs(TURN))
    assert out["input_ids"].tolist()[0][4:8] == ODD
    assert out["attention_mask"].shape == out["input_ids"].shape


def test_a_respelled_prompt_is_the_start_of_the_next_turn(generator, store):
    ids = respell(generator, TURN, inputs(TURN))["input_ids"].tolist()[0]
    store.note_reply([*ids, *ODD, END], len(ids))
    longer = spell(store, TURN + "abab<end>y")
    assert longer == [*ids, *ODD, END, ord("y")]


def test_inputs_with_media_or_without_a_cache_pass_unchanged(generator):
    raw = inputs(TURN)
    assert respell(generator, TURN, raw, (["a.png"], None, None)) is raw
    assert respell(generator, [TURN], raw) is raw
    assert respell(SimpleNamespace(apc_manager=None), TURN, raw) is raw
    aligned = inputs(TURN, token_type_ids=mx.array([[0]]))
    assert respell(generator, TURN, aligned) is aligned


def test_a_tenant_does_not_get_another_tenants_spelling():
    store = core.ReplyIds()
    ids = TOKENIZER.encode(PROMPT)
    store.note_prompt(PROMPT, ids, "a")
    store.note_reply([*ids, *ODD, END], len(ids))
    text = PROMPT + TOKENIZER.decode(ODD) + "<end>"
    plain = TOKENIZER.encode(text)
    assert store.spell(text, plain, TOKENIZER, STOPS, "a") != plain
    assert store.spell(text, plain, TOKENIZER, STOPS, "b") == plain
    assert store.spell(text, plain, TOKENIZER, STOPS, None) == plain


def test_the_tables_are_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(core, "MAX_BYTES", 400)
    store = core.ReplyIds()
    for i in range(20):
        ids = [i + 1] * 20
        store.note_prompt("x" * 20, ids, None)
        store.note_reply([*ids, 5], len(ids))
    assert 1 <= len(store._replies) < 20 and 1 <= len(store._prompts) <= 20
    assert sum(reply.nbytes for reply in store._replies.values()) <= 400
