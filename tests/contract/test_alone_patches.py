"""The patches that can be taken by themselves: each on a tree with what it requires, and no more."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from mlx_vlm_cacheplus.fingerprint import StockTree
from tools import make_patches, patch_alone, patch_lint, patch_series, run_legs
from tools.patch_stock import require_pristine
from tools.patch_tree import (
    Delete,
    Edit,
    PatchProblem,
    Tree,
    WithFile,
    apply_edit,
    either,
    within_either,
)

# Large files of upstream's are formatted once for each patch.
pytestmark = pytest.mark.timeout(900)

ALONE = make_patches.alone_patches()
NEEDED = {
    name: [
        Path(patch).stem
        for patch in patch_alone.needed_patches(patch_series.FOLDER / file)
    ]
    for name, file in ALONE.items()
}


@pytest.fixture(scope="module")
def stock():
    folder = make_patches.installed_stock()
    try:
        require_pristine(folder, patch_series.VERSION)
    except PatchProblem as problem:
        pytest.skip(str(problem))
    return folder


@pytest.fixture(scope="module")
def built(stock):
    return patch_alone.build_alone(stock, patch_series.build_series(stock))


@pytest.fixture(scope="module", params=ALONE)
def applied(request, stock, tmp_path_factory):
    """A change, and a copy of the stock to which git applied its patch and those it needs."""
    folder = tmp_path_factory.mktemp("alone")
    return request.param, make_patches.apply_alone(stock, folder, request.param)


def test_patches_are_for_a_tree_with_what_the_change_requires_and_no_more(built):
    changes = patch_alone.with_patch()
    assert [a.step.change.name for a in built] == list(ALONE)
    for name, needed in NEEDED.items():
        assert [*needed, name] == patch_alone.closure(name, changes)
    bare = {name for name in ALONE if not changes[name].requires}
    assert {name for name, needed in NEEDED.items() if not needed} == bare


def test_they_apply_without_fuzz(stock, built):
    ways = [patch.steps for patch in built]
    assert patch_lint.lint_alone(patch_series.FOLDER, ways, stock) == []


def test_a_patch_that_is_the_series_own_is_not_there_twice():
    folder = patch_series.FOLDER
    for path in (folder / "alone").iterdir():
        assert path.read_bytes() != (folder / path.name).read_bytes()


def test_the_tree_has_the_change_and_what_it_requires(applied):
    name, package = applied
    tree = StockTree(package)
    found = [n for n, c in patch_alone.with_patch().items() if c.probe(tree)]
    assert found == [*NEEDED[name], name]


def test_the_tree_has_all_that_its_own_files_import(applied, stock):
    _, package = applied
    missing = []
    for path in package.rglob("*.py"):
        text, old = path.read_bytes(), stock / path.relative_to(package)
        before = old.read_bytes() if old.is_file() else b""
        if before != text:
            new = relative_imports(text) - relative_imports(before)
            missing += [(path.name, *name) for name in new if not is_there(path, name)]
    assert missing == []


def relative_imports(text):
    """(level, module, name) of each ``from .x import y``."""
    return {
        (node.level, node.module or "", alias.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }


def is_there(path, imported):
    """Whether a module has the name, or a package has a module of that name, or the name."""
    level, module, name = imported
    place = path.parents[level - 1] / module.replace(".", "/")
    if place.with_suffix(".py").is_file() and module:
        return re.search(rf"\b{name}\b", place.with_suffix(".py").read_text())
    inner = place / name
    if inner.is_dir() or inner.with_suffix(".py").is_file():
        return True
    init = place / "__init__.py"
    return init.is_file() and re.search(rf"\b{name}\b", init.read_text())


def test_readme_says_on_what_each_patch_applies():
    text = (patch_series.ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([a-z-]+)\]\((patches/\S+)\) \|.*\| (.*) \|$", text, re.M)
    assert [name for name, _, _ in rows] == list(patch_alone.with_patch())
    for name, file, on in rows:
        if name not in ALONE:
            assert (file, on) == (
                f"patches/0.7.10/{name}.patch",
                "the series before it",
            )
            continue
        assert file == f"patches/0.7.10/{ALONE[name]}"
        assert on == (", ".join(NEEDED[name]) or "0.7.10")


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_the_patchs_own_tests_pass_on_its_tree(name, tmp_path):
    outcome = run_legs.run_patch_tests(name, tmp_path, alone=True)
    assert outcome.is_good and outcome.counts["passed"], outcome.output[-4000:]


# -- the tools, on small texts ----------------------------------------------------

FILE = "mlx_vlm/a.py"
TEXT = "class A:\n    def f(self):\n        return 1\n\n    def g(self):\n        return 2\n"


@pytest.fixture
def small(tmp_path):
    tree = Tree(tmp_path)
    tree.write(FILE, TEXT)
    return tree


def test_of_several_edits_the_one_that_fits_is_made(small):
    edit = either(
        Edit(FILE, "return 3", "return 4"), Edit(FILE, "return 2", "return 5")
    )
    assert edit.path == FILE
    apply_edit(small, edit, "some-change")
    assert small.read(FILE) == TEXT.replace("return 2", "return 5")


def test_an_edit_lands_in_the_function_that_has_its_anchor(small):
    edit = within_either(Edit(FILE, "return 2", "return 5"), "A.h", "A.f", "A.g")
    apply_edit(small, edit, "some-change")
    assert small.read(FILE) == TEXT.replace("return 2", "return 5")


@pytest.mark.parametrize(
    ("anchors", "words"),
    [
        (("return 1", "return 2"), "several edits fit"),
        (("return 3", "return 4"), "return 3\nor else some-change: mlx_vlm/a.py"),
    ],
)
def test_edits_of_which_not_one_fits_are_refused(small, anchors, words):
    edits = [Edit(FILE, anchor, "pass") for anchor in anchors]
    with pytest.raises(PatchProblem) as problem:
        apply_edit(small, either(*edits), "some-change")
    assert words in str(problem.value)
    assert small.read(FILE) == TEXT


def test_an_edit_is_left_out_where_the_file_it_is_for_is_not_there(small):
    apply_edit(small, WithFile(Delete("mlx_vlm/b.py", "f")), "some-change")
    apply_edit(small, WithFile(Delete(FILE, "A.f"), "mlx_vlm/b.py"), "some-change")
    assert small.read(FILE) == TEXT
    apply_edit(small, WithFile(Delete(FILE, "A.f"), FILE), "some-change")
    assert "def f" not in small.read(FILE)
    with pytest.raises(PatchProblem, match=r"has no A\.h"):
        apply_edit(small, WithFile(Delete(FILE, "A.h")), "some-change")
