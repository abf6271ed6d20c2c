"""What the user asked for: flag, variable, options, and the stock's APC_* variables; one error line for what cannot be.

Precedence: `MLX_VLM_CACHEPLUS=0`, then names given in code, then the flag, then the variable.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ._startup import ENV, OFF
from .change import Change, Option

FLAG = "--cacheplus"
ALL = frozenset(("1", "true", "yes", "on", "all"))
STOCK_TRUE = frozenset(("1", "true", "yes"))
STOCK_FALSE = frozenset(("", "0", "false", "no", "off"))

# What stock reads with int() or float() as it is imported, where a bad value ends in a traceback; and the smallest
# value its own settings endpoint takes.
APC_INTEGERS = {
    "APC_BLOCK_SIZE": 1,
    "APC_NUM_BLOCKS": 0,
    "APC_DISK_SHARD_MAX_BLOCKS": 1,
    "APC_CHECKPOINT_ENTRIES": 0,
    "APC_CHECKPOINT_INTERVAL_TOKENS": 0,
    "APC_CHECKPOINT_GUARD_TOKENS": 1,
    "APC_EXACT_CACHE_ENTRIES": 0,
    "APC_EXACT_PREFIX_GUARD_TOKENS": 1,
    "APC_EXACT_MIN_TOKENS": 1,
    "APC_DISK_WORKERS": 1,
    "APC_DISK_HEADER_CACHE": 0,
    "APC_DISK_RESTORE_CLEAR_EVERY": 0,
    "APC_MAX_POOL_TENSORS": 0,
    "APC_LAYER_MAJOR_MEMORY_MIN_TOKENS": 0,
}
# An empty text is the default for the first group, and a traceback for the second.
APC_NUMBERS_OR_EMPTY = (
    "APC_DISK_MAX_GB",
    "APC_MEMORY_MAX_GB",
    "APC_MEMORY_RESERVE_GB",
    "APC_DISK_QUEUE_MAX_GB",
)
APC_NUMBERS = ("APC_DISK_MIN_FREE_RAM_GB",)


class UsageError(ValueError):
    """One line that names the thing and the remedy; the doors print it and leave with code 2.

    It quotes what the user gave, so that line breaks and terminal codes are written out.
    """

    def __init__(self, message: str) -> None:
        characters = (c if c.isprintable() else ascii(c)[1:-1] for c in message)
        super().__init__("".join(characters))


@dataclass(frozen=True)
class Selection:
    """Which changes are wanted. names None is all of them, less those left_out."""

    on: bool
    names: tuple[str, ...] | None = None
    source: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def as_env(self) -> str:
        if self.names is not None:
            return ",".join(self.names)
        return ",".join(f"-{name}" for name in self.left_out) or "1"


def parse_names(text: str, source: str) -> Selection:
    """'1', '0', names with commas, or names with a minus each. Names are not looked up here."""
    word = text.strip().lower()
    if word in OFF and text != "":
        return Selection(False, source=source)
    if word in ALL:
        return Selection(True, None, source)
    names = tuple(
        dict.fromkeys(part.strip() for part in text.split(",") if part.strip())
    )
    if not names:
        raise UsageError(f"{source} names no change: use {FLAG}, or {FLAG}=name,name")
    left_out = tuple(name[1:] for name in names if name.startswith("-"))
    if not left_out:
        return Selection(True, names, source)
    if len(left_out) < len(names):
        raise UsageError(
            f"{source} takes some changes and leaves out others: name those to take, or those to leave out (-name,-name)"
        )
    return Selection(True, None, source, left_out)


def read_selection(
    words: Sequence[str], environ: Mapping[str, str], names: Iterable[str] | None = None
) -> Selection:
    """words: the command line behind the program's name. names: what a caller in Python gave."""
    variable = environ.get(ENV, "").strip()
    if variable and variable.lower() in OFF:
        return Selection(False, source=f"{ENV}={variable}")
    if names is not None:
        given = (names,) if isinstance(names, str) else tuple(names)
        return parse_names(",".join(given), "activate()")
    flag = _flag_value(words)
    if flag is not None:
        return parse_names(flag, f"{FLAG}={flag}" if flag != "1" else FLAG)
    if variable:
        return parse_names(variable, f"{ENV}={variable}")
    return Selection(False)


