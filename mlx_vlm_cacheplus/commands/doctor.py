"""`mlx-vlm-cacheplus doctor`: what a server start would do here, without starting one."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from .. import __version__, _startup
from ..change import Finding, Report, State

DEFAULT_PORT = 8080
# Asked of another process: importing mlx can end an interpreter where its library does not fit the machine.
DEVICE_QUESTION = "import mlx.core as m; print(m.default_device())"


@dataclass(frozen=True)
class Check:
    """One line of the doctor. level: ok, note (nothing is wrong), problem."""

    name: str
    level: str
    detail: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="port to try (%(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """0 where a start would apply everything that is wanted, else 1."""
    from ..plugins import collect_advice

    report, selection_check = examine_changes()
    checks = [
        _check_python(),
        _check_stock(report),
        _check_mlx(),
        _check_startup_file(),
        selection_check,
        _check_prefix_cache(),
        _check_disk(),
        _check_tenants(),
        _check_port(options.port),
    ]
    advice = collect_advice(report)
    healthy = all(check.level != "problem" for check in checks)
    healthy = healthy and all(finding.state.is_good for finding in report.findings)
    if options.json:
        document: dict[str, Any] = report.as_dict()
        document.update(
            checks=[asdict(check) for check in checks], advice=advice, healthy=healthy
        )
        print(json.dumps(document, indent=2))
    else:
        _print(checks, report, advice)
    return 0 if healthy else 1


def examine_changes() -> tuple[Report, Check]:
    """The state that each change would have, from files alone."""
    from .. import checks, plugins, settings
    from ..fingerprint import StockMissing, StockTree

    changes = plugins.all_changes()
    try:
        wanted = settings.read_selection((), os.environ)
        chosen = (
            settings.choose_changes(wanted, changes)
            if wanted.on or not wanted.source
            else []
        )
        selection = Check("selection", "ok", _selection_text(wanted))
        options = [option for change in changes for option in change.options]
        given = settings.read_options((), options, dict(os.environ))
        for change in settings.promised_changes(changes, given):
            if wanted.on and change not in chosen:
                selection = Check(
                    "selection",
                    "problem",
                    f"the options of {change.name} are set, and {wanted.source} leaves it out",
                    "the server does not start",
                )
    except settings.UsageError as problem:
        chosen = list(changes)
        selection = Check("selection", "problem", str(problem))
    report = Report(__version__, "not found")
    try:
        stock = StockTree.installed()
        report.stock_version = stock.version
    except StockMissing as problem:
        report.findings = [Finding(c.name, State.FAILED, str(problem)) for c in changes]
        return report, selection
    findings: dict[str, Finding] = {}
    for change in changes:
        finding = Finding(change.name, State.OFF)
        if change in chosen:
            finding = checks.check_files(change, stock)
        if finding.state is State.READY:
            finding = checks.check_requirements(change, findings)
        findings[change.name] = finding
    report.findings = list(findings.values())
    return report, selection


def _selection_text(wanted: Any) -> str:
    if wanted.on:
        named = wanted.names or ("all changes",)
        less = f", less {', '.join(wanted.left_out)}" if wanted.left_out else ""
        return f"{wanted.source}: {', '.join(named)}{less}"
    if wanted.source:
        return f"off ({wanted.source}); it wins over the flag"
    return f"nothing set: start the server with --cacheplus, or set {_startup.ENV}=1"


def _check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok", f"{version} ({sys.executable})")


def _check_stock(report: Report) -> Check:
    from ..change import SUPPORTED_VERSIONS

    known = ", ".join(SUPPORTED_VERSIONS)
    if report.stock_version == "not found":
        return Check("mlx-vlm", "problem", "not found", "pip install mlx-vlm")
    if report.stock_version not in SUPPORTED_VERSIONS:
        advice = f"known are {known}; the server starts as stock"
        return Check("mlx-vlm", "problem", f"{report.stock_version} is unknown", advice)
    return Check("mlx-vlm", "ok", report.stock_version)


def _check_mlx() -> Check:
    try:
        version = importlib.metadata.version("mlx")
    except importlib.metadata.PackageNotFoundError:
        return Check(
            "mlx", "problem", "not installed", "pip install 'mlx-vlm-cacheplus[cpu]'"
        )
    # Without our variable: the question must not arm anything.
    environ = {key: value for key, value in os.environ.items() if key != _startup.ENV}
    try:
        answer = subprocess.run(
            [sys.executable, "-c", DEVICE_QUESTION],
            capture_output=True,
            text=True,
            timeout=60,
            env=environ,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return Check("mlx", "problem", f"{version}, not usable: {problem}")
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        advice = "on Linux, install the extra cpu or cuda"
        return Check("mlx", "problem", f"{version}, not usable: {last}", advice)
    return Check("mlx", "ok", f"{version} on {answer.stdout.strip()}")


def _check_startup_file() -> Check:
    if _startup.ran:
        return Check("start-up file", "ok", "read by this interpreter")
    advice = "the flag is unknown to the stock server: use `mlx-vlm-cacheplus serve`"
    return Check("start-up file", "problem", "not read by this interpreter", advice)


def _check_prefix_cache() -> Check:
    from .. import settings

    try:
        settings.check_prefix_cache(os.environ, settings.FLAG)
    except settings.UsageError as problem:
        return Check("prefix cache", "problem", str(problem))
    given = sorted(name for name in os.environ if name.startswith("APC_"))
    text = ", ".join(f"{name}={os.environ[name]}" for name in given)
    return Check("prefix cache", "ok", text or "stock's defaults; the flag turns it on")


def _check_disk() -> Check:
    """Where the cache would survive a restart, and whether it can."""
    from ..changes import durable_disk

    try:
        found = durable_disk.settings(None)
    except ValueError as problem:
        return Check("disk", "problem", str(problem), "the server does not start")
    if found is None:
        return Check("disk", "ok", "off: the cache does not survive restarts")
    refused = durable_disk.reason_refused(found.folder)
    if refused is not None:
        advice = "the server starts, and keeps nothing there"
        return Check("disk", "problem", refused, advice)
    there = next(p for p in (found.folder, *found.folder.parents) if p.exists())
    free = shutil.disk_usage(there).free
    detail = f"{durable_disk.describe_disk(None)}, {free / (1 << 30):.0f} GB free"
    if found.max_bytes is not None and free < found.max_bytes:
        advice = "less is free than it may take, unless it holds it already; --cacheplus-disk-gb sets less"
        return Check("disk", "note", detail, advice)
    return Check("disk", "ok", detail)


def _check_tenants() -> Check:
    """Who may name a tenant, and how long what a tenant has stored can be found."""
    from ..changes.tenant_isolation import CHANGE

    key, proxy, _ = (option.env for option in CHANGE.options)
    for option in CHANGE.options:
        value = os.environ.get(option.env)
        try:
            if value is not None and option.check is not None:
                option.check(value)
        except ValueError as problem:
            detail = f"{option.env}={value!r}: {problem}"
            return Check("tenants", "problem", detail, "the server does not start")
    who = "the proxy" if proxy in os.environ else "any client"
    until = "across restarts" if key in os.environ else "within one process"
    advice = ""
    if key in os.environ and proxy not in os.environ:
        advice = f"{proxy} would leave it to your proxy to name tenants"
    elif proxy in os.environ and key not in os.environ:
        advice = f"{key} would keep tenants' salts across restarts"
    return Check(
        "tenants", "ok", f"named by {who}; their salts are the same {until}", advice
    )


def _check_port(port: int) -> Check:
    """A note at most: the port may be taken by the very server that is being looked into."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as problem:
            advice = "a server is running there, or choose another with --port"
            return Check("port", "note", f"{port}: {problem}", advice)
    return Check("port", "ok", f"{port} is free")


def _print(checks: list[Check], report: Report, advice: list[str]) -> None:
    signs = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}
    print(f"mlx-vlm-cacheplus {__version__}")
    for check in checks:
        print(f"  {signs[check.level]} {check.name}: {check.detail}")
        if check.advice:
            print(f"          -> {check.advice}")
    print("changes")
    for finding in report.findings:
        sign = signs["ok" if finding.state.is_good else "problem"]
        print(f"  {sign} {finding.name}: {finding.state}")
        for text in (finding.reason, finding.remedy):
            if text:
                print(f"          -> {text}")
    if not report.findings:
        print("  none")
    for line in advice:
        print(f"  advice  {line}")
