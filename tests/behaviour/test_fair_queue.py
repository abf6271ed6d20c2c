"""A long prompt is not overtaken for ever by shorter ones that come later."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fakes.server import wait_for
from tests.fakes.timeline import Timeline

LATER = 40
LONG = "amber = fox yak sun\nbriar = elk owl\n" * 16

generation = importlib.import_module("mlx_vlm.server.generation")


def short(number):
    return f"get: amber {number}"


def in_this_order(server, prompts):
    """Records of requests that are queued in this order before anybody is admitted.

    Below HTTP, where each request that waits would hold one of a few threads.
    """

    def ask(prompt, record):
        args = generation.GenerationArguments(max_tokens=4, temperature=0.0)
        args._test_key = record.key
        _, tokens = server.generator.generate(prompt, args=args)
        assert list(tokens)
        return record

    server.recorder.admit_together(len(prompts))
    with ThreadPoolExecutor(len(prompts)) as pool:
        jobs = []
        for number, prompt in enumerate(prompts, start=1):
            jobs.append(pool.submit(ask, prompt, server._expect(None, "stop")))
            if number < len(prompts):
                wait_for(
                    lambda n=number: server.generator.requests.qsize() >= n,
                    "a request was not queued",
                )
        return [job.result(60) for job in jobs]


def read_before(line, records, uid):
    """Tokens of others whose prefill began in an earlier step."""
    lengths = {record.uid: len(record.prompt_ids) for record in records}
    begun = {}
    for place, (kind, who) in enumerate(line.events):
        if kind == "chunk":
            for row in who:
                begun.setdefault(row, place)
    return sum(lengths[row] for row, place in begun.items() if place < begun[uid])


@pytest.mark.change("fair-queue")
@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_a_long_prompt_is_overtaken_by_as_many_tokens_as_it_has(make_server, model):
    server = make_server(model)
    with Timeline() as line:
        records = in_this_order(server, [LONG, *map(short, range(LATER))])
    long = records[0]
    others = sum(len(record.prompt_ids) for record in records[1:])
    assert long.uid == 0 and others > len(long.prompt_ids)
    assert 0 < read_before(line, records, 0) <= len(long.prompt_ids)
    for record in (long, records[7]):
        assert record.ids == server.cold_ids(record.prompt_ids, len(record.ids))


@pytest.mark.guard
def test_a_short_prompt_still_goes_before_long_ones(make_server):
    server = make_server("dense")
    with Timeline() as line:
        records = in_this_order(server, [LONG] * 9 + [short(1)])
    assert read_before(line, records, records[-1].uid) == 0
