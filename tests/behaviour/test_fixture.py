"""The fixture itself, on what stock does right: it must see what the server did."""

import time

import pytest

from tests.fakes import recorder
from tests.fakes import server as fixture
from tests.fakes import stuck
from tests.fakes.replies import RequestFailed
from tests.fakes.server import user, wait_for

pytestmark = pytest.mark.guard

ASK = [user("amber = fox yak sun. dump")]


@pytest.mark.parametrize("model", ["dense", "hybrid", "window"])
@pytest.mark.parametrize("endpoint", ["chat", "responses", "messages"])
def test_streamed_and_whole_replies_are_the_cold_run(make_server, model, endpoint):
    server = make_server(model)
    whole = getattr(server, endpoint)(ASK, max_tokens=8)
    server.clear_cache()
    streamed = getattr(server, endpoint)(ASK, max_tokens=8, stream=True)
    assert whole.ids == streamed.ids and len(whole.ids) == whole.completion_tokens
    assert whole.text.strip() == streamed.text.strip()
    assert whole.prefilled == whole.prompt_tokens == len(whole.prompt_ids)
    server.assert_cold(whole)


def test_scripted_reply_is_emitted_and_stops(make_server):
    server = make_server("hybrid")
    script = server.encode("fox yak sun")
    reply = server.chat(ASK, script=script, max_tokens=30)
    assert reply.text == "fox yak sun"
    assert reply.ids[:-1] == script and reply.finish_reason == "stop"


def test_scripted_reply_ends_by_length(make_server):
    server = make_server("dense")
    reply = server.chat(ASK, script="fox yak sun", max_tokens=2)
    assert len(reply.ids) == 2 and reply.finish_reason == "length"


def test_exact_repeat_is_reused_and_forwards_less(make_server):
    server = make_server("dense")
    long = [user("fox yak sun " * 20)]
    first = server.chat(long)
    second = server.chat(long)
    assert second.cached_tokens >= len(first.prompt_ids) - 16
    assert second.prefilled == len(second.prompt_ids) - second.cached_tokens > 0
    assert second.ids == first.ids


def test_cancel_hangs_up_at_the_token(make_server):
    server = make_server("hybrid")
    reply = server.cancel(ASK, after=3, script="fox yak sun " * 8)
    assert len(reply.ids) == 3 and reply.record.finish_reason is None
    assert server.chat(ASK, max_tokens=4).ids


def test_cancel_waits_for_a_server_that_is_busy(make_server, monkeypatch):
    """No token overtakes the hang-up: stock's handler would write it and not be closed."""
    server = make_server("hybrid")
    loop = server.host.server.servers[0].get_loop()

    def wait_and_keep_busy(condition, otherwise):
        wait_for(condition, otherwise)
        loop.call_soon_threadsafe(time.sleep, 0.5)

    monkeypatch.setattr(fixture, "wait_for", wait_and_keep_busy)
    reply = server.cancel(ASK, after=3, script="fox yak sun " * 8)
    assert len(reply.ids) == 3 and reply.record.finish_reason is None


def test_cancel_tells_that_no_row_is_cancelled(make_server, monkeypatch):
    server = make_server("dense")
    monkeypatch.setattr(recorder, "HOLD_SECONDS", 0.5)
    monkeypatch.setattr(fixture, "HOLD_SECONDS", 0.5)
    monkeypatch.setattr(server.generator, "_cancel", lambda uid: None)
    with pytest.raises(RequestFailed, match="has cancelled no row"):
        server.cancel(ASK, after=3, script="fox yak sun " * 8)


def test_together_shares_a_prefill_batch(make_server):
    server = make_server("dense")
    replies = server.together([{"messages": [user("fox " * 4)], "max_tokens": 4}] * 3)
    assert all(reply.forwards[0][0] == 3 for reply in replies)
    assert [reply.prefilled for reply in replies] == [
        len(reply.prompt_ids) for reply in replies
    ]


def test_staggered_request_joins_a_running_row(make_server):
    server = make_server("dense")
    one, two = server.staggered(
        [
            (
                0,
                {"messages": [user("fox")], "script": "fox yak " * 9, "max_tokens": 20},
            ),
            (5, {"messages": [user("yak")], "script": "fox yak " * 9, "max_tokens": 5}),
        ]
    )
    assert len(one.ids) == 20 and len(two.ids) == 5
    assert (2, 1) in server.recorder.decode_calls


def test_errors_are_told(make_server):
    server = make_server("dense", max_kv_size=64)
    with pytest.raises(RequestFailed) as failed:
        server.chat([user("fox " * 80)])
    assert failed.value.status == 400


def test_what_keeps_a_request_waiting_is_told(make_server, monkeypatch):
    """The watchdog looks before the client gives up, and names thread, row and task."""
    server = make_server("dense")
    record = server.expect_held(
        "fox yak " * 9, at=3, until=lambda: record.stuck is not None
    )
    monkeypatch.setattr(stuck, "PAUSE_SECONDS", 1.0)
    monkeypatch.setattr(server.host, "watchdog", stuck.Watchdog(server.host, 0.2))
    reply = server.chat(ASK, record=record, max_tokens=8)
    assert len(reply.ids) == 8
    report = record.stuck
    assert "cannot be told" not in report
    rows = f"uid {record.uid}, request {id(record.raw_inputs['_rqueue']):x}"
    assert rows in report and "-- steps of the generation thread\n0 in " in report
    assert f"decoding uids [{record.uid}], tokens [3] of [8]" in report
    stack = report.partition("GENERATION:\n")[2]
    assert "stream_text" in stack.partition("\n\n")[0]
    assert "chat_completions_endpoint" in report.partition("-- event loop")[2]
