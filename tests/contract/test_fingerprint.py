"""Hashes of source text: found without importing, sensitive to every edit, blind to line endings."""

from __future__ import annotations

import json
import shutil

import pytest

from mlx_vlm_cacheplus import fingerprint
from mlx_vlm_cacheplus.change import SUPPORTED_VERSIONS, Change, Target
from mlx_vlm_cacheplus.changes import load_changes
from mlx_vlm_cacheplus.fingerprint import StockMissing, StockTree

from .stock import AR, run_python


def target(qualname: str) -> Target:
    return Target(AR, qualname)


def test_source_of_each_kind_of_symbol(stock):
    tree = stock.tree
    assert (
        tree.source(target("GenerationBatch.filter")).splitlines()[0]
        == "    def filter(self, keep):"
    )
    assert tree.source(target("GenerationBatch.pack")).startswith("    @staticmethod")
    assert tree.source(target("GenerationBatch.step")).startswith("    @logged")
    assert tree.source(target("GenerationBatch.limit")) == "    limit = 3"
    assert tree.source(target("run")) == 'def run():\n    return "stock"'
    assert tree.source(target("Base")).startswith("class Base:")
    assert tree.source(target("Base.inherited")) is not None
    assert tree.source(target("GenerationBatch.inherited")) is None
    assert tree.source(target("logged.inner")) is None
    assert tree.source(Target("mlx_vlm.nowhere", "x")) is None
    assert tree.source(Target("elsewhere.generate.ar", "run")) is None
    assert tree.has("mlx_vlm") and tree.has("mlx_vlm.generate") and tree.has(AR)
    assert tree.has(f"{AR}:run") and not tree.has("mlx_vlm.gone")
    assert tree.version == "0.7.10"


def test_several_definitions_count_together(tmp_path):
    package = tmp_path / "mlx_vlm"
    package.mkdir()
    text = "class A:\n    @property\n    def x(self): return 1\n    @x.setter\n    def x(self, v): pass\nif 1:\n    def f(): return 1\nelse:\n    def f(): return 2\ntry:\n    B = 1\nexcept OSError:\n    B, C = 2, 3\n"
    (package / "m.py").write_text(text)
    tree = StockTree(package)
    assert tree.source(Target("mlx_vlm.m", "A.x")).count("def x") == 2
    assert tree.source(Target("mlx_vlm.m", "f")).count("def f") == 2
    assert tree.source(Target("mlx_vlm.m", "B")).count("=") == 2
    assert tree.source(Target("mlx_vlm.m", "C")) == "    B, C = 2, 3"


@pytest.fixture
def importing(tmp_path):
    """A package whose modules import each other's names in every way."""
    texts = {
        "__init__.py": "",
        "top.py": "from .rounds import *\nfrom .rounds.loop import plain\nimport json\n",
        "rounds/__init__.py": "from .walks import walk\n",
        "rounds/walks.py": "def walk():\n    return 1\n\n\ndef stride():\n    return 2\n",
        "rounds/loop.py": (
            "from json import loads\n"
            "from .walks import walk\n"
            "from .walks import stride as step\n"
            "from . import walk as again\n"
            "from ..rounds.walks import stride\n"
            "from mlx_vlm.rounds.walks import walk as absolute\n"
            "def plain():\n    return walk()\n"
        ),
    }
    for name, text in texts.items():
        path = tmp_path / "mlx_vlm" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return StockTree(tmp_path / "mlx_vlm")


LOOP, WALKS = "mlx_vlm.rounds.loop", "mlx_vlm.rounds.walks"


@pytest.mark.parametrize(
    "name, module, defined",
    [
        ("walk", WALKS, "walk"),
        ("step", WALKS, "stride"),
        ("again", WALKS, "walk"),
        ("stride", WALKS, "stride"),
        ("absolute", WALKS, "walk"),
        ("plain", LOOP, "plain"),
        # Another package's, and one that nobody imports: as they are.
        ("loads", LOOP, "loads"),
        ("nothing", LOOP, "nothing"),
        ("plain.walk", LOOP, "plain.walk"),
    ],
)
def test_an_imported_name_stands_for_its_definition(importing, name, module, defined):
    asked, found = Target(LOOP, name), Target(module, defined)
    assert importing.definition(asked) == found
    assert importing.source(asked) == importing.source(found)
    if module == WALKS:
        assert importing.source(asked).startswith(f"def {defined}")


def test_a_name_can_come_through_several_modules(importing):
    found = importing.definition(Target("mlx_vlm.top", "plain"))
    assert found == Target(LOOP, "plain")


def test_an_imported_module_is_its_import(importing):
    assert importing.source(Target("mlx_vlm.top", "json")) == "import json"


def test_an_edit_of_the_definition_is_one_of_the_imported_name(importing):
    asked = Target(LOOP, "again")
    before = importing.hash(asked)
    path = importing.folder / "rounds/walks.py"
    path.write_text(path.read_text().replace("return 1", "return 3"))
    assert StockTree(importing.folder).hash(asked) != before


