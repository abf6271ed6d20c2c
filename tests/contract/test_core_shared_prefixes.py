"""Where the prefill of a prompt stops for those that share its beginning."""

from __future__ import annotations

from types import SimpleNamespace

from mlx_vlm_cacheplus.core import shared_prefixes as shared
from tests.contract.prefill_queue import SHARED, ask_all, prompt, server

__all__ = ["server"]


class TestStops:
    """Where layers can be resumed at few places, the leader keeps one for its followers."""

    def plan(self, server, ids, stops):
        coordinator = SimpleNamespace(manager=server.apc_manager)
        return shared.add_shared_stops(coordinator, ids, stops)

    def test_of_one_that_has_not_begun(self, server):
        ask_all(server)
        server.turn()
        final = len(prompt(1)) - 1
        assert self.plan(server, prompt(1, 500), [600]) == [600]
        assert self.plan(server, prompt(1), []) == []
        assert self.plan(server, prompt(1), [20, final]) == [20, len(SHARED), final]
        near = len(SHARED) - 3
        assert self.plan(server, prompt(1), [near, final]) == [near, final]

    def test_of_one_that_is_being_read(self, server):
        server.ask("r1", prompt(1, 500))
        server.turn()
        server.generator.begin(checkpoints=True, done=100)
        server.ask("r2", prompt(2))
        assert server.turn() == []
        (meta,) = server.generator._prompt_batch._apc_meta
        assert meta["checkpoint_lengths"] == [len(SHARED), len(prompt(1, 500)) - 1]

    def test_one_that_has_passed_it_is_not_waited_for(self, server):
        server.ask("r1", prompt(1, 500))
        server.turn()
        server.generator.begin(checkpoints=True, done=len(SHARED) + 5)
        server.ask("r2", prompt(2))
        assert server.turn() == ["r2"]

    def test_a_dense_one_keeps_all_it_has_read(self, server):
        server.ask("r1", prompt(1, 500))
        server.turn()
        server.generator.begin(done=len(SHARED) + 5)
        server.ask("r2", prompt(2))
        assert server.turn() == []

    def test_plans_are_bounded(self, server):
        for number in range(2 * shared.PLANS):
            row = shared.Row(shared.Prompt(lambda n=number: prompt(n), 0))
            shared._plan_stop(server.apc_manager, row, len(SHARED))
        assert len(server.apc_manager.shared_stops) <= shared.PLANS