class _QuietParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def add_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, options: Iterable[Option]
) -> None:
    """The flag and the options of the changes, for the stock's help text and for reading them."""
    parser.add_argument(
        FLAG,
        nargs="?",
        const="1",
        default=None,
        metavar="NAME,NAME",
        help="Keep and reuse what the server has already read and written (mlx-vlm-cacheplus): all changes, or only the "
        f"named ones, or with {FLAG}=-NAME,-NAME all but these. Turns the prefix cache on. Maps to {ENV}, where 0 always wins.",
    )
    for option in options:
        text = f"{option.help} Maps to {option.env}."
        parser.add_argument(
            option.flag,
            default=None,
            metavar=option.metavar,
            help=text.replace("%", "%%"),
        )


def _parse_words(words: Sequence[str], options: Iterable[Option]) -> argparse.Namespace:
    parser = _QuietParser(add_help=False, allow_abbrev=False)
    add_options(parser, options)
    return parser.parse_known_args(list(words))[0]


def _flag_value(words: Sequence[str]) -> str | None:
    return _parse_words(words, ()).cacheplus


def read_options(
    words: Sequence[str], options: Iterable[Option], environ: MutableMapping[str, str]
) -> set[str]:
    """Move the options' values into their variables, with what these imply, and check them; the flag wins. Returns the
    variables that are set."""
    options = list(options)
    parsed = vars(_parse_words(words, options))
    given = set()
    for option in options:
        value = parsed[_destination(option)]
        source = option.flag if value is not None else option.env
        value = environ.get(option.env) if value is None else value
        if value is None:
            continue
        try:
            if option.check is not None:
                option.check(value)
        except ValueError as problem:
            raise UsageError(f"{source}={value!r}: {problem}") from None
        environ[option.env] = value
        given.add(option.env)
        for name, implied in option.implies.get(value.lower(), {}).items():
            environ.setdefault(name, implied)
    return given


def flags_given(words: Sequence[str], options: Iterable[Option]) -> list[Option]:
    """The options that stand on the command line."""
    options = list(options)
    parsed = vars(_parse_words(words, options))
    return [option for option in options if parsed[_destination(option)] is not None]


def _destination(option: Option) -> str:
    return option.flag.lstrip("-").replace("-", "_")


def promised_changes(changes: Iterable[Change], given: set[str]) -> list[Change]:
    """Those whose guarantee was asked for: one of their options is set. given: what `read_options` returned."""
    return [
        change
        for change in changes
        if change.guarantee and any(option.env in given for option in change.options)
    ]


def choose_changes(selection: Selection, changes: Sequence[Change]) -> list[Change]:
    """The wanted changes and what they require, in the changes' order. Raises UsageError for an unknown name."""
    by_name = {change.name: change for change in changes}
    wanted = list(selection.names if selection.names is not None else by_name)
    unknown = [n for n in (*wanted, *selection.left_out) if n not in by_name]
    if unknown:
        known = ", ".join(by_name) or "none"
        word = "name" if len(unknown) == 1 else "names"
        raise UsageError(
            f"{selection.source}: unknown {word} {', '.join(map(repr, unknown))} (known: {known})"
        )
    if selection.left_out:
        return _without(selection.left_out, changes)
    chosen: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name not in chosen:
            chosen.add(name)
            wanted.extend(
                required for required in by_name[name].requires if required in by_name
            )
    return [change for change in changes if change.name in chosen]


def _without(names: Iterable[str], changes: Sequence[Change]) -> list[Change]:
    """All changes but these and those that require one of them, which stand behind it."""
    gone = set(names)
    for change in changes:
        if not gone.isdisjoint(change.requires):
            gone.add(change.name)
    return [change for change in changes if change.name not in gone]


