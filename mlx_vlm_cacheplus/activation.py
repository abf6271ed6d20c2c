"""From "asked for" to "applied": arms the post-import hooks, runs check -> apply, builds the report.

The way of one start: `_startup.main` (or `activate`) arms three hooks. Stock imports `server.runtime_config` before it reads
its APC_* variables: there the settings are read, checked and completed. Stock's `server` package has then imported
everything that a change can target: there the changes are checked and applied, before a model loads. `server.cli` is
imported last, by main(): there the flag joins the stock's parser.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import __version__
from ._startup import ENV, SERVER, server_arguments
from .patching import Patcher, when_imported

if TYPE_CHECKING:
    from .change import Change, Finding, Report
    from .fingerprint import StockTree
    from .settings import Selection

logger = logging.getLogger("mlx_vlm_cacheplus")


FLAG_OWNER = "(flag)"


@dataclass
class _Process:
    """What this process has been told and has done."""

    patcher: Patcher = field(default_factory=Patcher)
    armed: bool = False
    # What a caller in Python named; None leaves it to the flag and the variable.
    names: tuple[str, ...] | None = None
    selection: Selection | None = None
    changes: list[Change] = field(default_factory=list)
    chosen: list[Change] = field(default_factory=list)
    # Names whose failure stops the start.
    demanded: frozenset[str] = frozenset()
    report: Report | None = None
    # A check imports the stock, whose import calls our hook: that must not apply in between.
    applying: bool = False
    announced: bool = False
    # Variables that we set, with the values they had.
    environ_before: dict[str, str | None] = field(default_factory=dict)


_process = _Process()
_lock = threading.RLock()
_hooked = False


def arm(names: Iterable[str] | str | None = None) -> None:
    """Apply when `mlx_vlm.server` is imported, or now where it is. Imports nothing of the stock."""
    global _hooked
    hooks: dict[str, Callable[[Any], None]] = {
        "mlx_vlm.server.runtime_config": _on_settings,
        "mlx_vlm.server": _on_server,
        "mlx_vlm.server.cli": _on_cli,
    }
    with _lock:
        _process.armed = True
        if names is not None:
            _process.names = _as_tuple(names)
        # wrapt cannot take a hook back, so that they are registered once and look at `armed`.
        first, _hooked = not _hooked, True
        for module, hook in hooks.items():
            if first:
                when_imported(module, hook)
            elif module in sys.modules:
                hook(sys.modules[module])


def activate(
    names: Iterable[str] | str | None = None, *, defer: bool = False
) -> Report | None:
    with _lock:
        if not defer:
            if names is not None:
                _process.names = _as_tuple(names)
            process = _process
            process.applying = True
            try:
                _prepare(default_on=True)
                _apply()
            except Exception:
                _restore_environment()
                raise
            finally:
                process.applying = False
        arm(names)
        return _process.report


def deactivate() -> tuple[str, ...]:
    global _process
    with _lock:
        owners = _process.patcher.revert()
        _restore_environment()
        _process = _Process()
        return tuple(owner for owner in owners if owner != FLAG_OWNER)


def _restore_environment() -> None:
    for name, value in _process.environ_before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _process.environ_before.clear()


def status() -> Report | None:
    return _process.report


def _as_tuple(names: Iterable[str] | str) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _command_words() -> list[str]:
    """The stock server's own arguments; nothing where another program has imported the server."""
    argv = getattr(sys, "argv", None) or [""]
    program = os.path.basename(argv[0])
    if (
        program in (SERVER, SERVER + ".exe")
        or server_arguments(list(sys.orig_argv)) is not None
    ):
        return argv[1:]
    return []


def _on_settings(module: Any) -> None:
    if _process.armed and _process.selection is None:
        _guarded(_prepare)


def _on_server(module: Any) -> None:
    selection = _process.selection
    if not _process.armed or _process.report is not None or selection is None:
        return
    if _process.applying:
        return
    if selection.on:
        _guarded(_apply)
        _announce()
    elif selection.source.startswith((ENV, "--")):
        print(f"mlx-vlm-cacheplus: off ({selection.source})", file=sys.stderr)


def _on_cli(module: Any) -> None:
    if not _process.armed:
        return
    if FLAG_OWNER not in _process.patcher.owners():
        _guarded(_open_door)
    # Somebody who activated in code and then starts the server has not seen the lines yet.
    _announce()


def _open_door() -> None:
    from .door import open_door

    open_door(_process.patcher, FLAG_OWNER)


def _guarded(step: Callable[[], None]) -> None:
    """Run a step of a server start: what the user got wrong ends it with code 2, what we got wrong leaves stock."""
    from .settings import UsageError, exit_with

    try:
        with _lock:
            step()
    except UsageError as problem:
        exit_with(problem)
    except Exception as problem:
        logger.debug("activation failed", exc_info=True)
        text = f"{type(problem).__name__}: {problem}"
        if _process.demanded:
            exit_with(
                UsageError(
                    f"{', '.join(sorted(_process.demanded))} cannot be applied: {text}"
                )
            )
        print(
            f"mlx-vlm-cacheplus: not active, the server starts as stock: {text}",
            file=sys.stderr,
        )


def _announce() -> None:
    if (
        _process.report is not None
        and not _process.announced
        and _process.selection
        and _process.selection.on
    ):
        _process.announced = True
        for line in _process.report.lines():
            print(f"mlx-vlm-cacheplus: {line}", file=sys.stderr, flush=True)


