"""The four hooks for other packages; see docs/HOOKS.md. Entry-point group: mlx_vlm_cacheplus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pluggy

from .change import Change, Report

PROJECT = "mlx_vlm_cacheplus"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def cacheplus_register_changes() -> list[Change]:
    """Give further changes; they are applied after ours, in the order given. Called before mlx is imported."""
    raise NotImplementedError


@hookspec(firstresult=True)
def cacheplus_identify_session(
    headers: Mapping[str, str], body: Mapping[str, Any]
) -> str | None:
    """Name the session that a request belongs to; None leaves it to the next plugin. headers have lower-case names."""
    raise NotImplementedError


@hookspec
def cacheplus_reuse_recorded(record: Mapping[str, Any]) -> None:
    """Receive the reuse record of a request that has ended. Called off the decode path; must return quickly."""
    raise NotImplementedError


@hookspec
def cacheplus_doctor_advice(report: Report) -> list[str]:
    """Give lines of advice for `mlx-vlm-cacheplus doctor`. Called without a model and without a server."""
    raise NotImplementedError
