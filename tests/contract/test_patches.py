"""The patch series: current, clean, and the same code as the plugin's."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_vlm_cacheplus.changes import load_changes
from mlx_vlm_cacheplus.fingerprint import StockTree
from tools import (
    make_patches,
    patch_alone,
    patch_lint,
    patch_series,
    patch_stock,
    patch_tree,
)
from tools.patch_tree import (
    Body,
    Cut,
    Delete,
    DeleteFile,
    Edit,
    PatchProblem,
    Tree,
    after,
    apply_edit,
)

# The series is made anew, and black takes its time over upstream's large files.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def stock():
    folder = make_patches.installed_stock()
    try:
        patch_stock.require_pristine(folder, patch_series.VERSION)
    except PatchProblem as problem:
        pytest.skip(str(problem))
    return folder


@pytest.fixture(scope="module")
def steps(stock):
    return patch_series.build_series(stock)


@pytest.fixture(scope="module")
def trees(stock, steps, tmp_path_factory):
    """The patched package on disk, for each change: the tree that ends with it."""
    folder = tmp_path_factory.mktemp("patched")
    return {
        step.change.name: make_patches.write_tree(
            steps, stock, folder / step.change.name, step.change.name
        )
        for step in steps
    }


def test_every_change_has_its_patch_in_the_order_of_the_changes(steps):
    names = [change.name for change in load_changes() if change.has_patch]
    assert [step.change.name for step in steps] == names
    assert patch_lint.read_series(patch_series.FOLDER) == [f"{n}.patch" for n in names]


def test_series_is_current(stock, steps):
    files = patch_series.generated_files(steps, stock)
    files |= patch_alone.alone_files(patch_alone.build_alone(stock, steps))
    assert make_patches.stale_files(files, patch_series.FOLDER) == [], "make patches"


def test_series_is_generated_alike_twice(stock, steps):
    again = patch_series.generated_files(patch_series.build_series(stock), stock)
    assert again == patch_series.generated_files(steps, stock)


def test_series_is_clean_and_applies_without_fuzz(stock, steps):
    assert patch_lint.lint(patch_series.FOLDER, steps, stock) == []


def test_core_files_differ_in_import_lines_alone(steps):
    for step in steps:
        assert step.core, f"{step.change.name} brings no core file"
        for source, target in step.core.items():
            ours = (patch_series.ROOT / source).read_text(encoding="utf-8")
            theirs = step.after[target]
            bare = patch_tree.code_without_imports
            assert bare(ours) == bare(theirs), source
            assert "cacheplus" not in theirs, f"{target} names the plugin"


def test_patches_name_nothing_but_upstream(steps):
    for step in steps:
        added = [
            line
            for line in patch_series.patch_text(step).splitlines()
            if line.startswith("+") and "cacheplus" in line.lower()
        ]
        assert added == [], step.change.name


def test_plugin_finds_each_change_in_the_tree_that_ends_with_it(steps, trees):
    """And none of the later ones: that is what already_upstream rests on."""
    names = [step.change.name for step in steps]
    for step in steps:
        tree = StockTree(trees[step.change.name])
        found = [s.change.name for s in steps if s.change.probe(tree)]
        assert found == names[: names.index(step.change.name) + 1]


def test_patched_tree_imports_its_own_modules(steps, trees):
    last = steps[-1].change.name
    removed = {path for step in steps for path in step.removed}
    modules = [
        target.removesuffix(".py").replace("/", ".")
        for step in steps
        for target in step.core.values()
        if target not in removed
    ]
    code = f"import importlib\nfor m in {modules!r}: importlib.import_module(m)\n"
    code += "import mlx_vlm.server, sys\n"
    code += "print(sys.modules['mlx_vlm'].__file__)"
    folder = trees[last].parent
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(folder), "PATH": "", "MLX_VLM_CACHEPLUS": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(folder) in done.stdout


def test_each_test_has_what_it_imports(steps):
    """Beside it in the tree; a patch that leaves one of the files to an earlier patch says so."""
    brought: dict[str, str] = {}
    for step in steps:
        there = {path for path in step.after if path.startswith("mlx_vlm/tests/")}
        brought |= dict.fromkeys(there - set(brought), step.filename)
        test = f"mlx_vlm/tests/{patch_series.test_of(step.change)}"
        assert test in there
        for path in there | set(step.borrowed):
            source = patch_series.ROOT / patch_series.TESTS / Path(path).name
            text = patch_tree.formatted(source.read_text())
            assert step.after.get(path, text) == text
            siblings = {
                name.replace(".", "/") + ".py"
                for name in patch_tree.imported_names(text)
                if name.startswith("mlx_vlm.tests.") and name.count(".") == 2
            }
            assert siblings <= there | set(step.borrowed), path
        head = " ".join(patch_series.header(step).split())
        for path, patch in step.borrowed.items():
            assert brought[path] == patch != step.filename
            assert f"{path} of {patch}" in head


def test_fixtures_that_no_test_imports_are_none(steps):
    present = {path.name for path in (patch_series.ROOT / "patches/tests").glob("*.py")}
    carried = {Path(path).name for step in steps for path in step.after}
    assert present <= carried


# -- the tools, on small texts ----------------------------------------------------


@pytest.fixture
def small(tmp_path):
    folder = tmp_path / "mlx_vlm"
    folder.mkdir()
    text = "class A:\n    def f(self):\n        return 1\n\n    def g(self):\n        return 1\n"
    (folder / "a.py").write_text(text)
    return Tree(folder)


def test_edit_lands_within_the_function_it_names(small):
    edit = Edit("mlx_vlm/a.py", "return 1", "return 2", within="A.g")
    apply_edit(small, edit, "some-change")
    assert small.read("mlx_vlm/a.py").count("return 2") == 1
    assert small.read("mlx_vlm/a.py").endswith("return 2\n")


SMALL = """\
import b