def check_prefix_cache(environ: Mapping[str, str], source: str) -> None:
    """Raise UsageError for an APC_* setting that contradicts us, or that stock would stumble over."""
    enabled = environ.get("APC_ENABLED")
    if enabled is not None and enabled.lower() not in STOCK_TRUE:
        if enabled.lower() in STOCK_FALSE:
            raise UsageError(
                f"APC_ENABLED={enabled!r} turns the prefix cache off, which {source} needs: unset APC_ENABLED, or drop {source}"
            )
        raise UsageError(
            f"APC_ENABLED={enabled!r} is read as off by mlx_vlm: use APC_ENABLED=1, or unset it"
        )
    disk = environ.get("APC_DISK_ENABLED")
    if disk is not None and disk.lower() not in STOCK_TRUE | STOCK_FALSE:
        raise UsageError(f"APC_DISK_ENABLED={disk!r} is neither on nor off: use 1 or 0")
    sync = environ.get("APC_DISK_SYNC", "")
    if sync not in ("", "never", "reply"):
        raise UsageError(
            f"APC_DISK_SYNC={sync!r} says not when the end of a reply leaves: use never or reply"
        )
    for name, minimum in APC_INTEGERS.items():
        _check_number(environ, name, minimum, whole=True)
    for name in APC_NUMBERS_OR_EMPTY:
        if environ.get(name) != "":
            _check_number(environ, name, 0, whole=False)
    for name in APC_NUMBERS:
        _check_number(environ, name, 0, whole=False)
    _check_budget(environ)


def _check_budget(environ: Mapping[str, str]) -> None:
    """A budget that holds nothing, or more than the machine has, is a slip; stock takes both in silence."""
    text = environ.get("APC_MEMORY_MAX_GB", "")
    if not text:
        return
    if float(text) == 0:
        raise UsageError(
            "APC_MEMORY_MAX_GB='0' leaves the prefix cache no room: set how many GB it may hold, or unset it"
        )
    memory = _physical_memory_gb()
    if memory is not None and float(text) > memory:
        raise UsageError(
            f"APC_MEMORY_MAX_GB={text!r} is more than this machine's memory ({memory:.0f} GB): set less, or unset it"
        )


def _physical_memory_gb() -> float | None:
    """Memory of this machine in GB of 2**30 bytes; None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    except (AttributeError, OSError, ValueError):
        return None


def _check_number(
    environ: Mapping[str, str], name: str, minimum: int, *, whole: bool
) -> None:
    text = environ.get(name)
    if text is None:
        return
    kind = "a whole number" if whole else "a number"
    try:
        value = int(text) if whole else float(text)
        fits = math.isfinite(value) and value >= minimum
    except (ValueError, OverflowError):
        fits = False
    if not fits:
        raise UsageError(
            f"{name}={text!r} is not {kind} of at least {minimum}: correct it, or unset {name}"
        )


def prefix_cache_defaults(changes: Iterable[Change]) -> dict[str, str]:
    """Variables to set where the user has not: the prefix cache itself, and what the changes ask for."""
    defaults = {"APC_ENABLED": "1"}
    for change in changes:
        defaults.update(change.env_defaults)
    return defaults


def describe_prefix_cache(
    config: object, tree: bool = False, disk_tier: str | None = None
) -> str:
    """One line on the settings in force.

    Args:
        config: the stock's RuntimeConfig.
        tree: whether segments take the place of blocks, whole states and stock's disk tier.
        disk_tier: where the tree's own disk tier is, and its limit; "off", or None where it has none.
    """

    def value(name: str) -> object:
        return getattr(config, f"apc_{name}", None)

    if not value("enabled"):
        return "prefix cache: off"
    limit = value("memory_max_gb")
    memory = "automatic" if limit is None else f"{limit:g} GB"
    if tree:
        disk = (
            disk_tier
            or "off (stock's disk tier stores blocks; durable-disk is the tree's own)"
        )
        return f"prefix cache: on, a tree of segments, memory {memory}, disk {disk}"
    disk = "off"
    if value("disk_enabled") and value("disk_path") != "":
        cap = value("disk_max_gb")
        cap_text = "20 GB" if cap is None else f"{cap:g} GB" if cap else "no limit"
        disk = f"{value('disk_path') or 'default folder'}, {cap_text}"
    return (
        f"prefix cache: on, {value('num_blocks')} blocks of {value('block_size')} tokens, {value('checkpoint_entries')} "
        f"whole states, memory {memory}, disk {disk}"
    )


def exit_with(problem: UsageError) -> NoReturn:
    print(f"mlx-vlm-cacheplus: error: {problem}", file=sys.stderr)
    sys.exit(2)
