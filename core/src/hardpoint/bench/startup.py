"""From the start of the process to the first token, stage by stage, each in a fresh process."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import tomli_w

from hardpoint.bench.registry import BenchResult, BenchRow, benchmark
from hardpoint.config import EngineConfig
from hardpoint_plugin_api import HardpointError

_STAGES = {
    "interpreter": "interpreter",
    "command line": "command line and config",
    "torch": "import of torch",
    "engine": "import of the engine",
    "selection": "plugins, platform, selection",
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
@benchmark("startup", "Process start to first token, by stage, beside a bare import of torch.")
def startup(config: EngineConfig, repeat: int) -> BenchResult:
    """Start a process REPEAT times to the first token, after one start that is not counted.

    So files that a start leaves for the next, such as compiled kernels, are there: this is a warm start. The peer is a
    process that imports torch and does nothing else, measured to the end of that import.
    """
    _start(config)
    runs = [_start(config) for _ in range(repeat)]
    bare = [_bare_torch() for _ in range(repeat)]
    peers = {stage: statistics.median(run[stage] for run in bare) for stage in bare[0]}
    floor = statistics.median(sum(run.values()) for run in bare)
    whole = statistics.median(sum(run.values()) for run in runs)
    rows = []
    for stage in (stage for stage in _STAGES if stage in runs[0]):
        seconds = statistics.median(run[stage] for run in runs)
        rows.append(BenchRow(_STAGES[stage], seconds, "s", peer=peers.get(stage), share=seconds / whole))
    rows.append(BenchRow("all", whole, "s", roofline=floor, peer=floor, share=1.0))
    code = "python -c 'import torch'"
    return BenchResult("startup", tuple(rows), roofline=f"{code}: nothing that imports torch starts sooner", peer=code)


def _start(config: EngineConfig) -> dict[str, float]:
    """Seconds of each stage of one start in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file, settings = Path(folder) / "stages.json", Path(folder) / "settings.toml"
        settings.write_text(tomli_w.dumps(config.explicit_settings()), encoding="utf-8")
        options = ["--prompt", "Once", "--max-tokens", "1", "--quiet", "--stages", str(file)]
        began = time.perf_counter()
        _run("-m", "hardpoint.cli", "generate", "--config", str(settings), *options)
        marks = json.loads(file.read_text(encoding="utf-8"))
    return _durations(began, {stage: marks[stage] for stage in _STAGES if stage in marks})


def _bare_torch() -> dict[str, float]:
    """Seconds of the two stages of a process that only imports torch."""
    clock = "import time; a = time.perf_counter(); import torch; print(a, time.perf_counter())"
    began = time.perf_counter()
    interpreter, torch = map(float, _run("-c", clock).split())
    return _durations(began, {"interpreter": interpreter, "torch": torch})


def _durations(began: float, ends: dict[str, float]) -> dict[str, float]:
    """From when stages ended, by the clock that processes share, to how long each took."""
    starts = [began, *ends.values()]
    return {stage: end - start for start, (stage, end) in zip(starts, ends.items(), strict=False)}


def _run(*args: str) -> str:
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False)
    if done.returncode:
        raise HardpointError(f"the start to be measured failed:\n{done.stderr.strip()}")
    return done.stdout
