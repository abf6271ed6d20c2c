"""Builds the bundled tiny models: ``python tests/fakes/build_models.py``.

Each model is written as a folder that stock's loader and server take as they take
any other. docs/MODELS.md says what they are for, and what the training costs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.fakes.modelkit.build import NAMES, build, evaluate  # noqa: E402
from tests.fakes.modelkit.drafter_build import (  # noqa: E402
    build_drafter,
    evaluate_drafter,
)
from tests.fakes.modelkit.drafters import DRAFTERS  # noqa: E402

ALL = [*NAMES, *DRAFTERS]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", choices=ALL, help="build this one (repeatable)"
    )
    parser.add_argument("--out", type=Path, default=HERE / "models", metavar="DIR")
    parser.add_argument(
        "--steps", type=int, help="training steps; 0 keeps random weights"
    )
    parser.add_argument(
        "--batch-tokens", type=int, metavar="N", help="tokens of one step"
    )
    parser.add_argument(
        "--rate", type=float, default=3e-3, help="highest learning rate"
    )
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that prepare batches"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="train for about so long instead"
    )
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="train on from the models in DIR"
    )
    parser.add_argument(
        "--joint", action="store_true", help="train a drafter's target along with it"
    )
    parser.add_argument(
        "--noise",
        type=float,
        metavar="LEVEL",
        help="add noise to a drafter's trained weights (default: as committed)",
    )
    parser.add_argument(
        "--chats", type=int, default=4, metavar="N", help="to measure a drafter on"
    )
    parser.add_argument(
        "--evaluate", action="store_true", help="only measure the models in --out"
    )
    return parser


def measure(name: str, options: argparse.Namespace) -> None:
    """Print the table of one model or drafter."""
    if name in DRAFTERS:
        evaluate_drafter(name, options.out, options.chats)
    else:
        evaluate(name, options.out)


def names_to_do(options: argparse.Namespace) -> list[str]:
    """Return what the command line names; else all, or all that can be measured."""
    if options.only or not options.evaluate:
        return options.only or ALL
    folders = {n: Path("drafters", n) if n in DRAFTERS else Path(n) for n in ALL}
    return [name for name in ALL if (options.out / folders[name]).exists()]


def main(argv: list[str] | None = None) -> int:
    """Build, or measure, the models and drafters that the command line names."""
    options = _parser().parse_args(argv)
    for name in names_to_do(options):
        if options.evaluate:
            measure(name, options)
        else:
            (build_drafter if name in DRAFTERS else build)(name, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
