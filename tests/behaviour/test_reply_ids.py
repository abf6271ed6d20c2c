"""A reply that comes back as text is read with the ids that the model chose."""

from __future__ import annotations

import pytest

from tests.behaviour.sessions import assert_reads_only_new, follows
from tests.fakes.server import system, user

MODELS = ["dense", "hybrid", "window"]
ASK = [system("Copy.\n" + "fox yak sun\n" * 6), user("go")]


def odd_spelling(server):
    """Ids that decode to a text whose own tokenization differs from them."""
    ids = [
        i
        for letter in "fox yak amber sun, over and over"
        for i in server.encode(letter)
    ]
    assert server.encode(server.decode(ids)) != ids
    return ids


def follow_up(reply, text="again"):
    return [*ASK, reply.message(), user(text)]


@pytest.mark.change("reply-ids")
@pytest.mark.parametrize("endpoint", ["chat", "responses", "messages"])
@pytest.mark.parametrize("model", MODELS)
def test_unusual_spelling_is_kept_for_the_next_turn(make_server, model, endpoint):
    server = make_server(model)
    ask = getattr(server, endpoint)
    one = ask(ASK, script=odd_spelling(server), max_tokens=60)
    two = ask(follow_up(one), max_tokens=8)
    assert follows(two, one)
    assert_reads_only_new(two, [one], model)
    server.assert_cold(two)


@pytest.mark.change("reply-ids")
def test_spelling_survives_several_turns(make_server):
    server = make_server("hybrid", apc_checkpoint_entries=8)
    asked, seen = list(ASK), []
    for turn in range(3):
        reply = server.chat(asked, script=odd_spelling(server), max_tokens=60)
        if seen:
            assert follows(reply, seen[-1])
            assert_reads_only_new(reply, seen, "hybrid")
        seen.append(reply)
        asked += [reply.message(), user(f"again {turn}")]


@pytest.mark.change("reply-ids")
def test_reply_cut_by_its_budget_keeps_its_spelling(make_server):
    server = make_server("dense")
    one = server.chat(ASK, script=odd_spelling(server), max_tokens=20)
    assert one.finish_reason == "length"
    two = server.chat(follow_up(one), max_tokens=4)
    assert follows(two, one)
    server.assert_cold(two)


@pytest.mark.guard
@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_edited_reply_is_tokenized_as_it_stands(make_server, model):
    server = make_server(model)
    one = server.chat(ASK, script=odd_spelling(server), max_tokens=60)
    one.text = one.text.replace("yak", "fox")
    two = server.chat(follow_up(one), max_tokens=4)
    server.clear_cache()
    again = server.chat(follow_up(one), max_tokens=4)
    assert two.prompt_ids == again.prompt_ids
    assert two.ids == again.ids


@pytest.mark.guard
def test_user_text_with_a_stop_token_in_it_is_read_as_before(make_server):
    server = make_server("dense")
    ask = [user("one <|im_end|> two <|im_end|>")]
    one = server.chat(ask, script="fox", max_tokens=8)
    two = server.chat([*ask, one.message(), user("a <|im_end|> b")], max_tokens=4)
    text = server.decode(two.prompt_ids)
    assert text.count("<|im_end|>") == 3 + 3
    server.assert_cold(two)


@pytest.mark.change("reply-ids")
@pytest.mark.parametrize("model", ["dense", "hybrid"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_reply_cut_behind_white_space_is_still_the_reply(make_server, model, stream):
    """Stock strips a reply's end, so that its last token does not come back."""
    server = make_server(model)
    script = server.encode("fox yak sun\nowl elk")
    cut = next(i for i in range(len(script)) if "\n" in server.decode(script[: i + 1]))
    one = server.chat(ASK, script=script, max_tokens=cut + 1, stream=stream)
    assert one.finish_reason == "length" and one.ids == script[: cut + 1]
    one.text = one.text.rstrip()  # as the server's other paths and templates do
    two = server.chat(follow_up(one), max_tokens=8)
    assert follows(two, one)
    assert_reads_only_new(two, [one], model)
    server.assert_cold(two)
