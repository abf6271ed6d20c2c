"""Three doors to one activate(): what each accepts, which one wins, and what a wrong word gets."""

from __future__ import annotations

import itertools

import pytest

from .stock import error_line, loaded_state, run_python

PLUS = ["fast", "stock", 1]
PLAIN = ["stock", 1]
PROGRAMS = {
    "script": lambda stock: [str(stock.folder / "mlx_vlm.server")],
    "module": lambda stock: ["-m", "mlx_vlm.server"],
    "module, one word": lambda stock: ["-mmlx_vlm.server"],
    "package": lambda stock: ["-m", "mlx_vlm", "server"],
    "code": lambda stock: ["-c", "from mlx_vlm.server import main; main()"],
    "options before": lambda stock: [
        "-W",
        "ignore",
        "-X",
        "utf8",
        "-m",
        "mlx_vlm.server",
    ],
}


@pytest.mark.parametrize("program", list(PROGRAMS))
def test_flag_is_taken_by_every_way_to_start_the_stock_server(stock, program):
    result = stock.python(*PROGRAMS[program](stock), "--cacheplus", "--model", "m")
    state = loaded_state(result)
    assert (state["filter"], state["model"], state["apc"]) == (PLUS, "m", True)
    assert "mlx-vlm-cacheplus: fast: applied" in result.stderr.splitlines()


@pytest.mark.parametrize("program", list(PROGRAMS))
def test_without_the_flag_the_server_is_stock(stock, program):
    result = stock.python(*PROGRAMS[program](stock), "--model", "m")
    state = loaded_state(result)
    assert (state["filter"], state["apc"], state["env"]) == (PLAIN, False, {})
    assert result.stderr == ""


def expected_winner(flag: str | None, variable: str | None) -> str | None:
    """The rule: 0 in the variable, then the flag, then the variable. None, 'all', or a name."""
    if variable == "0":
        return None
    for text in (flag, variable):
        if text is not None:
            return {"0": None, "1": "all", "": "all"}.get(text, text)
    return None


@pytest.mark.parametrize(
    "flag, variable",
    list(
        itertools.product(
            [None, "", "0", "fast", "promise"], [None, "0", "1", "promise"]
        )
    ),
)
def test_flag_against_variable(stock, flag, variable):
    words = (
        [] if flag is None else ["--cacheplus" if flag == "" else f"--cacheplus={flag}"]
    )
    environ = {} if variable is None else {"MLX_VLM_CACHEPLUS": variable}
    result = stock.script(*words, **environ)
    state = loaded_state(result)
    winner = expected_winner(flag, variable)
    assert state["filter"] == (PLUS if winner in ("all", "fast") else PLAIN)
    assert state["apc"] is (winner is not None)
    lines = result.stderr.splitlines()
    if winner is None:
        assert not any("applied" in line for line in lines)
    else:
        wanted = "fast" if winner == "all" else winner
        assert f"mlx-vlm-cacheplus: {wanted}: applied" in lines
        assert state["env"]["MLX_VLM_CACHEPLUS"] == ("1" if winner == "all" else winner)


def test_zero_says_so_when_it_beats_the_flag(stock):
    result = stock.script("--cacheplus=fast", MLX_VLM_CACHEPLUS="0")
    assert result.stderr == "mlx-vlm-cacheplus: off (MLX_VLM_CACHEPLUS=0)\n"


@pytest.mark.parametrize(
    "words, source",
    [(["--cacheplus=0"], "--cacheplus=0"), (["--cacheplus", "off"], "--cacheplus=off")],
)
def test_zero_as_the_flag_says_so_too(stock, words, source):
    assert stock.script(*words).stderr == f"mlx-vlm-cacheplus: off ({source})\n"


@pytest.mark.parametrize(
    "words, variable", [(["--cacheplus=fast"], None), ([], "fast")]
)
def test_children_inherit_the_choice(stock, words, variable):
    environ = {} if variable is None else {"MLX_VLM_CACHEPLUS": variable}
    assert loaded_state(stock.script("--child", *words, **environ))["child"] == PLUS


def test_a_name_brings_what_it_requires(stock):
    result = stock.script("--cacheplus=second")
    assert loaded_state(result)["filter"] == PLUS
    lines = result.stderr.splitlines()
    assert "mlx-vlm-cacheplus: second: applied" in lines
    assert "mlx-vlm-cacheplus: promise: off" in lines


