"""The main job, seen: stock with its prefix cache beside stock with ``--cacheplus``, on the bundled tiny models.

Starts one server at a time, on a free local port and with a cache folder of its own, replays one session on it and
stops it.  The exit status is 0 when the claim is met: the same replies, and no reply read again.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from ..commands.arguments import Parser, file_to_write, whole_from
from . import client, compare, session, table
from .cli import progress_bar
from .compare import PLUS, STOCK, Comparison
from .rows import ESTIMATE, Row
from .serving import Server, StartFailed
from .tokens import ModelTokenizer
from .widen import widened_copy
from .wire import ServerFault

# Tokens that a turn may compute beyond the new ones: the one that is always computed, or stock's block of 16.
_SLACK = {"hybrid": 1, "window": 1, "dense": 16}
_DEFAULT = ("hybrid", "dense")


@dataclass(frozen=True)
class Case:
    """A model, what its cache may cost a turn, and whether it is one of ours."""

    name: str
    directory: Path
    slack: int
    bundled: bool


def parser() -> Parser:
    """Arguments of the demo; none is needed."""
    result = Parser(prog="python -m mlx_vlm_cacheplus.replay.demo", description=__doc__)
    result.add_argument(
        "--session",
        default="short",
        help="session file or bundled session (default: short)",
    )
    result.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help="bundled model or model directory; may be repeated",
    )
    result.add_argument(
        "--slack",
        type=whole_from(0),
        help="tokens a turn may compute beyond the new ones",
    )
    result.add_argument(
        "--rounds",
        type=whole_from(1),
        default=1,
        help="rounds, in alternating order (default: 1)",
    )
    result.add_argument(
        "--warm", action="store_true", help="replay once before timing, on each server"
    )
    result.add_argument("--turns", type=whole_from(1), help="stop after so many turns")
    result.add_argument(
        "--json",
        type=file_to_write,
        metavar="FILE",
        help="write the raw rows of both sides to FILE",
    )
    return result


def cases(names: Sequence[str], slack: int | None) -> list[Case]:
    """The models to show; SessionError when one is not there."""
    found = []
    ours = Path(__file__).resolve().parents[2] / "tests" / "fakes" / "models"
    for name in names:
        bundled = not Path(name).is_dir()
        directory = ours / name if bundled else Path(name)
        if not (directory / "config.json").is_file():
            raise session.SessionError(
                f"no model {name!r}: the bundled models are in the source checkout, below tests/fakes/models; "
                "run the demo there, or name a model directory with --model"
            )
        allowed = _SLACK.get(directory.name, 16) if slack is None else slack
        found.append(Case(directory.name, directory.resolve(), allowed, bundled))
    return found


@dataclass(frozen=True)
class Plan:
    """What is done with each model; ``home`` takes the servers' caches and logs."""

    session: session.Session
    rounds: int
    warm: bool
    home: Path
    bar: Progress


def run_case(case: Case, plan: Plan) -> Comparison:
    """Both sides of one model, one server at a time; a bundled model in float32."""
    if case.bundled:
        wide = plan.home / case.name / "model"
        case = replace(case, directory=widened_copy(case.directory, wide))
    renderer = ModelTokenizer(case.directory)
    result = Comparison(case.name)
    steps = 2 * plan.rounds * len(plan.session.turns)
    task = plan.bar.add_task(case.name, total=steps)
    for number, label in enumerate(compare.order(plan.rounds)):
        home = plan.home / f"{case.name}-{number}-{label}"
        result.rows[label].append(_run_side(case, plan, label, home, renderer, task))
    return result


