"""Functions that forked children run: a module that imports no torch, since each child imports it."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from multiprocessing.connection import Connection

from hardpoint import fork_server

MODULES = ("colorsys",)
"""Something that nothing else here imports, and that is imported at once."""


def say(answers: Connection) -> None:
    """The surroundings that a child finds."""
    answers.send(
        {
            "parent": os.getppid(),
            "imported": "colorsys" in sys.modules,
            "variable": os.environ.get("HP_VARIABLE"),
            "late": os.environ.get("COLUMNS"),
            "default": os.environ.get("HP_DEFAULT"),
            "folder": os.getcwd(),
            "path": sys.path,
            "held": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            "interrupt": signal.getsignal(signal.SIGINT),
        }
    )
    print("printed by the child")
    sys.stdout.flush()


def leave(code: int) -> None:
    if code < 0:
        os.kill(os.getpid(), -code)
    raise SystemExit(code)


def wait_for_a_word(words: Connection) -> None:
    words.recv()


def start_another(answers: Connection) -> None:
    """A child's own child."""
    process = fork_server.start(say, (answers,), "another", MODULES)
    process.join()


def register(answers: Connection) -> None:
    atexit.register(answers.send, "at exit")
    raise SystemExit(4)
