"""doctor and patches: the same facts as a start, without one."""

from __future__ import annotations

import json
import re
import socket

import pytest

from mlx_vlm_cacheplus import _startup, cli
from mlx_vlm_cacheplus.commands import doctor

from .stock import Stock, run_python

DOCTOR = ("-m", "mlx_vlm_cacheplus.cli", "doctor", "--json", "--port", "0")


def ask(stock: Stock, code: int = 0, **environ: str) -> dict:
    result = stock.python(*DOCTOR, **environ)
    assert result.returncode == code, (result.stdout, result.stderr)
    return json.loads(result.stdout)


def states(document: dict) -> dict[str, str]:
    return {row["name"]: row["state"] for row in document["changes"]}


def check(document: dict, name: str) -> dict:
    return next(row for row in document["checks"] if row["name"] == name)


def test_healthy(stock):
    document = ask(stock)
    assert document["healthy"] is True and document["mlx_vlm"] == "0.7.10"
    assert states(document) == {"fast": "ready", "second": "ready", "promise": "ready"}
    levels = {row["name"]: row["level"] for row in document["checks"]}
    assert levels.pop("disk") in ("ok", "note"), "how much is free is the machine's"
    assert set(levels.values()) == {"ok"}
    assert check(document, "mlx")["detail"].split(" on ")[1].startswith("Device(")


@pytest.mark.parametrize("folder", ["off", "new/folder"])
def test_the_disk_of_the_cache(stock, tmp_path, folder):
    value = folder if folder == "off" else str(tmp_path / folder)
    found = check(
        ask(stock, MLX_VLM_CACHEPLUS_DISK=value, MLX_VLM_CACHEPLUS_DISK_GB="0"), "disk"
    )
    assert found["level"] == "ok"
    assert found["detail"].startswith(
        "off" if folder == "off" else f"{value}, no limit"
    )
    assert not (tmp_path / "new").exists(), "nothing is made"


def test_less_is_free_than_the_disk_may_take(stock, tmp_path):
    environ = {"MLX_VLM_CACHEPLUS_DISK": str(tmp_path / "d")}
    found = check(ask(stock, **environ, MLX_VLM_CACHEPLUS_DISK_GB="1e7"), "disk")
    assert found["level"] == "note" and "GB free" in found["detail"]


