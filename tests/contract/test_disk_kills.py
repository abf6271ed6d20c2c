"""Kills at random points while several sessions store: few of them here, the hundreds where slow tests run."""

from __future__ import annotations

import pytest

from tests.stress import kills, server_kills


def check(found, number):
    """That the run met what it was made for; what it restored is checked where it runs."""
    assert found.kills == number and found.served > number // 2
    assert found.replies > number and found.durable and found.verified_tokens


def test_sessions_that_are_killed(tmp_path):
    check(kills.run(tmp_path / "disk", kills=8, sessions=4, seed=3), 8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_sessions_that_are_killed_often(tmp_path):
    found = kills.run(tmp_path / "disk", kills=300, sessions=4, seed=1)
    check(found, 300)
    # Kills meet starts, and files that are being written.
    assert found.at_start and found.stray_files


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whole_servers_that_are_killed(tmp_path):
    counts = server_kills.run(tmp_path, kills=12, sessions=4, seed=2)
    print(counts.line())
    assert counts.kills == 12 and counts.replies > 12
