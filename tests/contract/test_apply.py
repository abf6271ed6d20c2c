"""Check everything, then apply everything, or nothing; and say so in one line."""

from __future__ import annotations

import pytest

from .stock import AR, error_line, loaded_state

PLUS = ["fast", "stock", 1]
PLAIN = ["stock", 1]


def line_of(result, name: str) -> str:
    lines = [
        x
        for x in result.stderr.splitlines()
        if x.startswith(f"mlx-vlm-cacheplus: {name}: ")
    ]
    assert len(lines) == 1, result.stderr
    return lines[0].removeprefix(f"mlx-vlm-cacheplus: {name}: ")


def edit_filter(stock):
    stock.edit("generate/ar.py", 'return ["stock", keep]', 'return ["stock",  keep]')


def test_drifted_symbol_starts_as_stock_and_says_which(stock):
    edit_filter(stock)
    result = stock.script("--cacheplus", "--model", "m")
    state = loaded_state(result)
    assert state["filter"] == PLAIN
    line = line_of(result, "fast")
    assert line.startswith("drifted (")
    for part in (
        "GenerationBatch.filter",
        "mlx_vlm/generate/ar.py",
        "0.7.10",
        "fingerprint refresh",
    ):
        assert part in line
    assert line_of(result, "second") == "drifted (it needs fast, which is drifted)"
    assert line_of(result, "promise") == "applied"


def test_line_endings_and_other_symbols_are_no_drift(stock):
    path = stock.folder / "mlx_vlm/generate/ar.py"
    text = path.read_text().replace("class Base", "# moved\n\n\nclass Base")
    path.write_bytes(text.replace("\n", "\r\n").encode())
    assert line_of(stock.script("--cacheplus"), "fast") == "applied"


def test_deleted_symbol(stock):
    stock.edit("generate/ar.py", "def filter(self, keep)", "def keep_rows(self, keep)")
    stock.edit(
        "server/cli.py", "GenerationBatch().filter(1)", "GenerationBatch().keep_rows(1)"
    )
    line = line_of(stock.script("--cacheplus"), "fast")
    assert (
        line.startswith("drifted (")
        and "GenerationBatch.filter in mlx_vlm/generate/ar.py is gone" in line
    )


def test_symbol_that_we_would_add_exists(stock):
    stock.edit("generate/ar.py", "    limit = 3", "    limit = 3\n    extra = 2")
    line = line_of(stock.script("--cacheplus"), "second")
    assert (
        line.startswith("drifted (")
        and "GenerationBatch.extra" in line
        and "exists already" in line
    )


def test_moved_module(stock):
    stock.edit("generate/__init__.py", "from .ar", "from .rows")
    for name in ("server/__init__.py", "server/cli.py"):
        stock.edit(name, "generate.ar", "generate.rows")
    folder = stock.folder / "mlx_vlm/generate"
    (folder / "ar.py").rename(folder / "rows.py")
    result = stock.script("--cacheplus")
    assert loaded_state(result)["filter"] == PLAIN
    assert "is gone" in line_of(result, "fast")


def test_unknown_version_starts_as_stock_and_says_what_differs(stock):
    stock.edit("version.py", "0.7.10", "0.7.11")
    result = stock.script("--cacheplus")
    assert loaded_state(result)["filter"] == PLAIN
    line = line_of(result, "fast")
    assert line.startswith(
        "unknown_version (mlx-vlm 0.7.11 is not known, against 0.7.10: no target differs"
    )
    edit_filter(stock)
    line = line_of(stock.script("--cacheplus"), "fast")
    assert "GenerationBatch.filter in mlx_vlm/generate/ar.py differs" in line
    assert "fingerprint refresh" in line


def test_stock_is_served_with_its_prefix_cache_where_nothing_applies(stock):
    stock.edit("version.py", "0.7.10", "0.7.11")
    result = stock.script("--cacheplus")
    assert loaded_state(result)["apc"] is True and "prefix cache: on" in result.stderr


def test_speed_up_asked_for_by_name_is_an_error(stock):
    edit_filter(stock)
    line = error_line(stock.script("--cacheplus=fast", "--model", "m"))
    assert "fast: drifted" in line and "asked for by name" in line


def test_guarantee_that_was_asked_for_by_its_option_is_an_error(stock):
    stock.edit(
        "generate/ar.py",
        'def run():\n    return "stock"',
        'def run():\n    return "other"',
    )
    assert line_of(stock.script("--cacheplus"), "promise").startswith("drifted")
    line = error_line(stock.script("--cacheplus", "--cacheplus-isolate", "1"))
    assert "promise: drifted" in line
    assert "promise" in error_line(
        stock.script("--cacheplus", MLX_VLM_CACHEPLUS_ISOLATE="1")
    )


