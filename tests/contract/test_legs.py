"""What a leg expects of each test: above all, with one change left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import legs
from tests.legs import Leg, with_dependents
from tools import run_legs
from tools.run_legs import leg_environment

REQUIRES = {
    "rows": (),
    "tree": ("rows",),
    "drafts": (),
    "state": ("drafts", "tree"),
    "record": (),
}


class Item:
    """A collected test that names some changes, or none: then it is a guard."""

    def __init__(self, *names: str, given: tuple[str, ...] = (), case: str = ""):
        self.nodeid = f"test of {names}"
        self.names, self.given = names, given
        self.callspec = SimpleNamespace(id=case)
        self.added: list[pytest.MarkDecorator] = []

    def get_closest_marker(self, name: str) -> object:
        return None if self.names else object()

    def iter_markers(self, name: str) -> list[SimpleNamespace]:
        args = self.names if name == "change" else self.given
        return [SimpleNamespace(args=args)] if args else []

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.added.append(marker)

    @property
    def must_fail(self) -> bool:
        return any(
            m.mark.name == "xfail"
            and m.mark.kwargs["strict"]
            and m.mark.kwargs["raises"] is AssertionError
            for m in self.added
        )


class Config:
    """As much of pytest's as ``expect`` needs."""

    def __init__(self, items: list[Item]):
        self.stash = pytest.Stash()
        self.stash[legs._ITEMS] = items  # type: ignore[assignment]
        self.left: list[Item] = []
        self.hook = self

    def pytest_deselected(self, items: list[Item]) -> None:
        self.left += items


def outcomes(leg: Leg, *tests: tuple[str, ...]) -> list[str]:
    """What each test must do: fail, pass, or not run."""
    items = [Item(*names) for names in tests]
    config = Config(list(items))
    leg.expect(config, items)  # type: ignore[arg-type]
    kept = config.stash[legs._ITEMS]
    assert [i for i in items if i not in config.left] == kept
    words = {True: "fail", False: "pass"}
    return [words[i.must_fail] if i in kept else "not run" for i in items]


@pytest.mark.parametrize(
    ("name", "out"),
    [
        ("record", {"record"}),
        ("drafts", {"drafts", "state"}),
        ("rows", {"rows", "tree", "state"}),
    ],
)
def test_what_requires_a_change_goes_with_it_at_any_distance(name, out):
    assert with_dependents(name, REQUIRES) == out


def test_a_change_that_nobody_knows_is_refused():
    with pytest.raises(pytest.UsageError, match="nobody"):
        with_dependents("nobody", REQUIRES)


TESTS = [("tree",), ("state",), ("rows",), ("tree", "drafts"), ("rows", "state"), ()]


@pytest.mark.parametrize("only, other", [("", "pass"), ("tree", "not run")])
def test_without_one_change_its_tests_must_fail(monkeypatch, only, other):
    monkeypatch.setenv("CACHEPLUS_ONLY", only)
    out = with_dependents("tree", REQUIRES)
    leg = Leg("M", "stock", "on", off="tree", out=out)
    expected = ["fail", "not run", other, "fail", "not run", other]
    assert outcomes(leg, *TESTS) == expected
    assert "without state, tree" in leg.describe()


@pytest.mark.parametrize("name", ["S", "R"])
def test_without_all_every_test_but_a_guard_must_fail(name):
    leg = Leg(name, "stock", "off")
    assert outcomes(leg, *TESTS) == ["fail"] * 5 + ["pass"]


def test_with_all_every_test_must_pass():
    assert outcomes(Leg("M", "stock", "on"), *TESTS) == ["pass"] * 6


def test_one_change_is_left_out_in_leg_m_alone(monkeypatch):
    monkeypatch.setenv("CACHEPLUS_OFF", "segment-tree")
    with pytest.raises(pytest.UsageError, match="leg M"):
        legs.enter("S")


def test_what_the_caller_has_set_does_not_decide():
    env = leg_environment("M", None, None)
    assert env["CACHEPLUS_OFF"] == env["CACHEPLUS_ONLY"] == ""


@pytest.mark.parametrize(
    ("given", "case", "found"),
    [
        (("tree",), "", ["tree"]),
        (("tree", "hybrid"), "hybrid-chat", ["tree"]),
        (("tree", "hybrid"), "dense-chat", []),
        ((), "hybrid", []),
    ],
)
def test_what_other_changes_give_too_is_said_by_case(given, case, found):
    item = Item("tree", "rows", given=given, case=case)
    assert legs.given_by_others(item) == found


def test_it_is_said_of_a_change_that_the_test_names():
    with pytest.raises(pytest.UsageError, match="not all named"):
        legs.given_by_others(Item("rows", given=("tree",)))


@pytest.mark.parametrize(("leg", "added"), [("M", 0), ("S", 1)])
def test_without_one_change_what_others_give_is_left_out(leg, added):
    out = frozenset({"tree"} if leg == "M" else ())
    leg = Leg(leg, "stock", "on", off="tree" if out else None, out=out)
    item = Item("tree", given=("tree",))
    config = Config([item])
    leg.expect(config, [item])
    assert len(item.added) == added and len(config.left) == 1 - added


@pytest.mark.parametrize(("xfailed", "code"), [(1, 0), (0, 1)])
def test_without_a_change_that_no_test_notices_the_run_fails(
    monkeypatch, xfailed, code
):
    found = run_legs.Outcome("", 0, 0.0, {"passed": 2, "xfailed": xfailed})
    monkeypatch.setattr(run_legs, "run", lambda *_: found)
    outcome = run_legs.run_without("tree", [])
    assert outcome.code == code
    assert ("No test notices that tree" in outcome.output) == bool(code)
