"""The command ``mlx-vlm-cacheplus replay``: replay a session, or import one from a request log."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from ..commands.arguments import (
    Parser,
    check_key,
    file_to_write,
    seconds,
    server_address,
    some_seconds,
    whole_from,
)
from ..settings import UsageError
from . import client, importer, plot, session, table
from .rows import Row, total
from .tokens import ModelTokenizer, NewCounter
from .wire import PROTOCOLS, ServerFault

KEY_VARIABLE = "MLX_VLM_SERVER_API_KEY"
FAULTS = (session.SessionError, ServerFault, plot.PlotUnavailable, UsageError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``replay``."""
    known = ", ".join(session.bundled())
    parser.add_argument("session", nargs="?", help=f"session file or one of: {known}")
    _add_server(parser.add_argument_group("server"))
    _add_play(parser.add_argument_group("what is played"))
    _add_results(parser.add_argument_group("results"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    base = "http://127.0.0.1:8080"
    add("--base", type=server_address, default=base, help="default: %(default)s")
    add("--model", help="model name to ask for (default: the one that is loaded)")
    add("--api", choices=sorted(PROTOCOLS), default="chat", help="default: chat")
    stream = argparse.BooleanOptionalAction
    add("--stream", action=stream, default=True, help="stream replies (default: yes)")
    key = os.environ.get(KEY_VARIABLE)
    add("--api-key", default=key, help=f"default: {KEY_VARIABLE}")
    longest = "longest silence of the server (default: 600)"
    add(
        "--timeout",
        type=some_seconds,
        default=600.0,
        metavar="SECONDS",
        help=longest,
    )


def _add_play(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    count = whole_from(1)
    add("--sessions", type=count, default=1, help="sessions at once (default: 1)")
    later = "start each so much after the one before"
    add("--stagger", type=seconds, default=0.0, metavar="SECONDS", help=later)
    add("--share", action="store_true", help="let all sessions say exactly the same")
    differ = "put [TEXT] first, to differ from earlier runs"
    add("--marker", default="", metavar="TEXT", help=differ)
    add("--turns", type=count, help="stop after so many turns")
    add("--max-tokens", type=count, help="longest reply (default: the session's)")
    forced = "send the recorded replies back, not the model's own"
    add("--forced", action="store_true", help=forced)


def _add_results(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    counts = "model directory whose tokenizer counts the new tokens"
    add("--tokenizer", metavar="DIR", help=counts)
    add("--json", type=file_to_write, metavar="FILE", help="write the raw rows")
    picture = "draw restored and prefilled tokens per turn"
    add("--plot", type=file_to_write, metavar="FILE", help=picture)
    make = "make a session file from a request log instead"
    add("--import", dest="log", metavar="LOG", help=make)
    where = "where --import writes (default: standard output)"
    add("-o", "--output", type=file_to_write, metavar="FILE", help=where)


def run(args: argparse.Namespace) -> int:
    """Do what the arguments say; 0 when it worked, 2 and one line on standard error when not."""
    try:
        if args.log is not None:
            return _import(args)
        if args.output is not None:
            raise UsageError("-o is where --import writes: leave it out, or see --json")
        if not args.session:
            raise session.SessionError(
                "name a session file or one of: " + ", ".join(session.bundled())
            )
        return _replay(args)
    except (*FAULTS, OSError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _import(args: argparse.Namespace) -> int:
    if args.session is not None:
        raise UsageError(f"--import plays no session: leave out {args.session!r}")
    path = Path(args.log)
    imported = importer.import_log(session.read_text(path), path.stem, str(path))
    for line in imported.skipped:
        print(line, file=sys.stderr)
    text = session.dump(imported.session)
    if args.output:
        Path(args.output).write_text(text, encoding="utf-8")
        print(f"{args.output}: {len(imported.session.turns)} turns")
    else:
        sys.stdout.write(text)
    return 0


def _replay(args: argparse.Namespace) -> int:
    check_key(args.api_key, "--api-key", KEY_VARIABLE)
    if args.plot:
        plot.require(args.plot)
    played = session.load(args.session).first(args.turns)
    options = client.Options(
        base=args.base.rstrip("/"),
        model=args.model,
        api=args.api,
        stream=args.stream,
        sessions=args.sessions,
        stagger=args.stagger,
        share=args.share,
        marker=args.marker,
        max_tokens=args.max_tokens,
        forced=args.forced,
        api_key=args.api_key,
        timeout=args.timeout,
    )
    result = client.Replayed()
    try:
        with progress_bar() as bar:
            task = bar.add_task(played.name, total=len(played.turns) * options.sessions)
            counter = NewCounter(tokenizer_for(args.tokenizer, args.model))
            client.run(played, options, counter, lambda row: bar.advance(task), result)
    finally:
        if args.json and result.rows:
            write_rows(
                Path(args.json),
                {"session": played.name, "options": _shown(options)},
                result,
            )
    console = table.console()
    console.print(table.rows_table(result.rows, f"{played.name} on {result.model}"))
    for note in notes(result.rows):
        console.print(note)
    if args.plot:
        plot.draw(result.rows, args.plot, f"{played.name} on {result.model}")
    return 0


def _shown(options: client.Options) -> dict[str, object]:
    return {key: value for key, value in asdict(options).items() if key != "api_key"}


def progress_bar() -> Progress:
    """Progress on standard error, so that tables can be piped; none where nobody looks."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    hidden = not console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=hidden)


def tokenizer_for(directory: str | None, model: str | None) -> ModelTokenizer | None:
    """The tokenizer that was named, else the model's own when the model is a directory here."""
    flag = "--model" if directory is None else "--tokenizer"
    if directory is None and model and (Path(model) / "tokenizer.json").is_file():
        directory = model
    if directory is None:
        return None
    if not Path(directory).is_dir():
        raise session.SessionError(f"--tokenizer {directory}: not a directory")
    try:
        return ModelTokenizer(directory)
    except ModuleNotFoundError:
        raise
    except Exception as fault:  # transformers' own, and those of what reads the files
        raise session.SessionError(
            f"{flag} {directory}: no tokenizer that transformers can read ({type(fault).__name__}): name a model directory with --tokenizer"
        ) from None


def notes(rows: list[Row]) -> list[str]:
    """What a reader of the table must know."""
    lines = []
    if total(rows).estimated:
        lines.append(
            "~ estimated: no token ids for some prompts (give --tokenizer, or turn the plugin on)"
        )
    for text in sorted({row.note for row in rows if row.note}):
        turns = sorted({row.turn for row in rows if row.note == text})
        lines.append(f"turn {', '.join(map(str, turns))}: {text}")
    if any(row.restored > row.prompt - row.new for row in rows):
        lines.append(
            "the server restored more than this run had sent: it was warm before (see --marker)"
        )
    return lines


def write_rows(path: Path, head: dict[str, object], result: client.Replayed) -> None:
    """Raw rows as JSON."""
    data = {
        **head,
        "model": result.model,
        "rows": [row.as_dict() for row in result.rows],
    }
    path.write_text(
        json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def main(argv: list[str] | None = None) -> int:
    """``python -m mlx_vlm_cacheplus.replay.cli``."""
    parser = Parser(prog="mlx-vlm-cacheplus replay", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
