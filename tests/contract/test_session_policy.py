"""Who goes first when several sessions share the bytes."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_vlm_cacheplus.core import session_policy
from mlx_vlm_cacheplus.core.segment_tree import Lease, SegmentTree
from mlx_vlm_cacheplus.core.session_policy import Claim, fair_level
from tests.contract.test_eviction import Part


class Server:
    """A tree that sessions write into: one byte a token, ten for an end state."""

    def __init__(self, with_states=False):
        self.tree = SegmentTree(needs_states=with_states)
        self.with_states = with_states
        self.claims = {}
        self.clock = 0

    def ask(self, session, ids, answered=True, state=True):
        """A request of a session; its whole prompt is answered at its end."""
        self.clock += 1
        self.claims.setdefault(session, Claim(0)).last_use = self.clock
        ids = tuple(ids)
        known = self.tree.match(ids).length
        if known < len(ids):
            kept = self.with_states and state
            self.tree.insert(ids, Part(len(ids) - known, kept))
        node = self.tree.node_at(ids)
        for passed in node.path():
            passed.last_use = self.clock
            passed.born = passed.born or self.clock
            passed.sessions |= {session}
        if answered and len(ids) not in node.turns:
            node.turns += (len(ids),)
        self.tree.check_invariants()
        return node

    def hold(self, budget, asking=None, wanted=0, path=()):
        """Lose until so many bytes are left; the losses, by last token of their node.

        path: what the request that asks for room stands on.
        """
        stands = self.tree.match(tuple(path)).nodes
        lease = Lease(stands[-1]) if stands else None
        lost = []
        found = session_policy.losses([self.tree], self.claims, budget, asking, wanted)
        while self.tree.nbytes > budget - wanted:
            loss = next(found, None)
            if loss is None:
                break
            kind, tree, node = loss
            lost.append((kind, node.ids[-1]))
            if kind == "state":
                tree.update(node, Part.drop)
            else:
                tree.remove(node)
            tree.check_invariants()
        if lease is not None:
            lease.release()
        return lost

    def held(self, ids):
        return self.tree.match(tuple(ids)).length

    def talk(self, session, start, turns, size=4):
        """A conversation of so many turns; every token is the session's own."""
        ids = list(start)
        for turn in range(turns):
            ids += [1000 * session + 100 * turn + n for n in range(size)]
            self.ask(session, ids)
        return ids


SYSTEM = (1, 2, 3, 4)


def leaves(lost):
    return [last for kind, last in lost if kind == "leaf"]


def test_the_whole_order():
    server = Server()
    idle = server.talk(9, (90,), 2)
    over = server.talk(2, SYSTEM, 5)
    left = server.talk(3, SYSTEM, 2)
    title = server.ask(4, (70, 71, 72))
    again = [*SYSTEM, 3000, 3001, 3002, 3003, 55, 56]
    server.ask(3, again)
    server.claims[9].live = False
    lost = leaves(server.hold(0))
    order = {last: place for place, last in enumerate(lost)}
    assert order[left[-1]] < order[title.ids[-1]] < order[idle[-1]] < order[over[-1]]
    assert order[over[-1]] < order[again[-1]]
    assert lost[-1] == SYSTEM[-1]


def test_a_rewritten_turn_goes_before_a_title_and_the_new_one_stays():
    server = Server()
    server.ask(1, (1, 2, 3))
    server.ask(1, (1, 2, 3, 4, 5))
    server.ask(2, (70, 71))
    server.ask(1, (1, 2, 3, 6, 7))
    assert leaves(server.hold(7)) == [5]
    assert leaves(server.hold(5)) == [71]
    assert server.held((1, 2, 3, 6, 7)) == 5


def test_a_branch_that_the_session_came_back_to_is_not_dead():
    server = Server()
    server.ask(1, (1, 2, 3))
    server.ask(1, (1, 2, 3, 4, 5))
    server.ask(1, (1, 2, 3, 6, 7))
    server.ask(1, (1, 2, 3, 4, 5, 8))
    server.ask(2, (70, 71))
    assert leaves(server.hold(8)) == [71]


def test_branches_of_different_sessions_are_not_dead():
    server = Server()
    server.ask(1, (1, 2, 3))
    server.ask(1, (1, 2, 3, 4, 5))
    server.ask(2, (1, 2, 3, 6, 7))
    server.ask(3, (70, 71))
    assert leaves(server.hold(7)) == [71]


def test_a_second_conversation_under_one_name_is_no_rewrite_of_the_first():
    """A sub-agent, or a title request, that sends its parent's session id."""
    server = Server()
    main = server.talk(1, SYSTEM, 3)
    server.talk(1, SYSTEM, 0)
    server.ask(1, (*SYSTEM, 60, 61))
    server.ask(1, (*SYSTEM, 60, 61, 62))
    server.ask(2, (70, 71))
    assert leaves(server.hold(server.tree.nbytes - 1)) == [71]
    assert server.held(main) == len(main)


def test_what_cannot_be_resumed_goes_before_what_can():
    server = Server(with_states=True)
    server.ask(1, (1, 2, 3))
    server.ask(1, (1, 2, 3, 4))
    server.ask(2, (5, 6), state=False)
    lost = server.hold(server.tree.nbytes - 11)
    assert lost == [("state", 3), ("leaf", 6)]


def test_after_a_leaf_its_segment_without_a_state_is_useless_and_goes_next():
    server = Server(with_states=True)
    for ids in ((1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6)):
        server.ask(1, ids)
    server.ask(2, (7, 8))
    server.ask(2, (7, 8, 9))
    lost = server.hold(server.tree.nbytes - 30 - 16)
    assert [kind for kind, _ in lost].count("state") == 3
    assert leaves(lost) == [6, 4, 2]
    assert server.held((7, 8, 9)) == 3


