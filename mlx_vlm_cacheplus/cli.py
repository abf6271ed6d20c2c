"""mlx-vlm-cacheplus serve | doctor | replay | cache | patches."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from . import __version__
from .commands.arguments import Parser

COMMANDS = {
    "serve": "start the stock server with the changes applied; takes the stock's arguments",
    "doctor": "say what would be applied here, and what stands in the way",
    "replay": "replay a recorded agent session against a server and count what it reads again",
    "cache": "look at, check, shrink, export or import what is on disk (ls, show, verify, rm, gc, export, import); list, "
    "pin, unpin, forget or reset the sessions of a running server",
    "patches": "list the changes with their patch files and pull-request texts",
}


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] == "serve":
        # Everything behind the word is the stock's, its --help included.
        from .commands import serve

        return serve.run(words[1:])
    parser = Parser(prog="mlx-vlm-cacheplus", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--version", action="version", version=f"mlx-vlm-cacheplus {__version__}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    try:
        return _run(parser, commands, words)
    except ModuleNotFoundError as problem:
        # What a broken installation lacks is what its user wants to know.
        print(
            f"mlx-vlm-cacheplus: error: the package {problem.name!r} is missing: pip install --upgrade "
            "mlx-vlm-cacheplus, or pip install " + str(problem.name),
            file=sys.stderr,
        )
        return 2


def _run(parser: Parser, commands: Any, words: list[str]) -> int:
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if words[:1] == [name]:
            _module(name).add_arguments(command)
    options = parser.parse_args(words)
    return _module(options.command).run(options)


def _module(command: str):
    package = (
        "mlx_vlm_cacheplus.replay.cli"
        if command == "replay"
        else f"mlx_vlm_cacheplus.commands.{command}"
    )
    return importlib.import_module(package)


if __name__ == "__main__":
    sys.exit(main())