def test_one_line_for_each_change_and_one_on_the_prefix_cache(stock):
    lines = stock.script("--cacheplus", APC_NUM_BLOCKS="64").stderr.splitlines()
    assert lines[0].endswith(" on mlx-vlm 0.7.10")
    names = ("fast", "second", "promise")
    assert lines[1:4] == [f"mlx-vlm-cacheplus: {name}: applied" for name in names]
    assert lines[4].startswith(
        "mlx-vlm-cacheplus: prefix cache: on, 64 blocks of 16 tokens"
    )
    assert len(lines) == 5


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--cacheplus", "--help"]])
def test_help_lists_the_flag_and_the_options_of_changes(stock, words):
    result = stock.script(*words)
    assert result.returncode == 0 and result.stderr == ""
    for word in (
        "--model",
        "--cacheplus [NAME,NAME]",
        "--cacheplus-depth",
        "MLX_VLM_CACHEPLUS",
    ):
        assert word in result.stdout


def test_serve_is_the_flag(stock):
    result = stock.python("-m", "mlx_vlm_cacheplus.cli", "serve", "--model", "m")
    state = loaded_state(result)
    assert (state["filter"], state["model"]) == (PLUS, "m")
    named = stock.python("-m", "mlx_vlm_cacheplus.cli", "serve", "--cacheplus=promise")
    assert loaded_state(named)["filter"] == PLAIN
    off = stock.python("-m", "mlx_vlm_cacheplus.cli", "serve", MLX_VLM_CACHEPLUS="0")
    assert loaded_state(off)["filter"] == PLAIN


def test_the_package_is_the_command(stock):
    result = stock.python("-m", "mlx_vlm_cacheplus", "serve", "--model", "m")
    assert loaded_state(result)["filter"] == PLUS


def test_serve_needs_no_startup_file(stock):
    """A folder made by `pip install --target` is no site folder: its .pth is not read."""
    import mlx_vlm_cacheplus

    package = mlx_vlm_cacheplus.__path__[0].rsplit("/", 1)[0]
    import pluggy

    others = pluggy.__path__[0].rsplit("/", 1)[0]
    code = (
        f"import sys; sys.path[:0] = [{str(stock.folder)!r}, {package!r}, {others!r}]; import sitecustomize\n"
        "from mlx_vlm_cacheplus.cli import main; sys.exit(main(['serve', '--model', 'm']))"
    )
    assert loaded_state(run_python("-S", "-c", code))["filter"] == PLUS


def test_activate_in_code_then_main(stock):
    code = (
        "import sys, mlx_vlm_cacheplus; mlx_vlm_cacheplus.activate(['fast'])\n"
        "sys.argv = ['mine.py', '--model', 'm']\n"
        "from mlx_vlm.server import main; main()"
    )
    result = stock.code(code)
    state = loaded_state(result)
    assert (state["filter"], state["apc"]) == (PLUS, True)
    assert "mlx-vlm-cacheplus: fast: applied" in result.stderr.splitlines()


def test_all_doors_at_once_apply_once(stock):
    code = "import mlx_vlm_cacheplus as c; c.activate(); from mlx_vlm.server import main; main()"
    result = stock.python("-c", code, "--cacheplus", MLX_VLM_CACHEPLUS="1")
    assert loaded_state(result)["filter"] == PLUS
    assert result.stderr.count("fast: applied") == 1


