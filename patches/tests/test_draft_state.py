"""What a drafter has read is stored and restored with the target's part."""

import pytest
from mlx_vlm.tests.drafting_fixtures import (
    DRAFTERS,
    build_drafter,
    build_target,
    drafted,
)
from mlx_vlm.tests.generation_fixtures import make_manager, prompt_of


class Server:
    """One target, drafters and prefix cache, asked again and again."""

    def __init__(self, kind):
        self.kind = kind
        self.model = build_target()
        self.drafter = build_drafter(kind)
        self.manager = make_manager()

    def ask(self, *prompts, max_tokens=8):
        """Answer the prompts together: (replies, restored lengths, proposals)."""
        run = drafted(self.model, self.drafter, self.kind, self.manager)
        proposed = self.drafter.proposed if self.drafter is not None else []
        proposed.clear()
        return *run.ask(*prompts, max_tokens=max_tokens), list(proposed)

    def assert_drafts_as_cold(self, prompt, restored):
        """A prompt restores so much, and is drafted round by round as a cold one."""
        warm, cached, of_warm = self.ask(prompt)
        manager, self.manager = self.manager, make_manager()
        cold, _, of_cold = self.ask(prompt)
        self.manager = manager
        assert cached == [restored]
        assert warm == cold
        assert of_warm == of_cold and of_warm


@pytest.fixture(params=list(DRAFTERS))
def server(request):
    return Server(request.param)


def test_after_a_prompt(server):
    prompt = prompt_of(40, 1)
    server.ask(prompt, max_tokens=1)
    # The last token of a prompt is read with the first of the reply.
    server.assert_drafts_as_cold(prompt + prompt_of(9, 2), 39)


def test_after_replies(server):
    """The newest token of a reply is not processed."""
    asked = prompt_of(40, 1)
    for seed in range(2, 5):
        (reply,), _, _ = server.ask(asked, max_tokens=7 + seed)
        known = asked + reply
        asked = known + prompt_of(6, seed)
    server.assert_drafts_as_cold(asked, len(known) - 1)


def test_after_a_split(server):
    """Where two prompts have parted, a third one is resumed."""
    shared = prompt_of(30, 1)
    for seed in (2, 3):
        server.ask(shared + [seed] + prompt_of(12, seed), max_tokens=2)
    server.assert_drafts_as_cold(shared + [4] + prompt_of(12, 4), 30)


def test_warm_rows_of_one_batch(server, monkeypatch):
    # Where batches could join, rows that share rounds are proposed other numbers of tokens.
    monkeypatch.setenv("MLX_VLM_DRAFT_MERGE", "never")
    asks = []
    for seed, length in enumerate((40, 23)):
        prompt = prompt_of(length, seed)
        (reply,), _, _ = server.ask(prompt)
        asks.append(prompt + reply + prompt_of(5 + seed, 9))
    warm, cached, proposed = server.ask(*asks)
    assert all(cached)
    server.manager = make_manager()
    of_cold = []
    for reply, asked in zip(warm, asks, strict=True):
        (cold,), _, rounds = server.ask(asked)
        assert reply == cold
        of_cold += rounds
    # Warm rows of a recurrent target go one by one, in whichever order.
    assert sorted(proposed) == sorted(of_cold)


def test_what_was_read_without_a_drafter_is_read_again_once(server):
    prompt, drafter = prompt_of(40, 1), server.drafter
    server.drafter = None
    (reply,), _, _ = server.ask(prompt)
    asked = prompt + reply + prompt_of(5, 9)
    server.drafter = drafter
    server.assert_drafts_as_cold(asked, 0)
    server.assert_drafts_as_cold(asked + prompt_of(4, 8), len(asked) - 1)


def test_another_drafter_does_not_take_the_first_one_s_part(server):
    prompt = prompt_of(40, 1)
    server.ask(prompt)
    server.drafter = build_drafter(server.kind, seed=5)
    server.assert_drafts_as_cold(prompt + prompt_of(5, 9), 0)


def test_the_budget_counts_the_drafter(server):
    (reply,), _, _ = server.ask(prompt_of(40, 1))
    segments = server.manager.segments
    held = segments.nbytes
    nodes = [node for tree in segments._trees.values() for node in tree]
    parts = [node.payload.companion for node in nodes]
    assert held == sum(node.nbytes for node in nodes)
    # Keys and values in float32, 2 heads of 16; every token but the newest is held.
    pending = sum(p.pending.nbytes for p in parts if p.pending is not None)
    assert sum(p.nbytes for p in parts) - pending == 256 * (40 + len(reply) - 1)
    server.manager.segments.evict_to(0)
    assert server.manager.segments.nbytes == 0
