"""The pure parts of the reuse record: history, record, totals, ledger, endpoint."""

from __future__ import annotations

import logging
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_vlm_cacheplus.reports import endpoint
from mlx_vlm_cacheplus.reports.history import Seen, TokenHistory, as_ids, common_prefix
from mlx_vlm_cacheplus.reports.ledger import Ledger
from mlx_vlm_cacheplus.reports.record import Drafter, ReuseRecord, Shortfall, Totals
from mlx_vlm_cacheplus.reports.tracker import Tracker


def seen(ids: list[int], **facts: Any) -> Seen:
    return Seen(as_ids(ids), len(ids), **facts)


def plain_prefix(a: list[int], b: list[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


def record(**fields: Any) -> ReuseRecord:
    values: dict[str, Any] = {
        "id": "7f3a",
        "uid": 3,
        "time": 1.5,
        "model": "tiny",
        "endpoint": "/chat/completions",
        "prompt": 1060,
        "restored": 1043,
        "source": "ram",
        "prefilled": 17,
        "new": 16,
        "generated": 64,
        "committed": 1123,
        "reason": None,
        "finish": "stop",
    }
    return ReuseRecord(**{**values, **fields})


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 10_000])
def test_common_prefix_finds_the_first_difference(size):
    ids = np.arange(size, dtype=np.int32)
    assert common_prefix(ids, ids) == size
    for place in {0, size // 2, size - 1} - {-1}:
        if place < size:
            other = ids.copy()
            other[place] += 1
            assert common_prefix(ids, other) == place
            assert common_prefix(ids[:place], ids) == place


def test_match_is_the_longest_common_prefix_with_any_sequence():
    chance = random.Random(7)
    history = TokenHistory()
    kept: list[list[int]] = []
    for _ in range(200):
        head = chance.choice(kept)[: chance.randint(0, 40)] if kept else []
        ids = head + [chance.randint(0, 3) for _ in range(chance.randint(1, 40))]
        match = history.match(as_ids(ids))
        best = max((plain_prefix(ids, other) for other in kept), default=0)
        assert match.length == best
        if match.sequence is not None:
            assert common_prefix(match.sequence.ids, as_ids(ids)) == best
            ends = best == min(len(ids), match.sequence.ids.size)
            assert match.divergence == (None if ends else best)
        history.add(seen(ids))
        kept.append(ids)
        history.check_invariants()


def test_nothing_is_shared_between_models():
    history = TokenHistory()
    history.add(seen([1, 2, 3], model="a"))
    assert history.match(as_ids([1, 2, 3]), "b").sequence is None
    assert history.match(as_ids([1, 2, 3]), "a").length == 3


def test_the_oldest_leave_first_and_both_bounds_hold():
    history = TokenHistory(max_bytes=400, max_sequences=3)
    for first in range(5):
        history.add(seen([first] * 10))
        history.check_invariants()
    assert len(history) == 3
    assert history.match(as_ids([1] * 10)).length == 0
    assert history.match(as_ids([4] * 10)).length == 10
    history.add(seen([9] * 81))
    history.check_invariants()
    assert len(history) == 2 and history.bytes_held == 364
    history.add(seen([8] * 101))
    history.check_invariants()
    assert len(history) == 0


def test_a_sequence_that_was_pushed_out_is_not_counted_again():
    history = TokenHistory(max_bytes=80)
    first = history.add(seen([1] * 10))
    history.add(seen([2] * 20))
    history.replace(first, as_ids([1] * 15))
    history.drop(first)
    history.check_invariants()
    assert history.bytes_held == 80


def test_the_line_is_key_value_and_free_text_is_quoted():
    line = record(
        shortfall=Shortfall(12, "budget: dropped"), reason="no room", committed=0
    ).line()
    assert line == (
        "cacheplus: request=7f3a prompt=1060 restored=1043 (ram) prefilled=17 new=16 generated=64 committed=0 "
        'finish=stop not_committed="no room" short=12 because="budget: dropped"'
    )
    assert "restored=0 prefilled" in record(restored=0, source="none").line()
    cold = Drafter(True, "mtp", reason="draft-state is off")
    line = record(drafter=cold).line()
    assert 'drafter=mtp:cold drafter_reason="draft-state is off"' in line
    for drafter, state in [
        (Drafter(True, "mtp", primed=True), "primed"),
        (Drafter(True, "mtp", restored=True, primed=True), "restored"),
    ]:
        assert f"drafter=mtp:{state}" in record(drafter=drafter).line()
        assert "drafter_reason" not in record(drafter=drafter).line()


def test_the_line_says_how_drafted_requests_shared_the_device():
    def line(**fields):
        return record(drafter=Drafter(True, "mtp", primed=True, **fields)).line()

    assert "batching" not in line()
    assert line(batching="merged").endswith("drafter=mtp:primed batching=merged")
    apart = line(batching="turns", batching_reason="2 rows were slower together")
    assert 'batching=turns batching_reason="2 rows were slower together"' in apart


def test_totals_are_the_sums_and_the_ratio_is_prefilled_over_new():
    totals = Totals()
    assert totals.as_dict()["re_read_ratio"] is None
    totals.add(record())
    totals.add(record(prefilled=47, new=16, finish="cancel", source="disk"))
    out = totals.as_dict()
    assert out["requests"] == 2 and out["prefilled"] == 64 and out["new"] == 32
    assert out["re_read"] == 1 + 31 and out["re_read_ratio"] == 2.0
    assert out["finish"] == {"stop": 1, "cancel": 1}
    assert out["source"] == {"ram": 1, "disk": 1}


def test_re_read_is_never_negative():
    assert record(prefilled=3, new=10).re_read == 0


def test_the_ledger_keeps_the_last_and_counts_all(caplog):
    heard: list[Any] = []
    ledger = Ledger(heard.append, kept=3)
    with caplog.at_level(logging.INFO, "mlx_vlm.server"):
        for uid in range(5):
            ledger.add(record(uid=uid))
    assert [row["seq"] for row in ledger.last()] == [3, 4, 5]
    assert [row["uid"] for row in ledger.last(2)] == [3, 4]
    assert ledger.last(0) == [] and len(ledger.last(99)) == 3
    assert ledger.totals()["requests"] == 5 == len(heard)
    assert len([r for r in caplog.records if "cacheplus: request=" in r.message]) == 5


def test_a_listener_that_fails_costs_nothing(caplog):
    def broken(row: Any) -> None:
        raise RuntimeError("no disk")

    ledger = Ledger(broken)
    ledger.add(record())
    assert ledger.totals()["requests"] == 1
    assert "a listener failed: RuntimeError: no disk" in caplog.text


def test_stock_s_log_level_decides():
    logger = logging.getLogger("mlx_vlm.server.cacheplus")
    assert logger.level == logging.NOTSET
    assert logger.parent is logging.getLogger("mlx_vlm.server")


@pytest.mark.parametrize(
    ("text", "count"),
    [(None, endpoint.DEFAULT_LAST), ("0", 0), ("7", 7), ("999999999", 999_999_999)],
)
def test_last_is_a_whole_number(text, count):
    assert endpoint.parse_last(text) == count


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", "1.5", "ten", "1e3", " 1", "٣", "9" * 5000]
)
def test_a_bad_last_is_refused(text):
    with pytest.raises(endpoint.BadCount):
        endpoint.parse_last(text)