def test_guarantee_is_not_left_out_of_the_names_in_silence(stock):
    for words, environ in (
        (("--cacheplus-isolate", "1"), {}),
        ((), {"MLX_VLM_CACHEPLUS_ISOLATE": "1"}),
    ):
        line = error_line(stock.script("--cacheplus=fast", *words, **environ))
        assert "ask for promise, which --cacheplus=fast leaves out" in line


def test_failed_apply_is_rolled_back_whole(stock):
    result = stock.script("--cacheplus", TEST_RAISE="1")
    assert loaded_state(result)["filter"] == PLUS
    assert line_of(result, "second") == "failed (rolled back: RuntimeError: planted)"
    code = (
        "import mlx_vlm_cacheplus as c; r = c.activate()\n"
        "from mlx_vlm.generate.ar import GenerationBatch as G\n"
        "print(r.applied, hasattr(G, 'extra'), type(vars(G)['pack']).__name__, G.pack(1))"
    )
    result = stock.code(code, TEST_RAISE="1")
    assert (
        result.stdout == "('fast', 'promise') False staticmethod ['stock', 1]\n"
    ), result.stderr


def test_failed_demand_leaves_nothing_behind(stock):
    code = (
        "import mlx_vlm_cacheplus as c\n"
        "from mlx_vlm_cacheplus import settings, activation\n"
        "try: c.activate(['second'])\n"
        "except settings.UsageError as e: print('second: failed' in str(e))\n"
        "print(len(activation._process.patcher), c.status())"
    )
    assert stock.code(code, TEST_RAISE="1").stdout == "True\n0 None\n"


def test_failing_check_and_failing_probe_are_no_reason_to_stop(stock):
    probe = (
        "def broken(self, stock):\n    raise OSError('planted')\nFast.probe = broken\n"
    )
    site = stock.folder / "sitecustomize.py"
    site.write_text(site.read_text().replace("CHANGES = [", probe + "CHANGES = [", 1))
    result = stock.script("--cacheplus")
    assert loaded_state(result)["filter"] == PLAIN
    assert line_of(result, "fast") == "failed (its check failed: OSError: planted)"


def test_unreadable_source_is_no_reason_to_stop(stock):
    stock.edit("version.py", "__version__", "__version__ = version")
    result = stock.script("--cacheplus")
    assert loaded_state(result)["filter"] == PLAIN


def test_already_upstream_is_applied_nowhere_and_satisfies_requirements(stock):
    site = stock.folder / "sitecustomize.py"
    marks = f'Fast.marks = ("{AR}:Base.inherited", "mlx_vlm.server.cli")\n'
    site.write_text(site.read_text().replace("CHANGES = [", marks + "CHANGES = [", 1))
    edit_filter(stock)
    result = stock.script("--cacheplus=fast,second")
    assert loaded_state(result)["filter"] == PLAIN
    assert line_of(result, "fast") == "already_upstream (mlx-vlm 0.7.10 has it)"
    assert line_of(result, "second") == "applied"


@pytest.mark.parametrize(
    "other",
    [
        "G.filter = lambda self, keep: ['other', keep]",
        "import functools; o = G.filter\n@functools.wraps(o)\ndef f(*a): return o(*a)\nG.filter = f",
        "import wrapt; wrapt.wrap_function_wrapper(G, 'filter', lambda w, i, a, k: w(*a, **k))",
        "import functools; G.filter = functools.lru_cache(G.filter)",
        "import unittest.mock as m; G.filter = m.create_autospec(G.filter)",
    ],
)
def test_target_that_somebody_replaced_is_too_late(stock, other):
    code = (
        "from mlx_vlm.generate.ar import GenerationBatch as G\n"
        f"{other}\nmine = vars(G)['filter']\n"
        "import mlx_vlm_cacheplus as c; r = c.activate()\n"
        "print(r.state('fast'), vars(G)['filter'] is mine, r['fast'].reason)"
    )
    result = stock.code(code)
    assert result.stdout.startswith("too_late True GenerationBatch.filter of "), (
        result.stdout,
        result.stderr,
    )


def test_attribute_that_somebody_deleted_is_drift(stock):
    code = (
        "from mlx_vlm.generate.ar import GenerationBatch as G\ndel G.filter\n"
        "import mlx_vlm_cacheplus as c; print(c.activate()['fast'].line())"
    )
    assert stock.code(code).stdout.startswith(
        "fast: drifted (GenerationBatch.filter is gone"
    )


def test_attribute_that_somebody_added_is_too_late(stock):
    code = (
        "from mlx_vlm.generate.ar import GenerationBatch as G\nG.extra = 9\n"
        "import mlx_vlm_cacheplus as c; print(c.activate().state('second'), G.extra)"
    )
    assert stock.code(code).stdout == "too_late 9\n"


