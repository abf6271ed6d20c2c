"""What every interpreter of the environment pays, and that none of them is ever broken."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_vlm_cacheplus import _startup

from .stock import clean_environment, run_python

ROOT = Path(__file__).resolve().parents[2]
LIMIT_US = 3000
OURS = {"mlx_vlm_cacheplus", "mlx_vlm_cacheplus._startup", "__future__"}
LIST_MODULES = "import sys; print('\\n'.join(sys.modules))"


def modules_of(*words: str, **environ: str) -> set[str]:
    result = run_python(*words, "-c", LIST_MODULES, **environ)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    return set(result.stdout.split())


def test_who_does_not_ask_imports_this_package_and_nothing_more():
    """-S reads no .pth file and imports no site; what the files of others import is theirs."""
    loaded = modules_of()
    assert (
        OURS - {"__future__"} <= loaded
    ), "the start-up file was not read: pip install -e ."
    for name in (
        "wrapt",
        "pluggy",
        "mlx",
        "mlx.core",
        "mlx_vlm",
        "argparse",
        "json",
        "rich",
    ):
        assert name not in loaded
    assert {name for name in loaded if name.startswith("mlx_vlm_cacheplus")} <= OURS


def test_who_does_not_ask_pays_less_than_three_milliseconds():
    best = None
    for _ in range(5):
        # The first round may compile the files; every later interpreter finds them compiled.
        result = run_python(
            "-X", "importtime", "-c", "pass", PYTHONDONTWRITEBYTECODE=""
        )
        times = {
            name: int(own)
            for own, name in re.findall(
                r"import time: +(\d+) \| +\d+ \| +(\S+)", result.stderr
            )
        }
        assert "mlx_vlm_cacheplus._startup" in times
        spent = sum(times.get(name, 0) for name in OURS)
        best = spent if best is None else min(best, spent)
    assert best is not None and best < LIMIT_US


def test_the_decision_itself_costs_microseconds():
    code = (
        "import time, sys, os, mlx_vlm_cacheplus._startup as s; t = time.perf_counter();"
        "[s.is_asked(list(sys.orig_argv), os.environ) for _ in range(100)];"
        "print((time.perf_counter() - t) / 100)"
    )
    assert float(run_python("-c", code).stdout) < LIMIT_US / 1e6 / 3


@pytest.mark.parametrize("value", ["0", "", "off", "FALSE", " no "])
def test_off_is_not_asking(value):
    assert "wrapt" not in modules_of(MLX_VLM_CACHEPLUS=value)


@pytest.mark.parametrize(
    "value", ["1", "fast", "\u00e9,\u2603", "x" * 30000, ",,,", "1\n2", "\udcff"]
)
def test_no_value_breaks_an_interpreter(value):
    loaded = modules_of(MLX_VLM_CACHEPLUS=value)
    assert "mlx" not in loaded and "mlx_vlm" not in loaded


@pytest.mark.parametrize(
    "words",
    [
        ["prog", "--cacheplus"],
        ["python", "script.py", "--cacheplus", "mlx_vlm.server"],
        ["python", "-m", "mlx_vlm.generate", "--cacheplus"],
        ["python", "-m", "pip", "install", "mlx-vlm-cacheplus"],
        ["python", "-m", "mlx_vlm.server", "--model", "m"],
        ["python", "-c", "print(1)", "--cacheplus"],
        ["python"],
        [],
    ],
)
def test_not_asked(words):
    assert not _startup.is_asked(words, {})


@pytest.mark.parametrize(
    "words",
    [
        ["python", "/env/bin/mlx_vlm.server", "--cacheplus"],
        ["python", "-m", "mlx_vlm.server", "--model", "m", "--cacheplus=a,b"],
        ["python", "-X", "dev", "-mmlx_vlm.server", "--help"],
        ["python", "-m", "mlx_vlm", "server", "-h"],
        ["python", "-m", "cProfile", "-m", "mlx_vlm.server", "--cacheplus"],
        ["python", "-m", "mlx_vlm.server", "--cacheplus-depth", "3"],
        ["python", "-c", "from mlx_vlm.server import main; main()", "--cacheplus"],
    ],
)
def test_asked(words):
    assert _startup.is_asked(words, {})


def test_without_site_python_starts_and_knows_nothing_of_us():
    result = run_python("-S", "-c", LIST_MODULES, MLX_VLM_CACHEPLUS="1")
    assert result.returncode == 0 and "mlx_vlm_cacheplus" not in result.stdout


@pytest.mark.parametrize("flags", [["-I"], ["-E"], ["-s"], ["-O"], ["-B"]])
def test_interpreter_flags(flags):
    assert "wrapt" not in modules_of(*flags)


@pytest.mark.parametrize(
    "missing", ["wrapt", "mlx_vlm_cacheplus.activation", "logging"]
)
def test_missing_dependency_is_one_line_and_the_interpreter_starts(missing):
    """The real .pth line, in an interpreter where the import fails."""
    line = (ROOT / "startup" / "mlx_vlm_cacheplus.pth").read_text()
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.modules[{missing!r}] = None\n"
        f"exec({line!r}); print('started')"
    )
    result = run_python("-S", "-c", code, MLX_VLM_CACHEPLUS="1")
    assert result.returncode == 0 and result.stdout == "started\n"
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("mlx-vlm-cacheplus: not active: ")


def test_package_that_is_gone_is_silent():
    """A .pth that an interrupted uninstall left behind."""
    line = (ROOT / "startup" / "mlx_vlm_cacheplus.pth").read_text()
    code = f"import sys; sys.modules['mlx_vlm_cacheplus'] = None\nexec({line!r})"
    result = run_python("-S", "-c", code)
    assert result.returncode == 0 and result.stderr == ""


def test_no_standard_error_stream():
    code = "import sys; sys.stderr = None; sys.modules['wrapt'] = None\nimport mlx_vlm_cacheplus._startup as s; s.ran = False; s.main()"
    assert run_python("-c", code, MLX_VLM_CACHEPLUS="1").returncode == 0


def test_start_file_names_the_same_function_as_the_pth_file():
    """PEP 829: one `package.module:callable` a line; it takes no argument. Python 3.15 then skips the .pth's import."""
    import pkgutil

    entry = (ROOT / "startup" / "mlx_vlm_cacheplus.start").read_text().split()
    assert entry == ["mlx_vlm_cacheplus._startup:main"]
    assert pkgutil.resolve_name(entry[0]) is _startup.main
    line = (ROOT / "startup" / "mlx_vlm_cacheplus.pth").read_text()
    assert line.startswith("import ") and line.count("\n") == 1
    assert "mlx_vlm_cacheplus._startup as s; s.main()" in line


