"""The documents name what is there: every module, every change, every link, every command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlx_vlm_cacheplus import cli
from mlx_vlm_cacheplus.changes import load_changes

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = ROOT / "docs" / "ARCHITECTURE.md"
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "upstream-pr").glob("*.md"),
    ]
)
PR_SECTIONS = ["Summary", "Why", "Behaviour", "Validation", "Depends on"]
PATCHED = [change.name for change in load_changes() if change.has_patch]


def quoted(text: str) -> set[str]:
    """What stands between single backticks, fenced blocks aside."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S)))


def section(text: str, start: str, end: str) -> str:
    return text[text.index(start) : text.index(end)]


def missing_modules(folder: Path, text: str) -> list[str]:
    """Modules of a folder that a text does not name by their path in it."""
    names = quoted(text)
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    return sorted(set(paths) - names)


@pytest.mark.parametrize(
    ("folder", "start", "end"),
    [
        (
            "mlx_vlm_cacheplus",
            "Paths below `mlx_vlm_cacheplus/`",
            "Paths below `tools/`",
        ),
        ("tools", "Paths below `tools/`", "Other folders"),
    ],
)
def test_architecture_names_every_module(folder, start, end):
    text = section(ARCHITECTURE.read_text(encoding="utf-8"), start, end)
    assert (
        missing_modules(ROOT / folder, text) == []
    ), f"say in docs/ARCHITECTURE.md what these modules of {folder}/ do"


def test_architecture_names_no_module_that_is_gone():
    text = ARCHITECTURE.read_text(encoding="utf-8")
    parts = {
        "mlx_vlm_cacheplus": section(text, "Paths below `mlx", "Paths below `tools/`"),
        "tools": section(text, "Paths below `tools/`", "Other folders"),
    }
    gone = [
        name
        for folder, part in parts.items()
        for name in quoted(part)
        if name.endswith(".py") and not (ROOT / folder / name).is_file()
    ]
    assert gone == []


def test_architecture_says_what_every_change_wraps():
    text = ARCHITECTURE.read_text(encoding="utf-8")
    table = section(text, "## What each change wraps", "## States and rollback")
    for change in load_changes():
        (row,) = [r for r in table.splitlines() if r.startswith(f"| `{change.name}` |")]
        wrapped = {target.qualname.split(".")[-1] for target in change.targets}
        missing = {name for name in wrapped if not re.search(rf"\b{name}`", row)}
        assert not change.has_patch or not missing, f"{change.name}: {missing}"


@pytest.mark.parametrize("name", PATCHED)
def test_pr_text_has_the_sections_that_upstream_reads(name):
    text = (ROOT / "upstream-pr" / f"{name}.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == PR_SECTIONS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_of_make_and_subcommands_exist(page):
    text = page.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    code = "\n".join([*re.findall(r"```.*?```", text, re.S), *quoted(text)])
    called = set(re.findall(r"(?:^|[`\s])make ([a-z-]+)", code, re.MULTILINE))
    words = set(re.findall(r"^mlx-vlm-cacheplus ([a-z]+)", code, re.MULTILINE))
    assert called - targets == set()
    assert words - set(cli.COMMANDS) == set()