def test_a_folder_that_cannot_be_used(stock, tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below"):
        path = str(tmp_path / name)
        found = check(ask(stock, code=1, MLX_VLM_CACHEPLUS_DISK=path), "disk")
        assert found["level"] == "problem"
        assert "is not a folder: name another one" in found["detail"]


def test_selection_of_the_variable(stock):
    document = ask(stock, MLX_VLM_CACHEPLUS="promise")
    assert states(document) == {"fast": "off", "second": "off", "promise": "ready"}
    document = ask(stock, MLX_VLM_CACHEPLUS="0")
    assert set(states(document).values()) == {"off"}
    assert "wins over the flag" in check(document, "selection")["detail"]


@pytest.mark.parametrize(
    "environ, name",
    [
        ({"MLX_VLM_CACHEPLUS": "nope"}, "selection"),
        ({"MLX_VLM_CACHEPLUS": "-nope"}, "selection"),
        ({"APC_ENABLED": "0"}, "prefix cache"),
        ({"APC_BLOCK_SIZE": "x"}, "prefix cache"),
        ({"APC_TENANT_KEY_FILE": "/nowhere"}, "tenants"),
        ({"APC_TENANT_HEADER": "two words"}, "tenants"),
    ],
)
def test_conflicting_settings_are_problems(stock, environ, name):
    assert check(ask(stock, code=1, **environ), name)["level"] == "problem"


@pytest.mark.parametrize(
    "names, level", [("segment-tree", "problem"), ("tenant-isolation", "ok")]
)
def test_options_of_a_change_that_is_left_out(monkeypatch, names, level):
    monkeypatch.setenv("MLX_VLM_CACHEPLUS", names)
    monkeypatch.setenv("APC_TENANT_HEADER", "x-tenant")
    assert doctor.examine_changes()[1].level == level
    monkeypatch.delenv("APC_TENANT_HEADER")
    assert doctor.examine_changes()[1].level == "ok"


def test_values_of_options_are_checked_as_at_a_start(monkeypatch):
    monkeypatch.setenv("MLX_VLM_DRAFT_MERGE", "sometimes")
    found = doctor.examine_changes()[1]
    assert (
        found.level == "problem" and "MLX_VLM_DRAFT_MERGE='sometimes'" in found.detail
    )
    monkeypatch.setenv("MLX_VLM_DRAFT_MERGE", "never")
    assert doctor.examine_changes()[1].level == "ok"


def test_who_may_name_a_tenant(stock, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    key, proxy = (f"APC_TENANT_{name}_FILE" for name in ("KEY", "PROXY_SECRET"))

    def tenants(*names):
        row = check(ask(stock, **dict.fromkeys(names, str(secret))), "tenants")
        return row["detail"], row["advice"]

    nothing = "named by any client; their salts are the same within one process"
    assert tenants() == (nothing, "")
    assert proxy in tenants(key)[1] and "across restarts" in tenants(key)[0]
    assert key in tenants(proxy)[1] and "by the proxy" in tenants(proxy)[0]
    assert tenants(key, proxy)[1] == ""


def test_drift_and_what_hangs_on_it(stock):
    stock.edit("generate/ar.py", 'return ["stock", keep]', "return keep")
    document = ask(stock, code=1)
    assert states(document) == {
        "fast": "drifted",
        "second": "drifted",
        "promise": "ready",
    }
    row = document["changes"][0]
    assert "GenerationBatch.filter in mlx_vlm/generate/ar.py differs" in row["reason"]
    assert "fingerprint refresh" in row["remedy"]


def test_unknown_version(stock):
    stock.edit("version.py", "0.7.10", "0.7.12")
    document = ask(stock, code=1)
    assert set(states(document).values()) == {"unknown_version"}
    assert check(document, "mlx-vlm")["level"] == "problem"


def test_advice_of_plugins(stock):
    site = stock.folder / "sitecustomize.py"
    adviser = (
        "class Adviser:\n    @hookspecs.hookimpl\n    def cacheplus_doctor_advice(self, report):\n"
        "        return [f'seen {len(report.findings)} changes']\nplugins.manager().register(Adviser())\n"
    )
    site.write_text(site.read_text() + adviser)
    assert ask(stock)["advice"] == ["seen 3 changes"]


def test_text_says_the_same(stock):
    stock.edit("version.py", "0.7.10", "0.7.12")
    result = stock.python("-m", "mlx_vlm_cacheplus.cli", "doctor", "--port", "0")
    assert result.returncode == 1
    assert "PROBLEM fast: unknown_version" in result.stdout
    assert "-> mlx-vlm 0.7.12 is not known" in result.stdout


def test_nothing_of_the_stock_is_imported():
    code = (
        "import sys; from mlx_vlm_cacheplus.cli import main; main(['doctor', '--port', '0'])\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_vlm')])"
    )
    assert run_python("-c", code).stdout.endswith("[]\n")


def test_real_stock_is_ready():
    document = json.loads(run_python(*DOCTOR).stdout)
    assert set(states(document).values()) <= {"ready", "already_upstream"}, document


def test_port_that_is_taken_is_a_note():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = doctor._check_port(other.getsockname()[1])
    assert taken.level == "note" and "--port" in taken.advice
    assert doctor._check_port(99999).level == "note"


def test_missing_stock_and_missing_mlx(monkeypatch, capsys):
    import importlib.metadata

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["doctor", "--port", "0"]) == 1
    text = capsys.readouterr().out
    assert "PROBLEM mlx-vlm: not found" in text and "PROBLEM mlx: not installed" in text


def test_startup_file_that_was_not_read(monkeypatch):
    monkeypatch.setattr(_startup, "ran", False)
    found = doctor._check_startup_file()
    assert found.level == "problem" and "mlx-vlm-cacheplus serve" in found.advice


def test_patches_lists_every_change(capsys):
    from mlx_vlm_cacheplus.changes import ORDER

    assert cli.main(["patches", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert tuple(row["name"] for row in rows) == ORDER
    assert cli.main(["patches"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ORDER)
    assert cli.main(["patches", ORDER[0]]) == 0
    assert "remove_when: " in capsys.readouterr().out
    assert cli.main(["patches", "nope"]) == 2
    out, error = capsys.readouterr()
    assert out == "" and "'nope'" in error and ORDER[0] in error


@pytest.mark.parametrize("words", [[], ["row-errors"], ["--json"]])
def test_an_installed_package_says_once_where_the_patches_are(
    words, tmp_path, monkeypatch, capsys
):
    from mlx_vlm_cacheplus.commands import patches

    assert cli.main(["patches", *words]) == 0
    assert "checkout" not in "".join(capsys.readouterr())
    monkeypatch.setattr(patches, "REPOSITORY", tmp_path)
    assert cli.main(["patches", *words]) == 0
    out, error = capsys.readouterr()
    said, other = (error, out) if "--json" in words else (out, error)
    assert said.count("a checkout of the repository") == 1 and "checkout" not in other


def test_a_mistake_is_one_line_in_words(capsys):
    for words, text in (
        (["doctor", "--port", "x"], "--port: give a whole number, not 'x'"),
        (["nonsense"], "'nonsense'"),
        (["patches", "a", "b"], "unrecognized arguments: b"),
    ):
        with pytest.raises(SystemExit) as leaving:
            cli.main(words)
        error = capsys.readouterr().err
        assert leaving.value.code == 2 and error.count("\n") == 1
        assert text in error and "--help" in error


def test_help_says_what_cache_does_on_disk():
    from mlx_vlm_cacheplus.commands.cache import DISK_ACTIONS

    assert set(DISK_ACTIONS) <= set(re.findall(r"\w+", cli.COMMANDS["cache"]))


def test_command_line_help(capsys):
    for words in (
        ["--help"],
        ["doctor", "--help"],
        ["replay", "--help"],
        ["patches", "-h"],
    ):
        with pytest.raises(SystemExit) as leaving:
            cli.main(words)
        assert leaving.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)
    with pytest.raises(SystemExit) as leaving:
        cli.main([])
    assert leaving.value.code == 2
