"""What the .pth and the .start file call in every interpreter of the environment.

It decides from the command line and the environment alone whether anybody asked for us; who did not pays for this file
and for nothing else. It never raises: a broken environment must still start every interpreter. Safe to run twice.
"""

from __future__ import annotations

import os
import sys

ENV = "MLX_VLM_CACHEPLUS"
OFF = frozenset(("", "0", "false", "no", "off"))
SERVER = "mlx_vlm.server"
ran = False


def server_arguments(argv):
    """The arguments behind the stock server's name in an interpreter's command line; None where it is not named."""
    for place, word in enumerate(argv[1:], 2):
        word = word[2:] if word.startswith("-m") else word
        program = os.path.basename(word)
        if program in (SERVER, SERVER + ".exe", SERVER + ".__main__", SERVER + ".cli"):
            return argv[place:]
        if program == "mlx_vlm" and argv[place : place + 1] == ["server"]:
            return argv[place + 1 :]
        if argv[place - 2] == "-c" and SERVER in word:
            return argv[place:]
    return None


def is_asked(argv, environ):
    """Whether this interpreter must be armed. A help text counts: it has to list the flag."""
    if environ.get(ENV, "").strip().lower() not in OFF:
        return True
    arguments = server_arguments(argv) or ()
    return any(
        word.startswith("--cacheplus") or word in ("-h", "--help") for word in arguments
    )


def main():
    global ran
    try:
        # At .pth time sys.argv may not exist yet.
        if ran or not is_asked(list(sys.orig_argv), os.environ):
            return
        from . import activation

        activation.arm()
    except Exception as problem:
        try:
            sys.stderr.write(
                f"mlx-vlm-cacheplus: not active: {type(problem).__name__}: {problem}\n"
            )
        except Exception:
            pass
    finally:
        ran = True
