"""Engines side by side: a worker process for each, measured in turns, over again until enough runs were quiet."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from hardpoint_plugin_api import ConfigError, HardpointError

HERE = Path(__file__).parent
_TICKS = os.sysconf("SC_CLK_TCK")
_TOP = 20
_LAST_LINES = 20


@dataclass(frozen=True)
class Entrant:
    """One engine: which worker, in which Python, with which of its own options; ``label``, all of it as it was asked
    for, names it in the table.
    """

    engine: str
    python: str = sys.executable
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """``ENGINE[@PYTHON][:KEY=VALUE,...]``. Raises ConfigError, naming what is known."""
        head, _, options = text.partition(":")
        engine, _, python = head.partition("@")
        known = sorted(file.name.removesuffix("_worker.py") for file in HERE.glob("*_worker.py"))
        if engine not in known:
            raise ConfigError(f"--engine {text!r}: there is no engine {engine!r}; known are {', '.join(known)}")
        pairs = dict(part.partition("=")[::2] for part in options.split(",") if part)
        return cls(engine, python or sys.executable, pairs, text)


@dataclass(frozen=True)
class Load:
    """``batch`` prompts of ``prompt`` tokens; what is timed are ``tokens`` tokens beyond the first, or the first."""

    name: str
    batch: int
    prompt: int
    tokens: int

    @property
    def counted(self) -> int:
        """The tokens that the rate counts: drawn ones, or the prompts' where none is drawn beyond the first."""
        return self.batch * (self.tokens or self.prompt)


class Worker:
    """A running worker; see protocol.py. Raises ConfigError where its Python cannot be started."""

    def __init__(self, entrant: Entrant, threads: int) -> None:
        self.entrant = entrant
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed with the process
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        try:
            self._process = subprocess.Popen(
                [entrant.python, str(HERE / f"{entrant.engine}_worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env=environment,
            )
        except OSError as error:
            self._stderr.close()
            raise ConfigError(
                f"--engine {entrant.label}: {entrant.python} cannot be started: {error.strerror}; "
                "after @ stands the Python of an environment that has the engine"
            ) from error

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises HardpointError for an engine that fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        try:
            answer: dict[str, Any] = json.loads(line) if line else {"error": self._ending()}
        except ValueError:
            answer = {"error": f"{self.entrant.python} wrote {line!r}, which is no answer of a worker"}
        if "error" in answer:
            raise HardpointError(f"{self.entrant.label}: {answer['error']}")
        return answer

    def seconds(self, load: Load, prompts: Sequence[Sequence[int]]) -> float:
        """The time of what ``load`` counts: that of all tokens less that of the first."""
        first = self.ask(do="run", prompts=prompts, max_tokens=1)["seconds"]
        if not load.tokens:
            return float(first)
        return float(self.ask(do="run", prompts=prompts, max_tokens=load.tokens + 1)["seconds"] - first)

    def cpu_seconds(self) -> float:
        """Processor time of the worker and the processes below it."""
        return sum(_cpu_seconds(pid) for pid in _family(self._process.pid))

    def private_bytes(self) -> int:
        """Memory that the worker and the processes below it share with no other."""
        return sum(_private_bytes(pid) for pid in _family(self._process.pid))

    def close(self) -> None:
        """Kill the worker."""
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def _ending(self) -> str:
        """How the process ended, and the last that it wrote on stderr."""
        code = self._process.wait()
        self._stderr.seek(0)
        last = self._stderr.read().splitlines()[-_LAST_LINES:]
        return "\n".join([f"its process ended with exit code {code}", *last])


@dataclass
class Score:
    """One engine's rates under one load, tokens per second, of quiet runs and of loud ones."""

    quiet: list[float] = field(default_factory=list)
    loud: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """The median of the quiet runs; where there is none, of the loud ones."""
        return statistics.median(self.quiet or self.loud)


class Contest:
    """``quiet`` is the share of the processors that others may use in a run that counts."""

    def __init__(self, workers: Sequence[Worker], quiet: float, vocabulary: int, seed: int = 0) -> None:
        self._workers, self._quiet, self._vocabulary = workers, quiet, vocabulary
        self._random = random.Random(seed)

    def disagreement(self, length: int = 32) -> dict[str, float]:
        """By how much each engine's log-probability of the first one's likeliest tokens differs at most, in nats.

        NaN where one of them is.
        """
        prompt = self._prompt(length)
        by_engine = {
            w.entrant.label: dict(map(tuple, w.ask(do="logprobs", prompt=prompt, top=_TOP)["logprobs"]))
            for w in self._workers
        }
        first = next(iter(by_engine.values()))
        return {label: _largest_difference(first, found) for label, found in by_engine.items()}

    def play(self, load: Load, runs: int, attempts: int) -> dict[str, Score]:
        """Measure all engines in turns until each has so many quiet runs, or for so many rounds."""
        scores = {w.entrant.label: Score() for w in self._workers}
        for worker in self._workers:
            worker.seconds(load, self._prompts(load))  # warm
        for _ in range(attempts):
            for worker in self._workers:
                score = scores[worker.entrant.label]
                if len(score.quiet) < runs:
                    self._measure(worker, load, score)
            if all(len(score.quiet) >= runs for score in scores.values()):
                break
        return scores

    def _measure(self, worker: Worker, load: Load, score: Score) -> None:
        busy, own, began = _all_cpu_seconds(), worker.cpu_seconds(), time.perf_counter()
        seconds = worker.seconds(load, self._prompts(load))
        elapsed = time.perf_counter() - began
        others = (_all_cpu_seconds() - busy) - (worker.cpu_seconds() - own)
        is_quiet = others < self._quiet * elapsed * (os.cpu_count() or 1)
        (score.quiet if is_quiet else score.loud).append(load.counted / seconds)

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(length)]

    def _prompts(self, load: Load) -> list[list[int]]:
        """Fresh ones for each run, so that no cache knows them."""
        return [self._prompt(load.prompt) for _ in range(load.batch)]


def _largest_difference(first: Mapping[int, float], found: Mapping[int, float]) -> float:
    """That of the tokens of ``first``; NaN where any log-probability is, which ``max`` may pass over."""
    if any(map(math.isnan, (*first.values(), *found.values()))):
        return math.nan
    least = min(found.values())  # an engine that ranks a token beyond its own likeliest gives it no more than this
    return max(abs(found.get(token, least) - logprob) for token, logprob in first.items())


def _all_cpu_seconds() -> float:
    """Processor time that all processes together have used, by /proc/stat."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / _TICKS


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _private_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def _family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += map(int, children.read_text(encoding="ascii").split())
            except OSError:
                continue
    return found
