"""``hardpoint bench peers``: our engine and others on one checkpoint, interleaved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import click

from hardpoint.bench.peers.contest import Contest, Entrant, Load, Score, Worker
from hardpoint.bench.registry import BenchResult, BenchRow, benchmark
from hardpoint.checkpoint.formats import open_files
from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint_plugin_api import ConfigError, HardpointError

_LOADS = {
    "prefill": Load("prefill 1 x 512", 1, 512, 0),
    "b1": Load("decode, 1 request", 1, 32, 32),
    "b8": Load("decode, 8 requests", 8, 32, 32),
    "b32": Load("decode, 32 requests", 32, 32, 32),
}
_VOCABULARY = 30_000
"""Prompts are drawn from so many first tokens."""


@click.argument("model")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    default=("hardpoint", "transformers"),
    show_default=True,
    metavar="ENGINE[@PYTHON][:KEY=VALUE,...]",
    help="Engine to measure; repeatable. The first engine is compared with the fastest of the others, and each of the "
    "others with the first. PYTHON: interpreter of an environment that has the engine. KEY=VALUE: an option of the "
    "engine.",
)
@click.option(
    "--load",
    "loads",
    multiple=True,
    type=click.Choice(list(_LOADS)),
    default=tuple(_LOADS),
    show_default=True,
    help="Load to measure; repeatable.",
)
@click.option(
    "--threads",
    default=os.cpu_count() or 1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Threads of each engine.",
)
@click.option(
    "--runs",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Undisturbed runs of each engine; the median counts.",
)
@click.option(
    "--attempts",
    default=12,
    show_default=True,
    type=click.IntRange(min=1),
    help="Largest number of rounds until each engine has --runs undisturbed runs.",
)
@click.option(
    "--quiet",
    default=0.05,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Largest share of the CPU time, 0 to 1, that other processes may use in an undisturbed run.",
)
@click.option(
    "--tolerance",
    default=0.5,
    show_default=True,
    help="Largest difference of log-probabilities to the first engine's, in nats.",
)
@benchmark("peers", "Our engine beside others on one checkpoint.")
def peers(
    model: str,
    engines: tuple[str, ...],
    loads: tuple[str, ...],
    threads: int,
    runs: int,
    attempts: int,
    quiet: float,
    tolerance: float,
) -> BenchResult:
    """Run the engines in turns on MODEL, a folder or a GGUF file, and compare their rates.

    Every engine is a process of its own; before anything is measured they must agree on what comes next. A run counts
    where other processes used little of the machine; the note says how many of an engine's runs did. The peer of the
    first engine is the best of the others; that of another engine is the first.
    """
    folder = Path(model).expanduser().resolve()
    if not folder.exists() or not open_files(folder).has("config.json"):
        raise ConfigError(f"{model!r} is no folder with a checkpoint: other engines need the files, give their folder")
    entrants = [Entrant.parse(text) for text in engines]
    if twice := next((text for text in engines if engines.count(text) > 1), None):
        raise ConfigError(f"--engine {twice} is given twice; results go by that name, so give it once")
    vocabulary = min(HFConfig.read(folder).text.integer("vocab_size"), _VOCABULARY)
    with ExitStack() as running:
        workers = [running.enter_context(closing(Worker(entrant, threads))) for entrant in entrants]
        contest = Contest(workers, quiet, vocabulary)
        return _measure(
            str(folder), workers, contest, [_LOADS[name] for name in loads], threads, runs, attempts, tolerance
        )


def _measure(
    model: str,
    workers: list[Worker],
    contest: Contest,
    loads: list[Load],
    threads: int,
    runs: int,
    attempts: int,
    tolerance: float,
) -> BenchResult:
    rows = []
    for worker in workers:
        before = worker.private_bytes()
        loaded = worker.ask(do="load", model=model, threads=threads, options=dict(worker.entrant.options))
        grown = (worker.private_bytes() - before) / 2**20
        note = f"{loaded['version']}; {grown:,.0f} MiB more private memory"
        rows.append(BenchRow(f"{worker.entrant.label}: load", loaded["seconds"], "s", note=note))
    for label, differs in contest.disagreement().items():
        if not differs <= tolerance:  # NaN is no agreement
            raise HardpointError(
                f"{label} and {workers[0].entrant.label} disagree by {differs:.2f} nats on what comes next, "
                f"{tolerance} allowed: they do not run the same model; see --tolerance for quantized ones"
            )
        rows.append(BenchRow(f"{label}: logprobs", differs, "nats", note="largest difference from the first engine"))
    for load in loads:
        rows += _table(load, contest.play(load, runs, attempts), runs)
    return BenchResult("peers", tuple(rows), peer="for the first engine the best other, for the others the first")


def _table(load: Load, scores: Mapping[str, Score], runs: int) -> list[BenchRow]:
    (first, own), *others = scores.items()
    best = max((score.rate for _, score in others), default=None)
    rows = []
    for label, score in scores.items():
        count = len(score.quiet)
        note = f"{count} quiet runs" if count >= runs else f"{count} quiet runs of {count + len(score.loud)}: unsure"
        peer = best if label == first else own.rate
        rows.append(BenchRow(f"{label}: {load.name}", score.rate, "tok/s", peer=peer, better="higher", note=note))
    return rows
