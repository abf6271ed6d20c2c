"""Can a change be applied? First on the stock's files (doctor stops here), then on the loaded objects.

Nothing here changes anything.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from . import fingerprint
from .change import Change, Finding, State, Target
from .fingerprint import StockTree
from .patching import ABSENT, Patcher, raw_value, resolve_holder


def check_files(change: Change, stock: StockTree) -> Finding:
    """READY, or why not: upstream has it, the version is unknown, a symbol differs."""
    if change.probe(stock):
        return Finding(
            change.name, State.ALREADY_UPSTREAM, f"mlx-vlm {stock.version} has it"
        )
    expected = fingerprint.expected_hashes(change, stock.version)
    if expected is None or stock.version not in change.versions:
        return _unknown_version(change, stock)
    differing = fingerprint.differences(change, stock, expected)
    if differing:
        reason = f"not the sources of mlx-vlm {stock.version}: {', '.join(differing)}"
        return Finding(change.name, State.DRIFTED, reason, _reinstall_remedy(stock))
    return Finding(change.name, State.READY)


def _reinstall_remedy(stock: StockTree) -> str:
    return f"reinstall mlx-vlm=={stock.version}, or read the difference and run `{fingerprint.REFRESH}`"


def _unknown_version(change: Change, stock: StockTree) -> Finding:
    """Say how far the unknown version is from the newest known one: that is what somebody has to read."""
    known = [
        version
        for version in change.versions
        if fingerprint.expected_hashes(change, version) is not None
    ]
    remedy = f"use one of {', '.join(known) or 'no version yet'}, or upgrade mlx-vlm-cacheplus; to refresh: `{fingerprint.REFRESH}`"
    reason = f"mlx-vlm {stock.version} is not known"
    if known:
        expected = fingerprint.expected_hashes(change, known[-1]) or {}
        differing = fingerprint.differences(change, stock, expected)
        reason += (
            f", against {known[-1]}: {', '.join(differing) or 'no target differs'}"
        )
    return Finding(change.name, State.UNKNOWN_VERSION, reason, remedy)


def check_requirements(change: Change, findings: Mapping[str, Finding]) -> Finding:
    """READY, or the state of the first requirement that is not in effect. Requirements stand earlier in the order."""
    for name in change.requires:
        required = findings.get(name)
        if required is None:
            return Finding(
                change.name,
                State.FAILED,
                f"it needs {name}, which does not exist or comes after it",
            )
        if required.state not in (State.APPLIED, State.READY, State.ALREADY_UPSTREAM):
            return Finding(
                change.name,
                required.state,
                f"it needs {name}, which is {required.state}",
            )
    return Finding(change.name, State.READY)


def check_loaded(change: Change, stock: StockTree, patcher: Patcher) -> Finding:
    """READY, or why the objects in this process can no longer be wrapped. Imports the targets' modules."""
    reason = serving_reason() or change.too_late()
    if reason:
        return Finding(
            change.name,
            State.TOO_LATE,
            reason,
            "activate before the server loads a model",
        )
    for target in change.targets:
        try:
            importlib.import_module(target.module)
            holder, attribute = resolve_holder(target.module, target.qualname)
        except (ImportError, KeyError, TypeError) as problem:
            reason = f"{target.qualname} is gone from {target.module} ({type(problem).__name__}: {problem})"
            return Finding(change.name, State.DRIFTED, reason, _reinstall_remedy(stock))
        finding = _check_object(change, target, stock, patcher, holder, attribute)
        if finding is not None:
            return finding
    return Finding(change.name, State.READY)


def _check_object(
    change: Change,
    target: Target,
    stock: StockTree,
    patcher: Patcher,
    holder: Any,
    attribute: str,
) -> Finding | None:
    raw = raw_value(holder, attribute)
    if patcher.holds(holder, attribute, raw):
        return None
    if raw is ABSENT:
        if not target.must_exist:
            return None
        reason = f"{target.qualname} is gone from the loaded {target.module}"
        return Finding(change.name, State.DRIFTED, reason, _reinstall_remedy(stock))
    if not target.must_exist:
        reason = f"somebody has already added {target.qualname} to {target.module}"
        return Finding(
            change.name,
            State.TOO_LATE,
            reason,
            "remove the other patch, or activate before it",
        )
    other = replaced_by(raw, target, stock)
    if other:
        reason = f"{target.qualname} of {target.module} was already replaced by {other}"
        return Finding(
            change.name,
            State.TOO_LATE,
            reason,
            "remove the other patch, or activate before it",
        )
    return None


def serving_reason() -> str:
    """Whether a stock server in this process has gone past the point where patching is safe."""
    module = sys.modules.get("mlx_vlm.server.runtime")
    runtime = getattr(module, "runtime", None)
    if getattr(runtime, "response_generator", None) is not None or bool(
        getattr(runtime, "model_cache", None)
    ):
        return "the server is serving a model already"
    return ""


def replaced_by(raw: Any, target: Target, stock: StockTree) -> str:
    """Who put the object there, where it is not what the stock's file defines; empty where it is.

    Told by the place of the code: a wrapper that copies names and module still has its own file and lines.
    """
    value = raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)
    nodes = stock.nodes(target)
    if any(getattr(node, "decorator_list", None) for node in nodes):
        value = inspect.unwrap(value) if callable(value) else value
    if type(value) is FunctionType:
        code = value.__code__
        path = stock.path(stock.definition(target).module)
        same_file = path is not None and os.path.realpath(
            code.co_filename
        ) == os.path.realpath(path)
        lines = [
            range(fingerprint.first_line(node), (node.end_lineno or node.lineno) + 1)
            for node in nodes
        ]
        if same_file and any(code.co_firstlineno in span for span in lines):
            return ""
        return f"{code.co_name} of {os.path.basename(code.co_filename)}, line {code.co_firstlineno}"
    if isinstance(value, type):
        return (
            ""
            if value.__module__ == target.module
            else f"{value.__module__}.{value.__qualname__}"
        )
    if callable(value) and hasattr(value, "__wrapped__"):
        return f"a {type(value).__module__}.{type(value).__name__}"
    return ""