def test_running_twice_arms_once():
    code = (
        "import mlx_vlm_cacheplus._startup as s; s.main(); s.ran = False; s.main(); s.main()\n"
        "from wrapt.importer import _post_import_hooks as h; print(len(h['mlx_vlm.server']))"
    )
    assert run_python("-c", code, MLX_VLM_CACHEPLUS="1").stdout == "1\n"


def test_startup_module_is_small_and_stands_on_the_standard_library():
    text = Path(_startup.__file__).read_text()
    assert len(text.splitlines()) < 60
    top = [line for line in text.splitlines() if re.match(r"(import|from) ", line)]
    assert top == ["from __future__ import annotations", "import os", "import sys"]


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_installation_carries_both_files_at_its_root(tmp_path, kind):
    pytest.importorskip("hatchling")
    import zipfile

    code = f"import sys; from hatchling.build import build_{kind} as b; b(sys.argv[1])"
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    assert {"mlx_vlm_cacheplus.pth", "mlx_vlm_cacheplus.start"} <= names
    assert ("mlx_vlm_cacheplus/_startup.py" in names) is (kind == "wheel")
    if kind == "editable":
        # Files are read in the order of their names: the folder must be on the path before our line runs.
        paths = [name for name in names if name.endswith(".pth")]
        assert sorted(paths) == ["_mlx_vlm_cacheplus.pth", "mlx_vlm_cacheplus.pth"]
    assert not [
        name for name in names if "__pycache__" in name or name.startswith("tests")
    ]
