"""Faults that users met with a draft model beside a prefix cache, one test a row."""

from __future__ import annotations

import pytest

from tests.fakes.models import DRAFTERS
from tests.fakes.server import system, user

KINDS = sorted(DRAFTERS)
RECORDS = "amber = fox yak sun\nbirch = owl ant bat\ncedar = dog ice hare\n"
ASK = [system("Look words up.\n" + RECORDS * 5), user("dump")]
# The newest token of a drafted reply is not processed, and one prompt token is always
# read.
SLACK = 2


def two_turns(server, **kw):
    first = server.chat(ASK, max_tokens=20, **kw)
    second = server.chat([*ASK, first.message(), user("get: amber")], max_tokens=12)
    return first, second


@pytest.mark.change("draft-state")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.given_by_others("draft-state")
def test_c10_a_draft_model_costs_no_reuse(make_server, name):
    _, plain = two_turns(make_server(DRAFTERS[name]))
    _, drafted = two_turns(make_server(DRAFTERS[name], draft_model=name))
    assert drafted.cached_tokens >= plain.cached_tokens - SLACK
    assert drafted.ids == plain.ids
    # And the reply is part of it.
    assert drafted.prefilled < len(plain.prompt_ids) // 4


@pytest.mark.guard
@pytest.mark.parametrize("bits", [8, 4])
def test_c28_quantized_keys_and_values_with_a_draft_model(make_server, bits):
    settings = {"kv_bits": bits, "kv_group_size": 32}
    plain = make_server("hybrid", **settings)
    wanted = [reply.ids for reply in two_turns(plain)]
    server = make_server("hybrid", draft_model="hybrid-mtp", **settings)
    assert [reply.ids for reply in two_turns(server)] == wanted
    again = server.chat(ASK, max_tokens=20)
    assert again.cached_tokens > 0 and again.ids == wanted[0]


# With blocks of one token there is nothing to draft; stock ends the reply there.
BLOCKS = [
    pytest.param(1, marks=pytest.mark.change("undrafted-requests")),
    *(pytest.param(block, marks=pytest.mark.guard) for block in range(2, 9)),
]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", ["hybrid-mtp", "dense-dflash"])
def test_c32_greedy_is_the_same_for_every_block_size(make_server, name, block):
    wanted = make_server(DRAFTERS[name]).chat(ASK, max_tokens=24).ids
    env = {"MLX_VLM_DRAFT_BLOCK_SIZE": str(block)}
    server = make_server(DRAFTERS[name], draft_model=name, env=env)
    for state in ("cold", "warm"):
        assert server.chat(ASK, max_tokens=24).ids == wanted, state


@pytest.mark.guard
@pytest.mark.parametrize("name", ["hybrid-mtp", "dense-dflash"])
def test_c44_a_sampled_reply_is_the_targets_own(make_server, name):
    """The same seed gives the same reply, drafted or not: so the distribution is the target's."""
    seeds = range(4)
    sampled = {"max_tokens": 16, "temperature": 1.5}
    # Without records to copy, nothing is certain.
    asked = [user("The harbour was quiet and the boats lay on the sand.")]
    plain = make_server(DRAFTERS[name])
    wanted = [plain.chat(asked, seed=seed, **sampled).ids for seed in seeds]
    assert len({tuple(ids) for ids in wanted}) > 1, "nothing is sampled"
    server = make_server(DRAFTERS[name], draft_model=name)
    for state in ("cold", "warm"):
        got = [server.chat(asked, seed=seed, **sampled).ids for seed in seeds]
        assert got == wanted, state