@pytest.mark.parametrize(
    "old, new, same",
    [
        ('return ["stock", keep]', 'return ["stock",  keep]', False),
        ('return ["stock", keep]', 'return ["stock", keep]  # why', False),
        ("def filter(self, keep):", "def filter(self, keep, more=None):", False),
        ("class Base:", "import os\n\n\nclass Base:", True),
        ('return ["stock", value]', 'return ["other", value]', True),
    ],
)
def test_which_edits_matter(stock, old, new, same):
    before = stock.tree.hash(target("GenerationBatch.filter"))
    stock.edit("generate/ar.py", old, new)
    assert (stock.tree.hash(target("GenerationBatch.filter")) == before) is same


def test_line_endings_do_not_matter(stock):
    before = stock.tree.hash(target("GenerationBatch"))
    path = stock.folder / "mlx_vlm/generate/ar.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert stock.tree.hash(target("GenerationBatch")) == before


def test_finding_the_installed_tree_imports_nothing():
    code = (
        "import sys; from mlx_vlm_cacheplus.fingerprint import StockTree, measure\n"
        "from mlx_vlm_cacheplus.changes import load_changes\n"
        "t = StockTree.installed(); t.version; measure(load_changes(), t)\n"
        "print('mlx_vlm' in sys.modules, any(m == 'mlx' or m.startswith('mlx.') for m in sys.modules))"
    )
    assert run_python("-c", code).stdout == "False False\n"


def test_no_stock(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StockMissing, match="not installed"):
        StockTree.installed()
    with pytest.raises(StockMissing, match="no mlx_vlm package"):
        _ = StockTree(tmp_path).version


def test_fingerprints_of_the_installed_stock_are_current():
    """The message is the manual: read what changed, then run `make fingerprints`."""
    tree = StockTree.installed()
    changes = load_changes()
    if tree.version not in SUPPORTED_VERSIONS or any(
        change.probe(tree) for change in changes
    ):
        pytest.skip("not a stock that fingerprints are kept for")
    expected = fingerprint.load(tree.version)
    assert (
        expected is not None
    ), f"no fingerprints for {tree.version}: make fingerprints"
    assert (
        fingerprint.measure(changes, tree) == expected
    ), "read the difference, then: make fingerprints"


def test_every_supported_version_has_fingerprints_of_every_target():
    names = {str(t) for change in load_changes() for t in change.targets}
    assert fingerprint.known_versions() == SUPPORTED_VERSIONS
    for version in SUPPORTED_VERSIONS:
        assert (
            set(fingerprint.load(version)) == names
        ), f"{version}: make fingerprints STOCK=..."


def test_files_are_as_refresh_writes_them():
    for path in sorted(fingerprint.FOLDER.glob("*.json")):
        content = json.loads(path.read_text())
        assert content["mlx_vlm"] == path.stem and list(content["symbols"]) == sorted(
            content["symbols"]
        )
        assert path.read_text() == json.dumps(content, indent=2) + "\n"


def test_differences_name_symbol_and_file(stock):
    change = Change()
    change.targets = (
        target("GenerationBatch.filter"),
        Target(AR, "GenerationBatch.size", must_exist=False),
        target("GenerationBatch.gone"),
        target("run"),
    )
    expected = {
        f"{AR}:GenerationBatch.filter": "0" * 16,
        f"{AR}:GenerationBatch.size": None,
    }
    assert fingerprint.differences(change, stock.tree, expected) == [
        "GenerationBatch.filter in mlx_vlm/generate/ar.py differs",
        "GenerationBatch.size in mlx_vlm/generate/ar.py exists already",
        "GenerationBatch.gone in mlx_vlm/generate/ar.py is gone",
        "run in mlx_vlm/generate/ar.py has no fingerprint",
    ]


def test_refresh_command_writes_one_file_for_each_tree(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fingerprint, "FOLDER", tmp_path)
    stock = StockTree.installed()
    installed = stock.folder
    trees = []
    for version in ("0.7.98", "0.7.99"):
        folder = tmp_path / version / "mlx_vlm"
        for change in load_changes():
            for t in change.targets:
                for module in {t.module, stock.definition(t).module}:
                    source = stock.path(module)
                    goal = folder / source.relative_to(installed)
                    goal.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(source, goal)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "version.py").write_text(f'__version__ = "{version}"\n')
        trees.append(str(folder.parent if version == "0.7.98" else folder))
    assert fingerprint.main(["refresh", "--stock", *trees]) == 0
    assert fingerprint.known_versions() == ("0.7.98", "0.7.99")
    assert fingerprint.load("0.7.98") == fingerprint.measure(
        load_changes(), StockTree(installed)
    )
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_refresh_command_says_what_is_wrong(tmp_path, capsys):
    assert fingerprint.main(["refresh", "--stock", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_module_is_a_command(tmp_path):
    result = run_python(
        "-m", "mlx_vlm_cacheplus.fingerprint", "refresh", "--stock", str(tmp_path)
    )
    assert result.returncode == 2 and "no mlx_vlm package" in result.stderr
