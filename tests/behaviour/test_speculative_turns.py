"""With a draft model loaded, nobody waits for somebody else's reply."""

from __future__ import annotations

import gc
import importlib
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.behaviour.stored import leases
from tests.fakes.models import DRAFTERS, record_prompt
from tests.fakes.oracle import Oracle, make_drafter
from tests.fakes.replies import RequestFailed
from tests.fakes.server import system, user
from tests.fakes.timeline import Timeline

pytestmark = pytest.mark.change("speculative-turns")

ar = importlib.import_module("mlx_vlm.generate.ar")
CHUNK = 32
SETTINGS = {
    "apc_checkpoint_entries": 8,
    "env": {
        "PREFILL_STEP_SIZE": str(CHUNK),
        "MLX_VLM_DRAFT_BLOCK_SIZE": "4",
        # Where batches could join, they take turns all the same.
        "MLX_VLM_DRAFT_MERGE": "never",
    },
}
KINDS = [*DRAFTERS, "assistant"]
LONG = record_prompt(31, 16, task="dump").messages
FAR = record_prompt(33, 24, filler=12, task="dump").messages
SHORT = [system("Be brief."), user("hello")]
MIDDLE = record_prompt(5, 8, filler=1, task="dump").messages


@pytest.fixture(scope="session")
def assistant(tmp_path_factory):
    return make_drafter(tmp_path_factory.mktemp("drafter") / "a", kind="assistant")


@pytest.fixture(params=KINDS)
def server(request, make_server, assistant):
    """A server with a drafter of each kind."""
    if request.param in DRAFTERS:
        target, drafter = DRAFTERS[request.param], request.param
        return make_server(target, draft_model=drafter, **SETTINGS)
    plain = make_server("dense", **SETTINGS)
    asks = [(LONG, 96), (SHORT, 16), (MIDDLE, 40)]
    plans = [plain.chat(messages, max_tokens=n).ids for messages, n in asks]
    server = make_server("dense", draft_model=assistant, **SETTINGS)
    Oracle(plans, 5).install(server.generator.draft_model)
    return server


def figures(reply):
    """(drafted, accepted) as the answer says."""
    timings = reply.raw["timings"]
    return timings.get("draft_n"), timings.get("draft_n_accepted")


def asked(messages, max_tokens, **more):
    return {"messages": list(messages), "max_tokens": max_tokens, **more}


def alone(server, *asks):
    """What each request is answered on an empty cache, nobody else being there."""
    out = []
    for ask in asks:
        server.clear_cache()
        out.append(server.chat(**ask))
    server.clear_cache()
    return out


def assert_same(reply, want):
    assert reply.ids == want.ids
    assert figures(reply) == figures(want)


def test_a_short_request_does_not_wait(server):
    long, short = asked(LONG, 96), asked(SHORT, 16)
    wants = alone(server, long, short)
    with Timeline() as line:
        replies = server.staggered([(4, long), (4, short)])
    for reply, want in zip(replies, wants, strict=True):
        assert_same(reply, want)
    first, second = (reply.record.uid for reply in replies)
    waited = line.between(("queued", second), ("token", second))
    chunks = waited.count(("chunk", (second,)))
    assert chunks >= 2
    # The last column of a prompt is a chunk of its own.
    assert waited.count(("round", (first,))) <= 2 + chunks - 2
    assert max(line.rounds_of(second)) < max(line.rounds_of(first))


def test_rows_wait_for_one_chunk_and_one_round_of_each_batch(server):
    """However long the prompt of a newcomer is."""
    asks = [asked(LONG, 96), asked(MIDDLE, 24), asked(FAR, 8)]
    wants = alone(server, *asks)
    with Timeline() as line:
        replies = server.staggered([(3, asks[0]), (4, asks[1]), (8, asks[2])])
    for reply, want in zip(replies, wants, strict=True):
        assert_same(reply, want)
    first, second, third = (reply.record.uid for reply in replies)
    assert replies[2].prefilled > 6 * CHUNK
    for uid in (first, second):
        assert line.most_between_turns("chunk", uid) == 1
        assert line.most_between_turns("round", uid) <= 2
    while_read = line.between(("queued", third), ("token", third))
    assert while_read.count(("round", (first,))) > 4


