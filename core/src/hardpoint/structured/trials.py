"""Whether a constraint can be compiled, tried where it can do no harm.

Schemas come from anybody, and the time to compile one is not bounded by its length: patterns that are joined by
``allOf`` take for ever. So each is compiled first in a process of its own. The kernel limits its processor time, its
memory and its stack, and its priority is low, so that it takes little from steps on the same cores.
"""

from __future__ import annotations

import json
import os
import resource
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
from hardpoint.structured.grammars import NICE, Grammars
from hardpoint_plugin_api import EngineError, RequestError, StructuredOutput

if TYPE_CHECKING:
    from hardpoint.tokenizer import Tokenizer

CPU_SECONDS = 2.0
"""Processor time that compiling one constraint may take, its first step included."""
MAX_MEMORY = 2**28
"""Bytes that compiling constraints may take."""
_STACK_BYTES = 2**22
"""Half of a core's stack: a grammar whose rules are nested too deeply for the compiler ends the process of trials."""
_REMEMBERED = 1024
PROGRAM = "from hardpoint.structured.trials import serve; serve()"
"""Python of the child."""
_LIMITS: dict[int, str] = {
    signal.SIGPROF: f"takes more than {CPU_SECONDS:g} seconds to compile",
    signal.SIGABRT: f"takes more than {MAX_MEMORY // 2**20} MiB of memory to compile",
    signal.SIGSEGV: "is nested too deeply",
}
"""The limit that a signal says was exceeded."""


class Trials:
    """Tries constraints for one model, in a child process that starts with the first. Several threads may call it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._passed: OrderedDict[StructuredOutput, None] = OrderedDict()

    def check(self, structure: StructuredOutput, vocab_size: int) -> None:
        """Raise RequestError for what cannot be compiled, or not within the limits; ConfigError without llguidance.

        ``vocab_size`` is the width of the model's logits, the same with each call.
        """
        if self._has_passed(structure):
            return
        with self._asking:
            if self._has_passed(structure):  # asked by another thread meanwhile
                return
            if self._child is None:
                require_extra("structured", "structured output")
                self._child = self._started(vocab_size)
            refused = self._ask(structure, self._child)
        if refused:
            raise RequestError(refused)
        with self._lock:
            self._passed[structure] = None
            if len(self._passed) > _REMEMBERED:
                self._passed.popitem(last=False)

    def close(self) -> None:
        """End the child; a later ``check`` starts another."""
        with self._asking:
            if self._child is not None:
                _end(self._child)
                self._child = None

    def _has_passed(self, structure: StructuredOutput) -> bool:
        with self._lock:
            if structure not in self._passed:
                return False
            self._passed.move_to_end(structure)
            return True

    def _ask(self, structure: StructuredOutput, child: subprocess.Popen[str]) -> str:
        """The error of ``structure``; the empty text if it has none."""
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
        if (limit := _LIMITS.get(-code)) is not None:
            return f"structured output: this {structure.kind} {limit}; make it simpler"
        raise EngineError(
            f"structured output: the process that compiles a {structure.kind} ended with exit code {code}"
        )

    def _started(self, vocab_size: int) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
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


def serve(max_memory: int = MAX_MEMORY) -> None:
    """The child: a line about the tokenizer, then a line for each constraint, each answered by a line.

    It ends with its parent, whose pipe closes. A constraint that exceeds a limit ends it: the kernel's signals reach
    what no Python code can interrupt.
    """
    os.nice(NICE)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    threading.stack_size(_STACK_BYTES)
    serving = threading.Thread(target=_serve, args=(max_memory,))
    serving.start()
    serving.join()


def _serve(max_memory: int) -> None:
    lines = iter(sys.stdin.readline, "")
    grammars = Grammars(**json.loads(next(lines)), cache_bytes=0)
    with suppress(RequestError):
        grammars.start(StructuredOutput.json_object())  # what is loaded once is no constraint's cost
    most = _data_bytes() + max_memory
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        for line in lines:  # reading one takes memory, too
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            try:
                fields = json.loads(line)
                grammars.start(StructuredOutput(**{**fields, "choices": tuple(fields["choices"])}))
                answer = ""
            except RequestError as error:
                answer = str(error)
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(json.dumps(answer), flush=True)
    except MemoryError:
        os.abort()


def _data_bytes() -> int:
    """The bytes of this process that the kernel counts against RLIMIT_DATA."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[5]) * resource.getpagesize()