def _run_side(
    case: Case,
    plan: Plan,
    label: str,
    home: Path,
    renderer: ModelTokenizer,
    task: TaskID,
) -> list[Row]:
    def say(text: str) -> None:
        plan.bar.update(task, description=f"{case.name}: {label}{text}")

    model = str(case.directory)
    waiting = Server(
        model,
        home,
        plus=label == PLUS,
        on_wait=lambda seconds: say(f" server starts, {seconds:.0f} s"),
    )
    with waiting as server:
        say("")
        options = client.Options(server.base, model=model, timeout=120.0)
        try:
            return compare.measure(
                plan.session,
                options,
                renderer,
                lambda row: plan.bar.advance(task),
                plan.warm,
            )
        except ServerFault as error:
            place = f"{case.name}, {label}"
            raise ServerFault(f"{place}: {error}\n{server.tail()}") from None


def side_by_side(comparison: Comparison) -> Table:
    """One line a turn of the last round: what both sides restored and prefilled."""
    heading = f"{comparison.name}: stock with its prefix cache beside --cacheplus"
    result = Table(
        title=heading, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    columns = ("turn", "prompt", "new", "generated")
    for name in (
        *columns,
        *(f"{side}\n{what}" for side in (STOCK, PLUS) for what in _PER_SIDE),
    ):
        result.add_column(name, justify="right")
    for stock, plus in zip(
        comparison.rows[STOCK][-1], comparison.rows[PLUS][-1], strict=False
    ):
        result.add_row(
            str(stock.turn),
            str(stock.prompt),
            _new(plus),
            str(stock.generated),
            *_half(stock),
            *_half(plus),
        )
    result.add_section()
    stock_sum, plus_sum = comparison.totals(STOCK), comparison.totals(PLUS)
    halves = []
    for sums in (stock_sum, plus_sum):
        shown = table.ratio(sums.prefilled, sums.new, sums.estimated)
        halves += [
            str(sums.restored),
            str(sums.prefilled),
            shown,
            table.seconds(sums.ttft),
        ]
    mark = "~" if plus_sum.estimated else ""
    lead = [
        "total",
        str(stock_sum.prompt),
        f"{mark}{plus_sum.new}",
        str(stock_sum.generated),
    ]
    result.add_row(*lead, *halves, style="bold")
    return result


_PER_SIDE = ("restored", "prefilled", "re-read", "TTFT s")


def _new(row: Row) -> str:
    return f"{'~' if row.new_from == ESTIMATE else ''}{row.new}"


def _half(row: Row) -> list[str]:
    shown = table.ratio(row.prefilled, row.new, row.new_from == ESTIMATE)
    return [str(row.restored), str(row.prefilled), shown, table.seconds(row.ttft)]


def show(comparison: Comparison, slack: int, console: Console) -> bool:
    """Print table and verdict; true when the claim is met."""
    verdict = compare.judge(comparison, slack)
    console.print(side_by_side(comparison))
    console.print(verdict.line, soft_wrap=True)
    for reason in verdict.reasons:
        console.print(f"  {reason}", soft_wrap=True)
    console.print()
    return verdict.met


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when every model's claim is met, 1 when not, 2 when it could not be run."""
    args = parser().parse_args(argv)
    console, began = table.console(), time.monotonic()
    comparisons: list[Comparison] = []
    try:
        played = session.load(args.session).first(args.turns)
        wanted = cases(args.model or _DEFAULT, args.slack)
        with (
            tempfile.TemporaryDirectory(prefix="cacheplus-demo-") as home,
            progress_bar() as bar,
        ):
            plan = Plan(played, args.rounds, args.warm, Path(home), bar)
            for case in wanted:
                comparisons.append(run_case(case, plan))
    except (session.SessionError, StartFailed, ServerFault, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        if args.json and comparisons:
            compare.write(args.json, comparisons)
    shown = [
        show(comparison, case.slack, console)
        for case, comparison in zip(wanted, comparisons, strict=True)
    ]
    spent = time.monotonic() - began
    word = "The claim is met" if all(shown) else "THE CLAIM IS NOT MET"
    console.print(f"{word}; {spent:.0f} s.")
    return 0 if all(shown) else 1


if __name__ == "__main__":
    # Leave through the context managers, which end the server that is running.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