# why it is here
@b.decorated
def old():
    return 0


class A:
    def f(
        self,
    ):
        "What f does."
        return 1

    def g(self):
        return 1
"""


@pytest.mark.parametrize(
    ("edit", "gone", "there"),
    [
        (Delete("mlx_vlm/a.py", "old"), ["why", "decorated", "return 0"], "import b"),
        (Delete("mlx_vlm/a.py", "A.f"), ["def f", "What f does"], "def g"),
        (
            Body("mlx_vlm/a.py", "A.f", "    return 2\n"),
            ["What f does"],
            "    ):\n        return 2\n\n    def g",
        ),
        (
            Cut("mlx_vlm/a.py", "        return 1", None, "        pass\n", "A.g"),
            [],
            "def g(self):\n        pass\n",
        ),
        (
            Cut("mlx_vlm/a.py", "# why", "class A", within=None),
            ["why", "decorated", "old"],
            "import b\n\n\nclass A",
        ),
    ],
)
def test_deletions_take_whole_things(small, edit, gone, there):
    small.write("mlx_vlm/a.py", SMALL)
    apply_edit(small, edit, "some-change")
    text = small.read("mlx_vlm/a.py")
    assert not [word for word in gone if word in text]
    assert there in text


def test_deleted_file_is_a_deletion_in_the_patch(small):
    old = small.read("mlx_vlm/a.py")
    apply_edit(small, DeleteFile("mlx_vlm/a.py"), "some-change")
    assert small.read("mlx_vlm/a.py") is None
    lines = list(patch_series._diff("mlx_vlm/a.py", old, None))
    assert lines[1] == "deleted file mode 100644\n"
    assert lines[3] == "+++ /dev/null\n"
    assert [line[1:] for line in lines[5:]] == old.splitlines(keepends=True)


def test_sibling_modules_are_imported_under_the_names_that_the_core_uses():
    text = "from . import one, two\n\nprint(one, two)\n"
    names = {"one": "one", "two": "segment_two", "x": "x"}
    moved = {f"pkg/core/{n}.py": f"mlx_vlm/{p}.py" for n, p in names.items()}
    made = patch_tree.as_upstream(text, "pkg/core/x.py", "mlx_vlm/x.py", moved)
    assert made.startswith("from . import one\nfrom . import segment_two as two\n")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (Edit("mlx_vlm/a.py", "return 1", ""), "occurs 2 times"),
        (Cut("mlx_vlm/a.py", "class A", "return 9"), "not behind its start"),
        (Delete("mlx_vlm/a.py", "A.h"), "has no A.h"),
        (Edit("mlx_vlm/a.py", "return 9", ""), "occurs 0 times"),
        (after("mlx_vlm/b.py", "x", "y"), "mlx_vlm/b.py does not exist"),
        (after("mlx_vlm/a.py", "return 1", "", within="A.h"), "has no A.h"),
    ],
)
def test_edit_that_cannot_land_says_where_and_what_to_do(small, edit, words):
    with pytest.raises(PatchProblem, match="some-change: mlx_vlm/") as problem:
        apply_edit(small, edit, "some-change")
    assert words in str(problem.value)


def test_other_version_is_refused(stock):
    with pytest.raises(PatchProblem, match=r"are for mlx-vlm 0\.0\.1"):
        patch_stock.require_pristine(stock, "0.0.1")


def test_edited_stock_is_refused(stock, tmp_path):
    import shutil

    copy = tmp_path / "mlx_vlm"
    shutil.copytree(stock, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for info in stock.parent.glob("mlx_vlm-*.dist-info"):
        shutil.copytree(info, tmp_path / info.name)
    patch_stock.require_pristine(copy, patch_series.VERSION)
    with (copy / "apc.py").open("a") as file:
        file.write("\n# edited\n")
    with pytest.raises(PatchProblem, match=r"not as published: mlx_vlm/apc\.py differ"):
        patch_stock.require_pristine(copy, patch_series.VERSION)


def test_imports_become_upstreams_relative_ones():
    text = (
        "import mlx.core as mx\n\n"
        "from mlx_vlm.apc import X\n"
        "from mlx_vlm_cacheplus.core.other import Y\n\n"
        "A = mx, X, Y\n"
    )
    moved = {
        "mlx_vlm_cacheplus/core/one.py": "mlx_vlm/generate/one.py",
        "mlx_vlm_cacheplus/core/other.py": "mlx_vlm/generate/other.py",
    }
    made = patch_tree.as_upstream(text, *next(iter(moved.items())), moved)
    assert "from ..apc import X\n" in made and "from .other import Y\n" in made
    assert patch_tree.code_without_imports(made) == ["A = mx, X, Y"]


def test_import_of_a_file_that_no_patch_brings_is_refused():
    text = "from mlx_vlm_cacheplus.patching import Patcher\n\nA = Patcher\n"
    source, target = "mlx_vlm_cacheplus/core/one.py", "mlx_vlm/one.py"
    with pytest.raises(PatchProblem, match="which no patch up to here brings"):
        patch_tree.as_upstream(text, source, target, {source: target})


def test_fixtures_of_fixtures_come_along(tmp_path, monkeypatch):
    """However they are imported, and once."""
    folder = tmp_path / patch_series.TESTS
    folder.mkdir(parents=True)
    texts = {
        "test_a": "import os\nfrom mlx_vlm.tests.one import x\nfrom mlx_vlm.apc import y\n",
        "one": "from mlx_vlm.tests import two\n",
        "two": "import mlx_vlm.tests.one\n",
    }
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(patch_series, "ROOT", tmp_path)
    assert patch_series.with_fixtures("test_a.py") == ["test_a.py", "one.py", "two.py"]
    (folder / "two.py").unlink()
    with pytest.raises(
        PatchProblem, match=r"imports patches/tests/two\.py, which is not"
    ):
        patch_series.with_fixtures("test_a.py")


def test_lint_sees_a_missing_an_extra_and_a_blank(tmp_path):
    (tmp_path / "series").write_text("a.patch\nb.patch\n")
    (tmp_path / "a.patch").write_text("")
    (tmp_path / "c.patch").write_text("")
    assert patch_lint.check_series(tmp_path) == [
        "b.patch is in the series and not there",
        "c.patch is not in the series",
    ]
    text = "Subject: x\n@@ -1 +1,2 @@\n a\n+b \n"
    problems = patch_lint.check_text("a.patch", text)
    assert any("trailing blanks" in problem for problem in problems)
    assert any("no Origin field" in problem for problem in problems)


def test_insertion_is_shown_with_its_own_end():
    old = "f(\n    a,\n)\nx = 1\n"
    new = "f(\n    a,\n)\ng(\n    b,\n)\nx = 1\n"
    text = "".join(patch_series._diff("mlx_vlm/a.py", old, new))
    assert "+g(\n+    b,\n+)\n x = 1\n" in text


def _core_imports(text):
    """Names of the modules beside it that a core file imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            yield from [node.module] if node.module else [a.name for a in node.names]


def test_a_patch_requires_those_that_bring_what_its_files_import():
    changes = patch_alone.with_patch()
    cores = {
        name: patch_series.edits_of(change).CORE for name, change in changes.items()
    }
    bringer = {Path(file).stem: name for name, core in cores.items() for file in core}
    for name, core in cores.items():
        required = set(changes[name].patch_requires)
        required |= set(patch_alone.closure(name, changes))
        for file in core:
            text = (patch_series.ROOT / file).read_text(encoding="utf-8")
            needed = {bringer[m] for m in _core_imports(text) if m in bringer}
            assert needed <= required, f"{name}: {file}"
