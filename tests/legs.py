"""The five legs that the behaviour tests run in, each in a process of its own.

    leg  tree     plugin              a marked test must
    S    stock    off                 fail (strict: a pass says "already upstream?")
    P    patched  not imported        pass
    M    stock    on                  pass
    PM   patched  on                  pass; every change reports already_upstream
    R    stock    applied, reverted   fail as in S; every target the original object

CACHEPLUS_LEG names the leg (default M).  CACHEPLUS_UPTO, in P and PM, names the
last patch of the series that the tree has: tests of later changes are
deselected.  CACHEPLUS_OFF, in M, names one change that is not applied, nor are those
that require it: a test that names it must fail as in S, so that no other change
passes it.  Those that say that others do (given_by_others), and tests of the changes
that go with it, are deselected.  CACHEPLUS_ONLY
deselects what does not name that change.  ``tools/run_legs.py`` sets all of it and
prints the table.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BEHAVIOUR = ROOT / "tests" / "behaviour"
SERIES = ROOT / "patches" / "0.7.10" / "series"
PLUGIN = "mlx_vlm_cacheplus"
SWITCH = "MLX_VLM_CACHEPLUS"
MARKERS = (
    "change(name): fails on stock and passes with that change",
    "guard: stock does it right; every leg must pass",
    "given_by_others(name, id...): without that change other changes give what the test, or its cases whose ids begin so, "
    "looks at",
)
# What a test on stock may fail with: its own assertions, and the server's errors
# (tests.fakes.replies.RequestFailed is an AssertionError).
EXPECTED_FAILURE = AssertionError


def series(path: Path = SERIES) -> list[str]:
    """Return the change names of the patch series, in order."""
    lines = path.read_text().splitlines() if path.is_file() else []
    names = [line.split("#")[0].strip() for line in lines]
    return [name.removesuffix(".patch") for name in names if name]


def is_behaviour(item: pytest.Item) -> bool:
    """Whether an item is one of the behaviour tests."""
    return BEHAVIOUR in Path(item.path).parents


def sample(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return CACHEPLUS_SAMPLE tests of each file, evenly spread; all where it is not set.

    Tests that leave are reported as deselected.
    """
    wanted = int(os.environ.get("CACHEPLUS_SAMPLE") or 0)
    if not wanted:
        return items
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(Path(item.path), []).append(item)
    kept = {
        id(group[index * len(group) // min(wanted, len(group))])
        for group in files.values()
        for index in range(min(wanted, len(group)))
    }
    leaving = [item for item in items if id(item) not in kept]
    if leaving:
        config.hook.pytest_deselected(items=leaving)
    return [item for item in items if id(item) in kept]


def changes_of(item: pytest.Item) -> list[str]:
    """Return the changes that a test names; none for a guard, whatever its module names."""
    if item.get_closest_marker("guard") is not None:
        return []
    return [name for mark in item.iter_markers("change") for name in mark.args]


def given_by_others(item: pytest.Item) -> list[str]:
    """Return the changes that a test names and that it does not tell from others."""
    case = getattr(getattr(item, "callspec", None), "id", "")
    marks = [mark.args for mark in item.iter_markers("given_by_others")]
    found = [name for name, *ids in marks if not ids or case.startswith(tuple(ids))]
    if not set(found) <= set(changes_of(item)):
        raise pytest.UsageError(f"{item.nodeid}: {found} are not all named by it")
    return found


@dataclass
class Leg:
    """One leg: what is done before the tests, and what is expected of them."""

    name: str
    tree: str
    plugin: str
    upto: str | None = None
    # The change that is left out, and all that are out because of it.
    off: str | None = None
    out: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)

    def must_fail(self, names: Sequence[str]) -> bool:
        """Whether a test that names these changes must fail."""
        return bool(names) and (self.name in ("S", "R") or self.off in names)

    def can_run(self, names: Sequence[str]) -> bool:
        """Whether all that a test names is in effect."""
        applied = self.applied()
        return self.out.isdisjoint(names) and (
            applied is None or set(names) <= set(applied)
        )

    def describe(self) -> str:
        """Return one line for the report header."""
        upto = f", patches up to {self.upto}" if self.upto else ""
        upto += f", without {', '.join(sorted(self.out))}" if self.off else ""
        notes = "".join(f"; {note}" for note in self.notes)
        return f"{self.name} ({self.tree} tree, plugin {self.plugin}{upto}){notes}"

    def applied(self) -> list[str] | None:
        """Return the changes in effect, or None for all."""
        if self.upto is None:
            return None
        names = series()
        if self.upto not in names:
            raise pytest.UsageError(f"CACHEPLUS_UPTO={self.upto} is not in {SERIES}")
        return names[: names.index(self.upto) + 1]

    def expect(self, config: pytest.Config, items: Sequence[pytest.Item]) -> None:
        """Mark or deselect the collected behaviour tests for this leg."""
        only = os.environ.get("CACHEPLUS_ONLY")
        dropped = []
        for item in items:
            names = changes_of(item)
            if not names and item.get_closest_marker("guard") is None:
                raise pytest.UsageError(
                    f"{item.nodeid} names no change: mark it "
                    '@pytest.mark.change("<name>") or @pytest.mark.guard'
                )
            if only and only not in names or self.off in given_by_others(item):
                dropped.append(item)
            elif self.must_fail(names):
                missing = [self.off] if self.off else names
                item.add_marker(_must_fail(self.name, missing))
            elif not self.can_run(names):
                dropped.append(item)
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            all_items = config.stash[_ITEMS]
            all_items[:] = [item for item in all_items if item not in dropped]


_ITEMS: pytest.StashKey[list[pytest.Item]] = pytest.StashKey()


def remember_items(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep pytest's own list, from which ``expect`` deselects."""
    config.stash[_ITEMS] = items


def _must_fail(leg: str, names: Sequence[str]) -> pytest.MarkDecorator:
    return pytest.mark.xfail(
        strict=True,
        raises=EXPECTED_FAILURE,
        reason=f"leg {leg}: without {', '.join(names)} this must fail; "
        "if it passes, upstream or another change gives it, or the test shows nothing",
    )


def enter(name: str | None = None) -> Leg:
    """Bring the process into its leg.  Call before anything imports mlx_vlm."""
    name = name or os.environ.get("CACHEPLUS_LEG") or "M"
    upto = os.environ.get("CACHEPLUS_UPTO") or None
    if os.environ.get("CACHEPLUS_OFF") and name != "M":
        raise pytest.UsageError(f"CACHEPLUS_OFF is for leg M, and this is {name}")
    makers = {
        "S": _enter_stock,
        "P": _enter_patched,
        "M": _enter_plugin,
        "PM": _enter_both,
        "R": _enter_reverted,
    }
    if name not in makers:
        raise pytest.UsageError(f"CACHEPLUS_LEG={name}: one of {', '.join(makers)}")
    if "mlx_vlm" in sys.modules:
        raise pytest.UsageError(
            f"leg {name} must start in a process of its own, but mlx_vlm is imported "
            "already: run tests/behaviour alone"
        )
    return makers[name](upto)


def stock_folder() -> Path:
    """Return the folder of the mlx_vlm package that this process imports."""
    spec = importlib.util.find_spec("mlx_vlm")
    if spec is None or spec.origin is None:
        raise pytest.UsageError("mlx_vlm is not installed")
    return Path(spec.origin).parent


def _require_tree(leg: str, patched: bool) -> None:
    tree = stock_folder()
    if patched and not (tree / PATCHED_MARK).is_file():
        raise pytest.UsageError(
            f"leg {leg} needs a patched tree first on PYTHONPATH, and mlx_vlm is {tree}: "
            "make one with `python tools/make_patches.py --tree DIR`"
        )
    if not patched and (tree / PATCHED_MARK).is_file():
        raise pytest.UsageError(f"leg {leg} runs on stock, but {tree} is patched")


# Written by `make_patches.py --tree`; no patch contains it.
PATCHED_MARK = "CACHEPLUS_PATCHED"


def _plugin() -> Any:
    return importlib.import_module(PLUGIN)


class _NoPlugin:
    """A meta path finder that makes the plugin unimportable."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Refuse the plugin's modules, leave all others to the next finder."""
        if name.split(".")[0] == PLUGIN:
            raise ImportError(f"{name}: this leg runs without the plugin")


def _shut_plugin_out() -> None:
    """As if it were not installed: where it is, its .pth file has imported two modules."""
    os.environ[SWITCH] = "0"
    for name in [n for n in sys.modules if n.split(".")[0] == PLUGIN]:
        del sys.modules[name]
    sys.meta_path.insert(0, _NoPlugin())


def _enter_stock(upto: str | None) -> Leg:
    _shut_plugin_out()
    _require_tree("S", patched=False)
    return Leg("S", "stock", "off")


def _enter_patched(upto: str | None) -> Leg:
    _shut_plugin_out()
    _require_tree("P", patched=True)
    return Leg("P", "patched", "not imported", upto)


def with_dependents(name: str, requires: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Return a change and all that require it, at any distance."""
    if name not in requires:
        raise pytest.UsageError(f"CACHEPLUS_OFF={name}: one of {', '.join(requires)}")
    out = {name}
    while more := {n for n, needs in requires.items() if out & set(needs)} - out:
        out |= more
    return frozenset(out)


def _enter_plugin(upto: str | None) -> Leg:
    _require_tree("M", patched=False)
    off = os.environ.get("CACHEPLUS_OFF") or None
    plugin, out, names = _plugin(), frozenset[str](), None
    if off is not None:
        plugins = importlib.import_module(f"{PLUGIN}.plugins")
        requires = {change.name: change.requires for change in plugins.all_changes()}
        out = with_dependents(off, requires)
        names = [name for name in requires if name not in out]
    report = plugin.activate(names)
    wrong = [
        finding.line()
        for finding in report.findings
        if str(finding.state) != ("off" if finding.name in out else "applied")
    ]
    if wrong:
        raise pytest.UsageError("leg M: not as it must be: " + "; ".join(wrong))
    note = f"applied {len(report.findings) - len(out)}"
    return Leg("M", "stock", "on", off=off, out=out, notes=[note])


def _patched_changes() -> list[str]:
    """Return the names of the changes that have a patch."""
    plugins = importlib.import_module(f"{PLUGIN}.plugins")
    return [change.name for change in plugins.all_changes() if change.has_patch]


def _enter_both(upto: str | None) -> Leg:
    _require_tree("PM", patched=True)
    report = _plugin().activate()
    leg = Leg("PM", "patched", "on", upto)
    there = leg.applied() or _patched_changes()
    wrong = [
        report[name].line()
        for name in there
        if str(report.state(name)) != "already_upstream"
    ]
    if wrong:
        raise pytest.UsageError("leg PM: applied twice? " + "; ".join(wrong))
    leg.notes.append(f"already upstream {len(there)}")
    return leg


def _target_values() -> dict[tuple[str, str], Any]:
    """Return the raw object of every target of every change (None: not there)."""
    plugins = importlib.import_module(f"{PLUGIN}.plugins")
    patching = importlib.import_module(f"{PLUGIN}.patching")
    out = {}
    for change in plugins.all_changes():
        for target in change.targets:
            holder, attribute = patching.resolve_holder(target.module, target.qualname)
            out[target.module, target.qualname] = vars(holder).get(attribute)
    return out


def _enter_reverted(upto: str | None) -> Leg:
    _require_tree("R", patched=False)
    importlib.import_module("mlx_vlm.server")
    before = _target_values()
    report = _plugin().activate()
    wrong = [f.line() for f in report.findings if str(f.state) != "applied"]
    if wrong:
        raise pytest.UsageError("leg R: not applied: " + "; ".join(wrong))
    changed = sum(after is not before[k] for k, after in _target_values().items())
    _plugin().deactivate()
    left = [k for k, after in _target_values().items() if after is not before[k]]
    if left or (before and not changed):
        raise pytest.UsageError(
            f"leg R: {len(left)} targets are not the original object: {left}; "
            f"{changed} of {len(before)} had been wrapped"
        )
    return Leg("R", "stock", "applied, reverted", notes=[f"{changed} targets restored"])


def finish(leg: Leg) -> None:
    """Check at the end of the session what a leg promises about the plugin."""
    present = [name for name in sys.modules if name.split(".")[0] == PLUGIN]
    if leg.name in ("S", "P") and present:
        raise AssertionError(f"leg {leg.name}: the plugin was imported: {present}")
