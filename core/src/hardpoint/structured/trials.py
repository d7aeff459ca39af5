"""Whether a constraint can be compiled, tried where it can do no harm.

Schemas come from anybody, and the time to compile one is not bounded by its length: patterns that are joined by
``allOf`` take for ever. So each is compiled first in a process of its own, whose processor time the kernel limits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hardpoint.extras import require_extra
from hardpoint_plugin_api import EngineError, RequestError, StructuredOutput

if TYPE_CHECKING:
    from hardpoint.tokenizer import Tokenizer

CPU_SECONDS = 2.0
"""Processor time that compiling one constraint may take, its first step included."""
_REMEMBERED = 1024


class Trials:
    """Tries constraints for one model, in a child process that starts with the first. Several threads may call it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._passed: OrderedDict[StructuredOutput, None] = OrderedDict()

    def check(self, structure: StructuredOutput, vocab_size: int) -> None:
        """Raise RequestError for what cannot be compiled, or not within the limits; ConfigError without llguidance.

        ``vocab_size`` is the width of the model's logits, the same with each call.
        """
        with self._lock:
            if structure in self._passed:
                self._passed.move_to_end(structure)
                return
            if self._child is None:
                require_extra("structured", "structured output")
                self._child = self._started(vocab_size)
            refused = self._ask(structure, self._child)
            if refused:
                raise RequestError(refused)
            self._passed[structure] = None
            if len(self._passed) > _REMEMBERED:
                self._passed.popitem(last=False)

    def close(self) -> None:
        """End the child; a later ``check`` starts another."""
        with self._lock:
            if self._child is not None:
                _end(self._child)
                self._child = None

    def _ask(self, structure: StructuredOutput, child: subprocess.Popen[str]) -> str:
        """What is wrong with ``structure``; the empty text if nothing is."""
        assert child.stdin is not None
        assert child.stdout is not None
        answer = ""
        with suppress(OSError):  # it has died: so there is no answer
            child.stdin.write(json.dumps(asdict(structure)) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        if answer:
            return str(json.loads(answer))
        code = child.wait()
        _end(child)
        self._child = None
        if code == -signal.SIGPROF:
            return (
                f"structured output: this {structure.kind} takes more than {CPU_SECONDS:g} seconds to compile; "
                "make it simpler"
            )
        raise EngineError(
            f"structured output: the process that compiles a {structure.kind} ended with exit code {code}"
        )

    def _started(self, vocab_size: int) -> subprocess.Popen[str]:
        program = "from hardpoint.structured.trials import serve; serve()"
        child = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=os.environ | {"RAYON_NUM_THREADS": "1"},
            start_new_session=True,  # an interrupt at the terminal is the parent's to handle
        )
        weakref.finalize(self, _end, child)
        assert child.stdin is not None
        facts = {
            "tokenizer_json": self._tokenizer.backend.to_str(),
            "eos_token_id": self._tokenizer.eos_token_id,
            "vocab_size": vocab_size,
        }
        with suppress(OSError):  # the answer that does not come will say
            child.stdin.write(json.dumps(facts) + "\n")
        return child


def _end(child: subprocess.Popen[Any]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def serve() -> None:
    """The child: a line about the tokenizer, then a line for each constraint, each answered by a line.

    It ends with its parent, whose pipe closes. A constraint that takes too long ends it: the kernel's timer counts what
    no Python code can interrupt.
    """
    from hardpoint.structured.grammars import Grammars

    lines = iter(sys.stdin.readline, "")
    grammars = Grammars(**json.loads(next(lines)))
    with suppress(RequestError):
        grammars.start(StructuredOutput.json_object())  # what is loaded once is no constraint's cost
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in lines:
        fields = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            grammars.start(StructuredOutput(**{**fields, "choices": tuple(fields["choices"])}))
            answer = ""
        except RequestError as error:
            answer = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)