@pytest.mark.parametrize(
    "words, environ, named",
    [
        (["--cacheplus=fsat"], {}, ["'fsat'", "fast, second, promise"]),
        (["--cacheplus=fast,x,y"], {}, ["'x', 'y'"]),
        (["--cacheplus="], {}, ["--cacheplus=name,name"]),
        (["--cacheplus=,"], {}, ["--cacheplus=name,name"]),
        ([], {"MLX_VLM_CACHEPLUS": "2"}, ["MLX_VLM_CACHEPLUS=2", "'2'"]),
        ([], {"MLX_VLM_CACHEPLUS": "tru\u00e9"}, ["unknown name"]),
        (
            ["--cacheplus"],
            {"APC_ENABLED": "0"},
            ["APC_ENABLED='0'", "unset APC_ENABLED"],
        ),
        (
            [],
            {"APC_ENABLED": "false", "MLX_VLM_CACHEPLUS": "1"},
            ["MLX_VLM_CACHEPLUS=1"],
        ),
        (["--cacheplus"], {"APC_ENABLED": "on"}, ["APC_ENABLED='on'", "APC_ENABLED=1"]),
        (["--cacheplus"], {"APC_BLOCK_SIZE": "big"}, ["APC_BLOCK_SIZE='big'"]),
        (
            ["--cacheplus"],
            {"APC_BLOCK_SIZE": "0"},
            ["APC_BLOCK_SIZE='0'", "at least 1"],
        ),
        (["--cacheplus"], {"APC_NUM_BLOCKS": ""}, ["APC_NUM_BLOCKS=''"]),
        (["--cacheplus"], {"APC_MEMORY_MAX_GB": "nan"}, ["APC_MEMORY_MAX_GB='nan'"]),
        (["--cacheplus"], {"APC_MEMORY_MAX_GB": "0"}, ["APC_MEMORY_MAX_GB", "no room"]),
        (
            ["--cacheplus"],
            {"APC_MEMORY_MAX_GB": "1e7"},
            ["APC_MEMORY_MAX_GB='1e7'", "memory"],
        ),
        (["--cacheplus"], {"APC_DISK_MAX_GB": "-1"}, ["APC_DISK_MAX_GB='-1'"]),
        (["--cacheplus"], {"APC_DISK_ENABLED": "maybe"}, ["APC_DISK_ENABLED='maybe'"]),
        (
            ["--cacheplus", "--cacheplus-depth", "x"],
            {},
            ["--cacheplus-depth='x'", "whole number"],
        ),
        (["--cacheplus", "--cacheplus-depth"], {}, ["--cacheplus-depth"]),
        (["--cacheplus-depth", "7"], {}, ["--cacheplus-depth", "add --cacheplus"]),
        (["--cacheplus-depth=x"], {}, ["--cacheplus-depth", "add --cacheplus"]),
        (["--cacheplus-depth="], {}, ["--cacheplus-depth", "add --cacheplus"]),
        (
            ["--cacheplus=promise", "--cacheplus-depth=7"],
            {},
            ["--cacheplus-depth", "fast", "--cacheplus=promise leaves out"],
        ),
        (
            ["--cacheplus-depth=7"],
            {"MLX_VLM_CACHEPLUS": "-fast"},
            ["--cacheplus-depth", "fast", "MLX_VLM_CACHEPLUS=-fast leaves out"],
        ),
        (
            [],
            {"MLX_VLM_CACHEPLUS": "1", "MLX_VLM_CACHEPLUS_DEPTH": "x"},
            ["MLX_VLM_CACHEPLUS_DEPTH='x'"],
        ),
    ],
)
def test_wrong_word_is_one_line_before_the_model_loads(stock, words, environ, named):
    line = error_line(stock.script("--model", "m", *words, **environ))
    for part in named:
        assert part in line


def test_without_us_stock_settings_are_not_our_business(stock):
    assert loaded_state(stock.script(APC_ENABLED="0"))["apc"] is False
    assert (
        loaded_state(stock.script(APC_ENABLED="0", MLX_VLM_CACHEPLUS="0"))["apc"]
        is False
    )


def test_settings_of_the_user_are_honoured(stock):
    result = stock.script(
        "--cacheplus", APC_ENABLED="yes", APC_BLOCK_SIZE="32", APC_DISK_ENABLED="0"
    )
    state = loaded_state(result)
    assert state["env"]["APC_ENABLED"] == "yes" and state["apc"] is True
    assert "blocks of 32 tokens" in result.stderr and "disk off" in result.stderr


@pytest.mark.parametrize("words", [["--cacheplus-depth", "7"], ["--cacheplus-depth=7"]])
def test_option_of_a_change_ends_in_its_variable(stock, words):
    state = loaded_state(
        stock.script("--cacheplus", *words, MLX_VLM_CACHEPLUS_DEPTH="9")
    )
    assert state["env"]["MLX_VLM_CACHEPLUS_DEPTH"] == "7"


def test_other_programs_that_import_the_server_keep_their_arguments(stock):
    (stock.folder / "tool.py").write_text(
        "import sys, mlx_vlm.server\nprint('LOADED {}', sys.argv[1:])"
    )
    result = stock.python(
        str(stock.folder / "tool.py"),
        "--cacheplus=nope",
        "-h",
        MLX_VLM_CACHEPLUS="fast",
    )
    assert result.returncode == 0
    assert "--cacheplus=nope" in result.stdout and "fast: applied" in result.stderr


def test_help_of_stock_is_otherwise_unchanged():
    """On the real stock, as a user starts it."""
    plus = run_python("-m", "mlx_vlm.server", "--help")
    assert plus.returncode == 0, plus.stderr
    assert "--cacheplus [NAME,NAME]" in plus.stdout and "--draft-model" in plus.stdout


def test_real_stock_refuses_before_a_model_loads():
    result = run_python(
        "-m", "mlx_vlm.server", "--model", "/nowhere", "--cacheplus=nope"
    )
    assert "'nope'" in error_line(result)