def test_two_that_arrive_together_make_one_batch(server):
    asks = [asked(SHORT, 16), asked(MIDDLE, 24)]
    wants = alone(server, asked(LONG, 96), *asks)
    with Timeline() as line:
        replies = server.two_groups([asked(LONG, 96)], 4, asks)
    first, *others = (reply.record.uid for reply in replies)
    assert [reply.ids for reply in replies] == [want.ids for want in wants]
    assert figures(replies[0]) == figures(wants[0])
    together = [who for kind, who in line.events if kind == "round" and len(who) == 2]
    assert together and set(together[0]) == set(others)
    assert min(line.rounds_of(others[0])) < max(line.rounds_of(first))


def cancelled_beside(server, after):
    """A client hangs up on a second reply after so many events of it, while a first one is written.

    Returns the first reply, what the second one said, the timeline, and the first reply alone; both have the tokens that they have alone.
    """
    long, other = asked(LONG, 96), asked(MIDDLE, 40)
    wants = alone(server, long, other)
    record = server.expect_held(
        None, at=4, until=lambda: server.generator.requests.qsize() > 0
    )
    with ThreadPoolExecutor(2) as pool, Timeline() as line:
        running = pool.submit(server.chat, record=record, **long)
        assert record.held.wait(20)
        part = server.cancel(MIDDLE, after=after, max_tokens=40)
        reply = running.result(30)
    assert reply.ids == wants[0].ids
    assert part.ids == wants[1].ids[: len(part.ids)]
    assert len(part.ids) < len(wants[1].ids)
    return reply, part, line, wants[0]


def test_a_cancelled_row_leaves_the_others_alone(server):
    reply, part, line, want = cancelled_beside(server, after=6)
    assert_same(reply, want)
    rounds = line.rounds_of(part.record.uid)
    assert min(rounds) < max(rounds) < max(line.rounds_of(reply.record.uid))
    assert leases(server.manager) == 0


def test_an_error_in_a_round_fails_its_own_batch(server, monkeypatch):
    long, other = asked(LONG, 96), asked(MIDDLE, 24)
    want, _ = alone(server, long, other)
    kind = type(server.generator.draft_model)
    names = [n for n in ("draft_block", "draft_block_greedy") if hasattr(kind, n)]
    drafters = []

    def planted(original):
        def draft(self, *args, **kwargs):
            if not any(self is known for known in drafters):
                drafters.append(self)
            if len(drafters) > 1 and self is drafters[1]:
                raise RuntimeError("planted in a drafter")
            return original(self, *args, **kwargs)

        return draft

    for name in names:
        monkeypatch.setattr(kind, name, planted(getattr(kind, name)))
    with Timeline() as line:
        good, failed = server.settled_staggered([(4, long), (4, other)])
    assert isinstance(failed, RequestFailed) and failed.status == 500
    assert_same(good, want)
    queued = [who for kind, who in line.events if kind == "queued"]
    assert line.events.index(("token", queued[1])) < max(line.rounds_of(queued[0]))
    left = vars(drafters[1])
    primed = {"reset", "accept_verified_tokens", "prefill_from_target_hidden"}
    assert not left.keys() & primed and not left.get("_cache")
    monkeypatch.undo()
    server.clear_cache()
    assert server.chat(**long).ids == want.ids
    assert leases(server.manager) == 0


@pytest.mark.guard
@pytest.mark.parametrize("name", ["hybrid-mtp", "dense-dflash"])
def test_caches_are_settled_from_time_to_time(make_server, monkeypatch, name):
    """Stock does it for whatever batch it decodes: free buffers would pile up."""
    kind, settled = ar.SpeculativeGenerationBatch, []
    states = kind.cache_states

    def cache_states(batch):
        settled.append(len(batch))
        return states(batch)

    monkeypatch.setattr(kind, "cache_states", cache_states)
    env = {**SETTINGS["env"], "MLX_VLM_BATCH_CACHE_EVAL_INTERVAL": "3"}
    server = make_server(DRAFTERS[name], draft_model=name, **{**SETTINGS, "env": env})
    reply = server.chat(**asked(LONG, 40))
    assert len(reply.ids) == 40 and len(settled) >= 3
    server.assert_cold(reply)


@pytest.mark.parametrize("name", ["hybrid-mtp", "dense-dflash"])
def test_no_more_rows_than_places(make_server, name):
    env = {**SETTINGS["env"], "MLX_VLM_MAX_NUM_SEQS": "2"}
    server = make_server(DRAFTERS[name], draft_model=name, **{**SETTINGS, "env": env})
    asks = [asked(LONG, 96), asked(MIDDLE, 20), asked(SHORT, 12)]
    wants = alone(server, *asks)
    with Timeline() as line:
        replies = server.staggered([(3, asks[0]), (4, asks[1]), (8, asks[2])])
    for reply, want in zip(replies, wants, strict=True):
        assert_same(reply, want)
    first, second, third = (reply.record.uid for reply in replies)
    assert min(line.rounds_of(second)) < max(line.rounds_of(first))
    assert line.events.index(("queued", third)) > max(line.rounds_of(second))
    assert min(line.rounds_of(third)) < max(line.rounds_of(first))


