"""Facts of the registry: one change, one module, one patch, one PR text, joined by its name."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

from mlx_vlm_cacheplus import changes as registry
from mlx_vlm_cacheplus import hookspecs
from mlx_vlm_cacheplus.change import SUPPORTED_VERSIONS, Change, State
from mlx_vlm_cacheplus.commands import patches

from .stock import run_python

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mlx_vlm_cacheplus"
ALL = registry.load_changes()
BY_NAME = pytest.mark.parametrize("change", ALL, ids=lambda change: change.name)


def test_order_lists_every_module_once():
    modules = {path.stem for path in (PACKAGE / "changes").glob("*.py")} - {"__init__"}
    assert sorted(registry.ORDER) == sorted(name.replace("_", "-") for name in modules)
    assert len(set(registry.ORDER)) == len(registry.ORDER)


@BY_NAME
def test_change_is_complete(change):
    assert isinstance(change, Change)
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", change.name)
    module = importlib.import_module(registry.module_name(change.name))
    assert module.CHANGE is change
    for field in ("summary", "why", "upstream", "remove_when"):
        assert getattr(change, field).strip(), f"{change.name} has no {field}"
    assert change.targets and len(set(change.targets)) == len(change.targets)
    assert set(change.versions) <= set(SUPPORTED_VERSIONS)
    assert change.fingerprints is None, "ours are in fingerprints/"
    assert type(change).apply is not Change.apply
    for option in change.options:
        assert option.flag.startswith("--cacheplus-")
        # What completes a setting of stock's stands beside it.
        prefixes = ("MLX_VLM_CACHEPLUS_", "APC_", "MLX_VLM_DRAFT_")
        assert option.env.startswith(prefixes)


@BY_NAME
def test_requirements_come_before(change):
    earlier = registry.ORDER[: registry.ORDER.index(change.name)]
    assert set(change.requires) <= set(earlier)


@BY_NAME
def test_change_says_how_upstream_is_recognised(change):
    """What has a patch must be told apart from a stock that has it; the patched leg depends on it."""
    if change.has_patch:
        assert change.marks or type(change).probe is not Change.probe


@BY_NAME
def test_patch_and_pull_request_text(change):
    row = patches.describe(change)
    if change.has_patch:
        assert row["patch"], f"no patches/{SUPPORTED_VERSIONS[-1]}/{change.name}.patch"
        assert row["pr_text"], f"no upstream-pr/{change.name}.md"
    else:
        assert row["patch"] is None and row["pr_text"] is None


def test_no_patch_without_a_change():
    names = {change.name for change in ALL if change.has_patch}
    found = {path.stem for path in (ROOT / "patches").rglob("*.patch")}
    assert found <= names
    assert {path.stem for path in (ROOT / "upstream-pr").glob("*.md")} - {
        "README"
    } <= names


def test_changes_import_neither_mlx_nor_the_stock():
    code = (
        "import sys; from mlx_vlm_cacheplus.plugins import all_changes; all_changes()\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_vlm', 'numpy', 'transformers')])"
    )
    assert run_python("-c", code).stdout == "[]\n"


def test_core_never_imports_the_plugin():
    """It must stand in the stock's own tree, byte for byte."""
    for path in sorted((PACKAGE / "core").glob("*.py")):
        lines = path.read_text().splitlines()
        imports = [
            line.strip() for line in lines if re.match(r"\s*(from|import) ", line)
        ]
        for line in imports:
            assert "mlx_vlm_cacheplus" not in line, f"{path.name}: {line}"
            assert not line.startswith("from .."), f"{path.name}: {line}"


def test_patching_is_the_only_importer_of_wrapt():
    for path in sorted(PACKAGE.rglob("*.py")):
        found = re.search(r"^\s*(import|from) wrapt", path.read_text(), re.MULTILINE)
        assert not found or path.name == "patching.py", path


HOOKS = {
    name: function
    for name, function in vars(hookspecs).items()
    if name.startswith("cacheplus_")
}


def test_there_are_four_hooks():
    assert len(HOOKS) == 4


@pytest.mark.parametrize("name", HOOKS)
def test_hook_and_its_exact_arguments_are_documented(name):
    arguments = ", ".join(inspect.signature(HOOKS[name]).parameters)
    headings = re.findall(
        r"^## (.+)$", (ROOT / "docs/HOOKS.md").read_text(), re.MULTILINE
    )
    assert f"{name}({arguments})" in headings
    assert inspect.getdoc(HOOKS[name])


def test_no_hook_is_documented_that_does_not_exist():
    text = (ROOT / "docs/HOOKS.md").read_text()
    assert set(re.findall(r"cacheplus_[a-z_]+", text)) <= set(HOOKS)


def test_default_session_names_are_documented():
    from mlx_vlm_cacheplus.core.session_identity import FIELDS, HEADERS
    from mlx_vlm_cacheplus.plugins import identify_session

    text = (ROOT / "docs/SESSIONS.md").read_text()
    headers = [name for _, names in HEADERS for name in names]
    assert all(f"`{name}`" in text for name in (*headers, *FIELDS))
    assert identify_session({headers[-1]: "s", "other": "x"}, {}) == "s"
    assert identify_session({"other": "x"}, {}) is None


def test_every_state_is_documented():
    text = (ROOT / "docs/DOORS.md").read_text()
    assert re.findall(r"^\| `([a-z_]+)` \|", text, re.MULTILINE) == [
        s.value for s in State
    ]


def test_supported_versions_match_the_requirement():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'"mlx-vlm>={SUPPORTED_VERSIONS[0]},<0.8"' in text
    assert (
        f"mlx-vlm=={SUPPORTED_VERSIONS[-1]}" in (ROOT / "constraints.txt").read_text()
    )


def test_continuous_integration_calls_the_makefile():
    commands = [
        line
        for line in (ROOT / ".ci/run").read_text().splitlines()
        if line and not line.startswith("#") and line.split()[0] not in ("set", "cd")
    ]
    assert commands == ["exec make test test-oldest"]


def test_a_set_up_says_what_it_does_before_it_takes_minutes():
    """pip has no -q, with which it would say nothing until it is done."""
    lines = (ROOT / "Makefile").read_text().splitlines()
    (install,) = [n for n, line in enumerate(lines) if "-m pip install" in line]
    assert " -q" not in lines[install]
    told = [line for line in lines[install - 3 : install] if "@echo" in line]
    assert "$(VENV)" in told[0] and "minutes" in told[0]


def test_the_oldest_release_is_the_one_that_is_run():
    makefile = (ROOT / "Makefile").read_text()
    assert f'--legs "" --releases {SUPPORTED_VERSIONS[0]}\n' in makefile
