"""Rows of families that read their positions otherwise say together what they say alone.

MiniMax M3 takes a row's place from the first of its positions, which for a shorter row
lies in the padding. It and GLM-OCR look at the model before they look at the batch.
"""

from __future__ import annotations

import pytest

from tests.behaviour.test_speculative_turns import Agents, asked
from tests.fakes.families import make_drafter_for, make_target
from tests.fakes.oracle import Oracle

CHUNKS = pytest.mark.parametrize("chunk", [32, 512])
BLOCK = {"MLX_VLM_DRAFT_BLOCK_SIZE": "4"}
LENGTH = 24


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A function that gives the folder of a random target; made once each."""
    folder, known = tmp_path_factory.mktemp("targets"), {}

    def make(family):
        if family not in known:
            known[family] = make_target(folder / family, family)
        return known[family]

    return make


@pytest.fixture
def start(made, make_server):
    """Start a server for a family: ``start(family, chunk, **settings)``."""

    def make(family, chunk, **settings):
        env = {**BLOCK, "PREFILL_STEP_SIZE": str(chunk)}
        return make_server(made(family), apc_checkpoint_entries=16, env=env, **settings)

    return make


def asks():
    """Prompts of four lengths."""
    return [asked(Agents.prompts[n], LENGTH) for n in (0, 2, 4, 1)]


def together(server):
    """The replies to prompts that are one prompt batch."""
    replies = server.together(asks())
    assert replies[0].forwards[0][0] == len(replies)
    assert len({len(reply.prompt_ids) for reply in replies}) == len(replies)
    return replies


def assert_rows_are_cold_runs(server):
    for reply in together(server):
        server.assert_cold(reply)


@pytest.mark.change("row-positions")
def test_a_chunk_may_begin_in_the_padding(start):
    """Stock begins to count where the chunk does, not where the row does."""
    assert_rows_are_cold_runs(start("minimax_m3_vl", 32))


@pytest.mark.guard
def test_rows_that_are_read_in_one_chunk(start):
    assert_rows_are_cold_runs(start("minimax_m3_vl", 512))


@pytest.mark.guard
@CHUNKS
def test_drafted_rows(start, made, tmp_path, chunk):
    plans = [start("minimax_m3_vl", chunk).chat(**ask).ids for ask in asks()]
    drafter = make_drafter_for(tmp_path / "d", made("minimax_m3_vl"), "eagle3")
    server = start("minimax_m3_vl", chunk, draft_model=drafter)
    Oracle(plans, 5).install(server.generator.draft_model)
    assert [reply.ids for reply in together(server)] == plans


@pytest.mark.guard
def test_the_first_reply_of_a_process(start):
    """The model object has seen no row yet: it knows no deltas but the batch's."""
    server = start("glm_ocr", 512)
    server.reload()
    server.assert_cold(server.chat(**asks()[2]))


@pytest.mark.change("row-positions")
def test_the_first_rows_of_a_process(start):
    server = start("glm_ocr", 512)
    server.reload()
    assert_rows_are_cold_runs(server)


@pytest.mark.change("row-positions")
def test_rows_that_decode_while_others_arrive(start):
    """What a newcomer's embedding takes off the model is not missed."""
    server = start("minimax_m3_vl", 512)
    rows = asks()
    for reply in server.two_groups(rows[:2], 3, rows[2:]):
        server.assert_cold(reply)
