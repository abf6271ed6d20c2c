"""What every behaviour test has: its leg, and the in-process server.

A behaviour test knows no plugin.  It names what makes it pass:

    @pytest.mark.change("output-tokens")   fails on stock, passes with that change
    @pytest.mark.guard                     stock does it right, and so must every leg

The leg comes from CACHEPLUS_LEG (see tests/legs.py and tools/run_legs.py).
"""

from __future__ import annotations

import logging

import pytest

from tests import legs

LEG = legs.enter()  # before any test module imports mlx_vlm


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers."""
    for line in legs.MARKERS:
        config.addinivalue_line("markers", line)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Take the sample that is asked for, and set the expectation of the leg."""
    items[:] = legs.sample(config, items)
    legs.remember_items(config, items)
    LEG.expect(config, [item for item in items if legs.is_behaviour(item)])


@pytest.fixture(scope="session", autouse=True)
def leg():
    """The leg of this process; checked once more when all tests have run."""
    yield LEG
    legs.finish(LEG)


def pytest_report_header() -> str:
    """Say which leg runs."""
    return f"cacheplus leg: {LEG.describe()}"


@pytest.fixture(scope="session")
def host():
    """The process' one HTTP server with stock's application."""
    from tests.fakes.host import serving

    logging.getLogger("mlx_vlm.server").setLevel(logging.WARNING)
    with serving() as running:
        yield running


@pytest.fixture
def make_server(host):
    """Give ``make_server(model, **settings) -> TinyServer``; see tests/fakes/server.py.

    What a test has left running has ended before the next one.
    """
    from tests.fakes.host import Settings, resolve_model
    from tests.fakes.server import TinyServer

    def make(model: str = "hybrid", **settings):
        for name in ("draft_model",):
            if settings.get(name):
                settings[name] = resolve_model(settings[name])
        if isinstance(settings.get("env"), dict):
            settings["env"] = tuple(sorted(settings["env"].items()))
        if settings.get("disk") is not None:
            settings["disk"] = str(settings["disk"])
        return TinyServer(host, Settings(resolve_model(model), **settings))

    yield make
    host.settle()
