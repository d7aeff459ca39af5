"""From the start of the process to the first token, stage by stage, each in a fresh process."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import tomli_w

from hardpoint.bench.registry import BenchResult, BenchRow, benchmark
from hardpoint.config import EngineConfig
from hardpoint_plugin_api import HardpointError

_STAGES = {
    "interpreter": "interpreter",
    "command line": "command line and config",
    "platform": "plugins and platform",
    "torch": "import of torch",
    "engine": "import of the engine",
    "selection": "selection",
    "tokenizer": "tokenizer",
    "weights": "weights",
    "cache": "size of the cache",
    "graphs": "graphs",
    "first token": "first token",
}
"""Marks in the order in which they are made, and what ends with each."""


@click.option(
    "--repeat", default=5, show_default=True, type=click.IntRange(min=1), help="Starts to measure; the median counts."
)
@click.option(
    "--distributions",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Empty distributions to install beside the others, in a folder that is removed at the end.",
)
@benchmark("startup", "Process start to first token, by stage, beside a bare import of torch.")
def startup(config: EngineConfig, repeat: int, distributions: int = 0) -> BenchResult:
    """Start a process REPEAT times to the first token, after one start that is not counted.

    So files that a start leaves for the next, such as compiled kernels, are there: this is a warm start. The peer is a
    process that imports torch and does nothing else, measured to the end of that import. Both take turns, since other
    programs load a machine. The last rows are commands that need no torch, and the processor time of a start.
    """
    with _installed(distributions):
        _start(config)
        turns = [(_start(config), _bare_torch(), *map(_command, _COMMANDS)) for _ in range(repeat)]
    starts, bare, *commands = zip(*turns, strict=True)
    peers = {stage: _median(run.stages[stage] for run in bare) for stage in bare[0].stages}
    floor, whole = _median(run.seconds for run in bare), _median(run.seconds for run in starts)
    rows = []
    for stage in starts[0].stages:
        seconds = _median(run.stages[stage] for run in starts)
        rows.append(BenchRow(_STAGES[stage], seconds, "s", peer=peers.get(stage), share=seconds / whole))
    rows.append(BenchRow("all", whole, "s", roofline=floor, peer=floor, share=1.0, note=_least(starts)))
    processor, peer = (_median(run.processor for run in runs) for runs in (starts, bare))
    rows.append(BenchRow("all, processor time", processor, "s", peer=peer))
    for words, runs in zip(_COMMANDS, commands, strict=True):
        row = f"hardpoint {' '.join(words)}", _median(run.seconds for run in runs), "s"
        rows.append(BenchRow(*row, note=_least(runs)))
    code = "python -c 'import torch'"
    return BenchResult("startup", tuple(rows), roofline=f"{code}: nothing that imports torch starts sooner", peer=code)


@dataclass(frozen=True)
class _Run:
    """One process: seconds of its stages and of all, and its processor time, in seconds."""

    stages: dict[str, float]
    seconds: float
    processor: float


_COMMANDS = (("--help",), ("plugins", "list"))
_median = statistics.median


def _least(runs: Sequence[_Run]) -> str:
    return f"least {min(run.seconds for run in runs):.2f} s"


@contextmanager
def _installed(number: int) -> Iterator[None]:
    """Have child processes find so many more distributions, which hold nothing."""
    with tempfile.TemporaryDirectory() as folder:
        for each in range(number):
            metadata = Path(folder, f"crowd_{each}-1.0.dist-info")
            metadata.mkdir()
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: crowd-{each}\nVersion: 1.0\n")
            (metadata / "RECORD").write_text(f"{metadata.name}/METADATA,,\n")
            (metadata / "entry_points.txt").write_text(f"[console_scripts]\ncrowd{each} = crowd:main\n")
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (before, folder)))
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


def _start(config: EngineConfig) -> _Run:
    """One start in a process of its own, to the first token."""
    with tempfile.TemporaryDirectory() as folder:
        file, settings = Path(folder) / "stages.json", Path(folder) / "settings.toml"
        settings.write_text(tomli_w.dumps(config.explicit_settings()), encoding="utf-8")
        options = ["--prompt", "Once", "--max-tokens", "1", "--quiet", "--stages", str(file)]
        began, _, processor = _run("-m", "hardpoint.cli", "generate", "--config", str(settings), *options)
        marks = json.loads(file.read_text(encoding="utf-8"))
    stages = _durations(began, {stage: marks[stage] for stage in _STAGES if stage in marks})
    return _Run(stages, sum(stages.values()), processor)


def _bare_torch() -> _Run:
    """The two stages of a process that only imports torch."""
    clock = "import time; a = time.perf_counter(); import torch; print(a, time.perf_counter())"
    began, said, processor = _run("-c", clock)
    interpreter, torch = map(float, said.split())
    stages = _durations(began, {"interpreter": interpreter, "torch": torch})
    return _Run(stages, sum(stages.values()), processor)


def _command(words: Sequence[str]) -> _Run:
    """Run a ``hardpoint`` command to its end."""
    began, _, processor = _run("-m", "hardpoint.cli", *words)
    return _Run({}, time.perf_counter() - began, processor)


def _durations(began: float, ends: dict[str, float]) -> dict[str, float]:
    """From when stages ended, by the clock that processes share, to how long each took."""
    starts = [began, *ends.values()]
    return {stage: end - start for start, (stage, end) in zip(starts, ends.items(), strict=False)}


def _run(*args: str) -> tuple[float, str, float]:
    """When a process of Python's began, what it printed, and its processor time in seconds."""
    before, began = os.times(), time.perf_counter()
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False)
    after = os.times()
    if done.returncode:
        raise HardpointError(f"the start to be measured failed:\n{done.stderr.strip()}")
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return began, done.stdout, used
