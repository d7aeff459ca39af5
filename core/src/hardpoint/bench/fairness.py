"""A short request beside a long prompt: how long the one waits, and what that costs the other."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass

import click

from hardpoint import LLM, SamplingParams
from hardpoint.bench.offline import alphabet, check_here
from hardpoint.bench.registry import BenchResult, BenchRow, benchmark
from hardpoint.config import EngineConfig
from hardpoint.engine.core import EngineCore
from hardpoint.engine.requests import RequestProgress
from hardpoint.terminal.progress import progress_bar
from hardpoint_plugin_api import ConfigError


@dataclass(frozen=True)
class _Run:
    """Seconds: to the short request's first token (0 without one), of a typical step, and until all was done."""

    first_token: float
    step: float
    whole: float


@click.option(
    "--long-len", default=30_000, show_default=True, type=click.IntRange(min=1), help="Tokens of the long prompt."
)
@click.option(
    "--short-len", default=100, show_default=True, type=click.IntRange(min=1), help="Tokens of the short prompt."
)
@click.option("--output-len", default=8, show_default=True, type=click.IntRange(min=1), help="Tokens of each output.")
@click.option(
    "--after",
    default=3,
    show_default=True,
    type=click.IntRange(min=0),
    help="Number of steps that the long prompt runs alone before the short request is sent.",
)
@click.option(
    "--repeat", default=5, show_default=True, type=click.IntRange(min=1), help="Runs to measure; the median counts."
)
@benchmark("fairness", "A short request's first token beside a long prompt, and the long prompt's own time.")
def fairness(
    config: EngineConfig, long_len: int, short_len: int, output_len: int, after: int, repeat: int
) -> BenchResult:
    """Measure a short request alone, a long prompt alone, and the short request while the long prompt is read.

    Compare with --long-prefill-token-threshold 0, by which a long prompt takes every token of a step. One round before
    is not counted.
    """
    check_here(config)
    with LLM.from_config(config) as llm, progress_bar("rounds", repeat + 1) as advance:
        if (longest := llm.client.facts.max_model_len) < long_len + output_len:
            raise ConfigError(
                f"--long-len {long_len}: the engine takes sequences of {longest} tokens (--max-model-len, or the "
                "cache's size); give a shorter one, or raise that"
            )
        draw = random.Random(0)
        tokens = alphabet(llm)
        rounds: list[tuple[_Run, _Run, _Run]] = []
        for _ in range(repeat + 1):  # new prompts each time, which no cache holds
            long, short = (draw.choices(tokens, k=length) for length in (long_len, short_len))
            alone = _run(llm.core, short, [], output_len, 0)
            rounds.append(
                (
                    alone,
                    _run(llm.core, [], draw.choices(tokens, k=long_len), output_len, after),
                    _run(llm.core, draw.choices(tokens, k=short_len), long, output_len, after),
                )
            )
            advance()
    shorts, longs, both = zip(*rounds[1:], strict=True)
    step = statistics.median(run.step for run in longs)
    alone = statistics.median(run.first_token for run in shorts)
    beside = [run.first_token for run in both]
    rate = [(long_len + short_len + 2 * output_len) / run.whole for run in both]
    rate_alone = statistics.median((long_len + output_len) / run.whole for run in longs)
    rows = (
        BenchRow("short: first token, alone", 1e3 * alone, "ms"),
        _row("short: first token, beside the long prompt", [1e3 * seconds for seconds in beside], "ms"),
        _row("short: waits longer by steps of the long prompt", [(s - alone) / step for s in beside], "steps"),
        BenchRow("step of the long prompt", 1e3 * step, "ms"),
        _row("all tokens", rate, "tokens/s", peer=rate_alone, better="higher"),
    )
    return BenchResult("fairness", rows, peer="the long prompt alone")


def _row(name: str, values: list[float], unit: str, **options: object) -> BenchRow:
    note = f"from {min(values):.4g} to {max(values):.4g}"
    return BenchRow(name, statistics.median(values), unit, note=note, **options)  # type: ignore[arg-type]


def _run(core: EngineCore, short: list[int], long: list[int], output_len: int, after: int) -> _Run:
    """Run ``long``, and ``short`` from ``after`` steps later on; either may be empty."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    requests: list[RequestProgress] = [core.add_request(long, params, frozenset())] if long else []
    began = last = time.perf_counter()
    came = began
    first_token, steps = 0.0, []
    waiting = core.add_request(short, params, frozenset()) if short and not after else None
    for number in range(1, 1_000_000):
        if number == after + 1 and short and after:
            waiting, came = core.add_request(short, params, frozenset()), time.perf_counter()
        if not core.has_unfinished and (not short or waiting is not None):
            break
        core.step()
        now = time.perf_counter()
        if requests and not requests[0].output_token_ids:
            steps.append(now - last)
        last = now
        if waiting is not None and waiting.output_token_ids and not first_token:
            first_token = now - came
    return _Run(first_token, statistics.median(steps) if steps else 0.0, last - began)