@pytest.mark.parametrize("undrafted_first", [False, True])
def test_undrafted_rows_take_turns_too(server, undrafted_first):
    drafted, plain = asked(LONG, 96), asked(MIDDLE, 24, logprobs=True)
    wants = alone(server, drafted, plain)
    asks = [(3, drafted), (4, plain)]
    if undrafted_first:
        asks, wants = [(3, plain), (4, drafted)], wants[::-1]
    with Timeline() as line:
        replies = server.staggered(asks)
    for reply, want in zip(replies, wants, strict=True):
        assert_same(reply, want)
    uids = [reply.record.uid for reply in replies]
    row, other = uids[::-1] if undrafted_first else uids
    steps = [i for i, event in enumerate(line.events) if event == ("step", (other,))]
    rounds = line.rounds_of(row)
    assert sum(rounds[0] < step < rounds[-1] for step in steps) > 3
    assert figures(replies[undrafted_first])[0] > 0
    assert not figures(replies[not undrafted_first])[0]


class Agents:
    """Requests that come and go at random, some of them given up."""

    prompts = (
        LONG,
        SHORT,
        MIDDLE,
        *(record_prompt(s, 6, filler=1, task="get").messages for s in range(5)),
    )

    def __init__(self, server):
        self.server = server
        self.wants = [server.chat(p, max_tokens=40).ids for p in self.prompts]
        self.random = random.Random(5)
        self.wrong: list[tuple] = []

    def run(self, at_once, requests):
        """So many requests by so many clients."""
        work = [self._choose() for _ in range(requests)]
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(lambda one: self._ask(*one), work))
        self.server.wait_idle()

    def _choose(self):
        more = {"logprobs": True} if self.random.random() < 0.15 else {}
        lines = self.random.randint(0, 5) if self.random.random() < 0.1 else None
        number = self.random.randrange(len(self.prompts))
        return number, self.random.choice((1, 4, 12, 40)), lines, more

    def _ask(self, number, max_tokens, lines, more):
        if lines is not None:
            self._hang_up(number, lines)
            return
        reply = self.server.chat(
            self.prompts[number], max_tokens=max_tokens, stream=max_tokens == 12, **more
        )
        if reply.ids != self.wants[number][:max_tokens]:
            self.wrong.append((number, max_tokens, more, reply.ids))

    def _hang_up(self, number, lines):
        body = {"model": self.server.settings.model, "max_tokens": 60}
        body |= {"messages": self.prompts[number], "stream": True, "temperature": 0}
        with self.server.host.client.stream(
            "POST", "/v1/chat/completions", json=body
        ) as answer:
            arriving = answer.iter_lines()
            for _ in range(lines):
                next(arriving, None)


def assert_nothing_is_left(server):
    """No lease, no ledger, no batch with rows, no drafter but the loaded one."""
    assert leases(server.manager) == 0
    loaded = server.generator.draft_model
    part = next(iter(loaded.values()))
    gc.collect()
    alive = gc.get_objects()
    assert not [o for o in alive if type(o).__name__ == "OutputRow"]
    assert not [o for o in alive if isinstance(o, ar.SpeculativeGenerationBatch)]
    # A batch's own copy of the drafter has the same parts; other servers' have others.
    drafters = [o for o in alive if type(o) is type(loaded)]
    assert [o for o in drafters if next(iter(o.values())) is part] == [loaded]


def come_and_go(server, requests):
    agents = Agents(server)
    with Timeline() as line:
        for at_once in (1, 2, 4, 8):
            agents.run(at_once, requests // 4)
            assert_nothing_is_left(server)
    assert not agents.wrong
    uids = {who for kind, who in line.events if kind == "queued"}
    spans = [rounds for uid in uids if (rounds := line.rounds_of(uid))]
    assert any(a[0] < b[0] < a[-1] for a in spans for b in spans), "never two at once"


def test_rows_come_and_go(server):
    come_and_go(server, 64)


@pytest.mark.slow
def test_many_rows_come_and_go(server):
    come_and_go(server, 504)
