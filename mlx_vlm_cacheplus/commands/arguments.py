"""Arguments of the commands, checked as they are read: one line that says what to give instead, and exit code 2."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import urlsplit

from ..settings import UsageError


class Parser(argparse.ArgumentParser):
    """One line for a mistake, without the usage, and in words where argparse would name a Python type."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", int, whole_number)

    def error(self, message: str) -> NoReturn:
        line = UsageError(f"{self.prog}: error: {message} (see {self.prog} --help)")
        self.exit(2, f"{line}\n")


def whole_number(text: str) -> int:
    """A type of argparse's."""
    try:
        return int(text)
    except ValueError:
        raise _instead("give a whole number", text) from None


def whole_from(least: int) -> Callable[[str], int]:
    """A type of argparse's: whole numbers from ``least``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise _instead(f"give a whole number from {least}", text)
        return value

    return read


def seconds(text: str) -> float:
    """A type of argparse's: a span of time, which may be none."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise _instead("give seconds from 0", text)
    return value


def some_seconds(text: str) -> float:
    """A type of argparse's: a span of time that is one."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise _instead("give seconds above 0", text)
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def server_address(text: str) -> str:
    """A type of argparse's: what a client can ask."""
    import httpx

    try:
        parts = urlsplit(text)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname)
        fits = fits and parts.port != 0 and bool(httpx.URL(text))
    except (ValueError, httpx.InvalidURL):
        fits = False
    if not fits:
        raise _instead("give an address such as http://127.0.0.1:8080", text)
    return text


def file_to_write(text: str) -> str:
    """A type of argparse's: a file that can be written, which is found out before there is something to write."""
    problem = unwritable(text)
    if problem:
        raise argparse.ArgumentTypeError(problem)
    return text


def unwritable(path: str) -> str:
    """Why a file cannot be written there, and what to do; empty where it can."""
    folder = os.path.dirname(path) or "."
    if not path:
        return "name a file"
    if os.path.isdir(path):
        return f"{path} is a folder: name a file in it"
    if not os.path.isdir(folder):
        return f"there is no folder {folder}: make it, or name another file"
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        return f"{path} may not be written: name another file"
    return ""


def check_key(key: str | None, flag: str, variable: str) -> None:
    """Raise UsageError for a key that no header can hold; the line does not tell it."""
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError(
            f"the API key ({flag}, or {variable}) has characters beyond printable ASCII: give the server's"
        )


def _instead(advice: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{advice}, not {text!r}")