def test_leased_and_pinned_segments_stay():
    server = Server()
    one = server.talk(1, SYSTEM, 2)
    two = server.talk(2, SYSTEM, 2)
    other = server.talk(3, (90,), 2)
    lease = Lease(server.tree.node_at(tuple(two)))
    server.claims[1].pinned = True
    assert leaves(server.hold(0)) == [other[-1], other[4], 90] or not server.held(other)
    assert server.held(one) == len(one) and server.held(two) == len(two)
    lease.release()


def test_fifty_titles_displace_each_other_and_nobody_else():
    server = Server()
    main = server.talk(1, SYSTEM, 3)
    budget = server.tree.nbytes + 8
    for number in range(50):
        server.hold(budget, asking=100 + number, wanted=5)
        server.ask(100 + number, [5000 + 10 * number + n for n in range(5)])
        assert server.tree.nbytes <= budget
        assert server.held(main) == len(main)


def test_room_for_a_greedy_session_is_not_taken_from_those_within_their_share():
    server = Server()
    small = [server.talk(n, SYSTEM, 2) for n in (1, 2, 3)]
    budget = server.tree.nbytes + 12
    server.claims[9] = Claim(99)
    assert server.hold(budget, asking=9, wanted=20) == []
    for ids in small:
        assert server.held(ids) == len(ids)


def test_what_was_lent_is_called_back():
    server = Server()
    large = server.talk(1, (90,), 10)
    small = server.talk(2, (80,), 1)
    budget = server.tree.nbytes
    for turn in range(2, 5):
        server.hold(budget, asking=2, wanted=4, path=small)
        small += [80 * 100 + 10 * turn + n for n in range(4)]
        server.ask(2, small)
    assert server.held(small) == len(small)
    assert server.held(large) < len(large)
    assert server.tree.nbytes <= budget


@given(
    asked=st.lists(st.integers(0, 1000), max_size=12),
    budget=st.integers(0, 6000),
)
def test_the_fair_level(asked, budget):
    level = fair_level(asked, budget)
    given_out = sum(min(nbytes, level) for nbytes in asked)
    if sum(asked) <= budget:
        assert level == float("inf")
    else:
        assert abs(given_out - budget) < 1e-6


STEPS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=40
)


@settings(deadline=None)
@given(steps=STEPS, titles=st.booleans())
def test_with_a_budget_of_the_working_set_nobody_reads_again(steps, titles):
    """Conversations in any order, with titles between them and room for one of these."""
    final = {n: sum(size for who, size in steps if who == n) for n, _ in steps}
    budget = len(SYSTEM) + sum(final.values()) + (3 if titles else 0)
    server = Server()
    talks = {n: list(SYSTEM) for n in final}
    started = set()
    for place, (who, size) in enumerate(steps):
        if titles and len(started) == len(final):
            server.hold(budget, asking=500 + place, wanted=3)
            server.ask(500 + place, [90000 + 10 * place + n for n in range(3)])
        known = talks[who]
        if who in started:
            assert server.held(known) == len(known)
        talks[who] = known + [10000 * (who + 1) + 10 * place + n for n in range(size)]
        server.hold(budget, asking=who, wanted=size, path=known)
        # Two requests, so that what is not extended is the titles alone.
        server.ask(who, talks[who][:-1] or talks[who], answered=who not in started)
        server.ask(who, talks[who])
        started.add(who)
        assert server.tree.nbytes <= budget


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(2, 6), min_size=1, max_size=5),
    cold=st.lists(st.integers(1, 60), min_size=1, max_size=12),
)
def test_an_intruder_costs_nobody_within_the_share(sizes, cold):
    """Each session asks for less than an equal part of the budget, whatever comes."""
    server = Server()
    part = len(SYSTEM) + 3 * max(sizes) + 1
    budget = part * (len(sizes) + 1)
    talks = {n: list(SYSTEM) for n in range(len(sizes))}
    for turn in range(3):
        for who, size in enumerate(sizes):
            assert server.held(talks[who]) == (
                len(talks[who]) if turn else server.held(SYSTEM)
            )
            server.hold(budget, asking=who, wanted=size, path=talks[who])
            talks[who] += [1000 * (who + 1) + 100 * turn + n for n in range(size)]
            server.ask(who, talks[who])
        # Until its second turn a conversation is what a cold prompt is.
        for place, size in enumerate(cold if turn else ()):
            server.claims.setdefault(99, Claim(server.clock))
            lost = server.hold(budget, asking=99, wanted=size)
            assert len(lost) <= server.clock
            if server.tree.nbytes + size <= budget:
                server.ask(
                    99, [50000 + 5000 * turn + 100 * place + n for n in range(size)]
                )
            assert server.tree.nbytes <= budget
            for ids in talks.values():
                assert server.held(ids) == len(ids)


def test_eviction_of_thousands_of_segments_is_not_quadratic():
    def seconds(count):
        server = Server()
        for n in range(count):
            server.claims[n] = Claim(n)
            node = server.tree.insert((n, 1), Part(2))
            node.sessions, node.turns = frozenset({n}), (1, 2)
        start = time.process_time()
        assert len(server_losses(server)) == count
        return time.process_time() - start

    def server_losses(server):
        found = session_policy.losses([server.tree], server.claims, 0)
        return [server.tree.remove(node) for _, _, node in found]

    small, large = seconds(500), seconds(5000)
    assert large < 60 * max(small, 0.001)
