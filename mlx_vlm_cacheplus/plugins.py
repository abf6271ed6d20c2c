"""The plugin manager, and one typed call for each hook. A broken plugin is reported and left out: it is never the reason
that a server does not start or a request fails."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pluggy

from . import hookspecs
from .change import Change, Report
from .changes import load_changes
from .hookspecs import PROJECT

logger = logging.getLogger(PROJECT)


class _Defaults:
    @hookspecs.hookimpl(trylast=True)
    def cacheplus_identify_session(
        self, headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> str | None:
        from .core.session_identity import identify

        return identify(headers, body)


@functools.cache
def manager() -> pluggy.PluginManager:
    made = pluggy.PluginManager(PROJECT)
    made.add_hookspecs(hookspecs)
    made.register(_Defaults(), name="defaults")
    for entry in importlib.metadata.entry_points(group=PROJECT):
        try:
            made.register(entry.load(), name=entry.name)
        except Exception as problem:
            logger.warning(
                "plugin %s is left out: %s: %s",
                entry.name,
                type(problem).__name__,
                problem,
            )
    return made


def _call(hook: Callable[..., Any], fallback: Any, **arguments: Any) -> Any:
    try:
        return hook(**arguments)
    except Exception as problem:
        logger.warning(
            "a plugin failed in %s: %s: %s",
            getattr(hook, "name", hook),
            type(problem).__name__,
            problem,
        )
        return fallback


def all_changes() -> list[Change]:
    """Ours, then those of plugins; the first owner of a name keeps it."""
    changes = load_changes()
    names = {change.name for change in changes}
    for group in _call(manager().hook.cacheplus_register_changes, []):
        for change in group:
            if change.name in names:
                logger.warning("a second change named %s is left out", change.name)
                continue
            names.add(change.name)
            changes.append(change)
    return changes


def identify_session(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    return _call(
        manager().hook.cacheplus_identify_session, None, headers=headers, body=body
    )


def publish_record(record: Mapping[str, Any]) -> None:
    _call(manager().hook.cacheplus_reuse_recorded, None, record=record)


def collect_advice(report: Report) -> list[str]:
    groups = _call(manager().hook.cacheplus_doctor_advice, [], report=report)
    return [line for group in groups for line in group]