def _prepare(default_on: bool = False) -> None:
    """Read and check everything the user said; complete the environment. Applies nothing."""
    from . import plugins, settings

    words = _command_words()
    selection = settings.read_selection(words, os.environ, _process.names)
    if not selection.on and default_on and not selection.source:
        selection = settings.Selection(True, None, "activate()")
    asks_help = any(word in ("-h", "--help") for word in words)
    if asks_help:
        selection = settings.Selection(False)
    _process.changes = plugins.all_changes()
    if not selection.on and not selection.source and not asks_help:
        _refuse_lone_options(words)
    if selection.on:
        _process.chosen = settings.choose_changes(selection, _process.changes)
        settings.check_prefix_cache(os.environ, selection.source)
        _complete_environment(words, selection)
    _process.selection = selection


def _refuse_lone_options(words: list[str]) -> None:
    """An option of ours without our flag, which stock would not know either."""
    from . import settings

    options = [option for change in _process.changes for option in change.options]
    for option in settings.flags_given(words, options):
        raise settings.UsageError(
            f"{option.flag} is an option of {settings.FLAG}: add {settings.FLAG}, or drop {option.flag}"
        )


def _refuse_options_of_others(words: list[str], source: str) -> None:
    """An option on the command line whose change is left out would do nothing, in silence."""
    from . import settings

    for change in _process.changes:
        for option in settings.flags_given(words, change.options):
            if change not in _process.chosen:
                raise settings.UsageError(
                    f"{option.flag} is an option of {change.name}, which {source} leaves out: name it as well, or drop {option.flag}"
                )


def _complete_environment(words: list[str], selection: Selection) -> None:
    """Set what children must see and what stock reads, and remember what was there before."""
    from . import settings

    before = dict(os.environ)
    try:
        options = [option for change in _process.changes for option in change.options]
        given = settings.read_options(words, options, os.environ)
        for name, value in settings.prefix_cache_defaults(_process.chosen).items():
            os.environ.setdefault(name, value)
        os.environ[ENV] = selection.as_env
    finally:
        for name, value in os.environ.items():
            if before.get(name) != value:
                _process.environ_before.setdefault(name, before.get(name))
    promised = settings.promised_changes(_process.changes, given)
    for change in promised:
        if change not in _process.chosen:
            raise settings.UsageError(
                f"its options ask for {change.name}, which {selection.source} leaves out: name it as well, or drop them"
            )
    _refuse_options_of_others(words, selection.source)
    names = {change.name for change in promised}
    _process.demanded = frozenset(names.union(selection.names or ()))


def _why_off(change: Change) -> str:
    """Of a change that was not left out by name, but requires one that was."""
    left_out = _process.selection.left_out if _process.selection else ()
    if not left_out or change.name in left_out:
        return ""
    chosen = {one.name for one in _process.chosen}
    lacking = [name for name in change.requires if name not in chosen]
    return f"requires {', '.join(lacking)}"


def _apply() -> None:
    """Check every chosen change, then apply them; build the report. Raises UsageError for a demanded one."""
    from .change import Report, State
    from .fingerprint import StockTree
    from .settings import UsageError

    stock = StockTree.installed()
    before = _process.patcher.owners()
    findings: dict[str, Finding] = {}
    for change in _process.changes:
        findings[change.name] = _check(change, stock, findings)
    for change in _process.changes:
        if findings[change.name].state is State.READY:
            findings[change.name] = _apply_one(change, findings)
    for name in sorted(_process.demanded):
        if findings[name].state not in (State.APPLIED, State.ALREADY_UPSTREAM):
            for owner in reversed(_process.patcher.owners()):
                if owner not in before:
                    _process.patcher.revert(owner)
            raise UsageError(
                f"{findings[name].line()}; it was asked for by name, so the server does not start without it"
            )
    _process.report = Report(
        __version__, stock.version, list(findings.values()), _notes(findings)
    )


def _check(change: Change, stock: StockTree, findings: dict[str, Finding]) -> Finding:
    from . import checks
    from .change import Finding, State

    if change.name in _process.patcher.owners():
        return Finding(change.name, State.APPLIED)
    if change not in _process.chosen:
        return Finding(change.name, State.OFF, _why_off(change))
    try:
        finding = checks.check_files(change, stock)
        if finding.state is State.READY:
            finding = checks.check_requirements(change, findings)
        if finding.state is State.READY:
            finding = checks.check_loaded(change, stock, _process.patcher)
        return finding
    except Exception as problem:
        logger.debug("check of %s failed", change.name, exc_info=True)
        return Finding(
            change.name,
            State.FAILED,
            f"its check failed: {type(problem).__name__}: {problem}",
        )


def _apply_one(change: Change, findings: dict[str, Finding]) -> Finding:
    """Apply one change, or leave nothing of it behind."""
    from . import checks
    from .change import Finding, State

    unmet = checks.check_requirements(change, findings)
    if unmet.state is not State.READY:
        return unmet
    try:
        change.apply(_process.patcher.for_change(change.name, change.targets))
    except Exception as problem:
        _process.patcher.revert(change.name)
        logger.debug("%s was rolled back", change.name, exc_info=True)
        return Finding(
            change.name,
            State.FAILED,
            f"rolled back: {type(problem).__name__}: {problem}",
        )
    return Finding(change.name, State.APPLIED)


def _notes(findings: dict[str, Finding]) -> list[str]:
    from .change import State
    from .settings import describe_prefix_cache

    module = sys.modules.get("mlx_vlm.server.runtime")
    config = getattr(getattr(module, "runtime", None), "config", None)
    if config is None:
        return []
    applied = {
        name
        for name, finding in findings.items()
        if finding.state in (State.APPLIED, State.ALREADY_UPSTREAM)
    }
    disk = None
    if "durable-disk" in applied:
        from .changes.durable_disk import describe_disk

        disk = describe_disk(config.apc_overrides())
    return [describe_prefix_cache(config, "segment-tree" in applied, disk)]
