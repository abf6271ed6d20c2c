"""`mlx-vlm-cacheplus patches`: the changes, with the files that carry them upstream."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..change import SUPPORTED_VERSIONS, Change

# A checkout has the files beside the package; a wheel has the data of the changes only.
REPOSITORY = Path(__file__).resolve().parents[2]
ELSEWHERE = (
    "The patches and PR texts are not in the installed package: they are in a checkout of the repository, in patches/ "
    "and upstream-pr/."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.add_argument("name", nargs="?", help="say everything about one change")


def run(options: argparse.Namespace) -> int:
    from ..plugins import all_changes

    rows = [describe(change) for change in all_changes()]
    if options.name:
        rows = [row for row in rows if row["name"] == options.name]
        if not rows:
            known = ", ".join(change.name for change in all_changes())
            print(
                f"error: there is no change named {options.name!r}: name one of {known}",
                file=sys.stderr,
            )
            return 2
    if options.json:
        print(json.dumps(rows, indent=2))
    elif options.name:
        for key, value in rows[0].items():
            text = ", ".join(map(str, value)) if isinstance(value, list) else value
            print(f"{key}: {text if text not in (None, '') else '-'}")
    else:
        Console().print(_table(rows))
    if not (REPOSITORY / "patches").is_dir():
        # Standard output is the list's alone where a program reads it.
        print(ELSEWHERE, file=sys.stderr if options.json else sys.stdout)
    return 0


def describe(change: Change) -> dict[str, Any]:
    version = SUPPORTED_VERSIONS[-1]
    return {
        "name": change.name,
        "summary": change.summary,
        "why": change.why,
        "upstream": change.upstream,
        "remove_when": change.remove_when,
        "guarantee": change.guarantee,
        "requires": list(change.requires),
        "versions": list(change.versions),
        "targets": [str(target) for target in change.targets],
        "patch": _file(change, f"patches/{version}/{change.name}.patch"),
        "pr_text": _file(change, f"upstream-pr/{change.name}.md"),
    }


def _file(change: Change, relative: str) -> str | None:
    """The path where it is present here; None for plumbing and where only the package is installed."""
    return relative if change.has_patch and (REPOSITORY / relative).is_file() else None


def _table(rows: list[dict[str, Any]]) -> Table:
    """Names in full; patch and PR text bear the change's name (see ``patches NAME``)."""
    table = Table()
    table.add_column("change", no_wrap=True)
    table.add_column("what")
    table.add_column("patch")
    table.add_column("PR text")
    for row in rows:
        has_patch, has_text = bool(row["patch"]), bool(row["pr_text"])
        table.add_row(
            row["name"],
            row["summary"],
            "yes" if has_patch else "-",
            "yes" if has_text else "-",
        )
    return table