class Server:
    """As much of stock's app module as the route reads."""

    class runtime:
        class config:
            @staticmethod
            def current() -> dict[str, Any]:
                return {"apc_enabled": True, "host": "elsewhere"}

    @staticmethod
    def _require_management_api_key(request: Any) -> None:
        from starlette.exceptions import HTTPException

        if request.headers.get("Authorization") != "Bearer secret":
            raise HTTPException(401, "Invalid API key", {"WWW-Authenticate": "Bearer"})


@pytest.fixture
def client():
    from starlette.applications import Starlette
    from starlette.testclient import TestClient

    tracker = Tracker(Ledger())
    for uid in range(3):
        tracker.ledger.add(record(uid=uid))
    app = Starlette(routes=[endpoint.make_route(tracker, Server)])
    return TestClient(app, headers={"Authorization": "Bearer secret"})


def test_the_report_has_records_totals_and_settings(client):
    out = client.get(endpoint.PATH, params={"last": 2}).json()
    assert [row["uid"] for row in out["records"]] == [1, 2]
    assert out["totals"]["requests"] == 3
    assert out["settings"] == {"apc_enabled": True}
    assert out["history"]["max_bytes"] > 0


def test_the_key_stands_before_everything(client):
    for query in ("", "?last=bad"):
        answer = client.get(endpoint.PATH + query, headers={"Authorization": "no"})
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_a_bad_count_is_a_400_and_another_verb_a_405(client):
    answer = client.get(endpoint.PATH + "?last=-3")
    assert answer.status_code == 400 and "last='-3'" in answer.text
    assert client.post(endpoint.PATH).status_code == 405


def test_the_documents_name_every_key():
    text = (Path(__file__).parents[2] / "docs" / "REPORT.md").read_text()
    in_tables = set(re.findall(r"`(\w+)`", text))
    missing = {"seq", *record().as_dict(), *Totals().as_dict()} - in_tables
    assert not missing
    assert set(Drafter().__dict__) <= in_tables


def test_the_report_touches_no_array_of_the_model():
    folder = Path(endpoint.__file__).parent
    for path in folder.glob("*.py"):
        assert not re.search(r"^\s*(import|from) mlx", path.read_text(), re.M), path