@pytest.mark.parametrize(
    "serving", ["r.response_generator = object()", "r.model_cache = {'m': 1}"]
)
def test_serving_process_is_too_late(stock, serving):
    code = (
        f"from mlx_vlm.server.runtime import runtime as r\n{serving}\n"
        "import mlx_vlm_cacheplus as c; print(c.activate().state('fast'))"
    )
    assert stock.code(code).stdout == "too_late\n"


def test_applied_before_serving_stays_applied(stock):
    code = (
        "import mlx_vlm_cacheplus as c; c.activate()\n"
        "from mlx_vlm.server.runtime import runtime as r; r.response_generator = object()\n"
        "print(c.activate().state('fast'))"
    )
    assert stock.code(code).stdout == "applied\n"


def test_more_names_later_add_to_what_is_applied(stock):
    code = (
        "import mlx_vlm_cacheplus as c\n"
        "print(c.activate('promise').applied, c.activate(['fast']).applied, c.deactivate(), c.deactivate())"
    )
    result = stock.code(code)
    assert (
        result.stdout == "('promise',) ('fast', 'promise') ('fast', 'promise') ()\n"
    ), result.stderr


def test_revert_refuses_where_somebody_wrapped_on_top(stock):
    code = (
        "import mlx_vlm_cacheplus as c; c.activate()\n"
        "from mlx_vlm_cacheplus.patching import ForeignWrapper\n"
        "from mlx_vlm.generate.ar import GenerationBatch as G\n"
        "ours = vars(G)['filter']; G.filter = lambda self, keep: ours(self, keep)\n"
        "try: c.deactivate()\n"
        "except ForeignWrapper as e: print(e)\n"
        "print(G.pack(1)); G.filter = ours; print(c.deactivate(), G().filter(1))"
    )
    lines = stock.code(code).stdout.splitlines()
    assert "GenerationBatch.filter is wrapped by somebody else" in lines[0]
    assert lines[1:] == [
        "['second', 'stock', 1]",
        "('promise', 'second', 'fast') ['stock', 1]",
    ]


def test_zero_wins_over_code(stock):
    code = "import mlx_vlm_cacheplus as c; print(c.activate(['fast']).state('fast'))"
    assert stock.code(code, MLX_VLM_CACHEPLUS="0").stdout == "off\n"


def test_unknown_name_in_code_raises(stock):
    code = "import mlx_vlm_cacheplus as c\ntry: c.activate(['x'])\nexcept ValueError as e: print(e)"
    assert "unknown name 'x'" in stock.code(code).stdout


def test_broken_plugin_is_left_out(stock):
    site = stock.folder / "sitecustomize.py"
    broken = (
        "class Broken:\n    @hookspecs.hookimpl\n    def cacheplus_reuse_recorded(self):\n"
        "        raise OSError('planted')\nplugins.manager().register(Broken())\n"
    )
    site.write_text(site.read_text() + broken)
    code = "from mlx_vlm_cacheplus import plugins; print(plugins.publish_record({}))"
    result = stock.code(code)
    assert result.stdout == "None\n" and "planted" in result.stderr


@pytest.mark.parametrize("missing", ["pluggy", "mlx_vlm_cacheplus.changes"])
def test_broken_installation_starts_as_stock_and_takes_the_flag(stock, missing):
    site = stock.folder / "sitecustomize.py"
    site.write_text(f"import sys; sys.modules[{missing!r}] = None")
    result = stock.script("--cacheplus", "--model", "m")
    assert loaded_state(result)["filter"] == PLAIN
    assert "not active, the server starts as stock: " in result.stderr
    assert stock.script("--help").returncode == 0


def test_failed_demand_gives_the_environment_back(stock):
    edit_filter(stock)
    code = (
        "import mlx_vlm_cacheplus as c, os\n"
        "try: c.activate(['fast'])\n"
        "except ValueError: print('APC_ENABLED' in os.environ, 'MLX_VLM_CACHEPLUS' in os.environ)"
    )
    assert stock.code(code).stdout == "False False\n"


def test_internal_fault_starts_as_stock(stock):
    """A fault of ours is never the reason that a server does not start, unless something was demanded."""
    site = stock.folder / "sitecustomize.py"
    fault = "import mlx_vlm_cacheplus.fingerprint as f\nf.StockTree.installed = classmethod(lambda c: 1 / 0)\n"
    site.write_text(site.read_text() + fault)
    result = stock.script("--cacheplus")
    assert loaded_state(result)["filter"] == PLAIN
    assert "not active, the server starts as stock: ZeroDivisionError" in result.stderr
    assert "fast cannot be applied" in error_line(stock.script("--cacheplus=fast"))
