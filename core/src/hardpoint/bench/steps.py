"""How fast the engine decodes and reads prompts, by number of requests, and which kernels the time goes to."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import click

from hardpoint import LLM, SamplingParams
from hardpoint.bench.busy_time import BusyTime, device_intervals
from hardpoint.bench.lengths import Lengths, SyntheticRequest
from hardpoint.bench.offline import ROOFLINE, alphabet, check_at_once, check_here, generate, read_seconds, runs_here
from hardpoint.bench.registry import BenchResult, BenchRow, benchmark
from hardpoint.config import EngineConfig
from hardpoint.terminal.progress import progress_bar
from hardpoint_plugin_api import ConfigError

_PROFILED_STEPS = 20
_STEPS_BEFORE = 3
"""Steps that were submitted while a prompt was still read."""


@click.option(
    "--decode",
    "decodes",
    default="1,32,256",
    show_default=True,
    metavar="N,N",
    help="Numbers of concurrent requests to measure the decode rate with.",
)
@click.option(
    "--prefill",
    "prefills",
    default="1,32",
    show_default=True,
    metavar="N,N",
    help="Numbers of concurrent prompts to measure the prefill rate with.",
)
@click.option("--input-len", default="512", show_default=True, metavar="LENGTHS", help="Tokens of each prompt.")
@click.option("--output-len", default=129, show_default=True, type=click.IntRange(min=2), help="Tokens of each output.")
@click.option(
    "--repeat", default=3, show_default=True, type=click.IntRange(min=1), help="Least number of runs to measure."
)
@click.option(
    "--seconds",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Least time to measure each size for: short runs are repeated until it has passed.",
)
@click.option(
    "--kernels",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Also profile, and list this many kernels by time.",
)
@benchmark("steps", "Decode and prefill rates of the engine in process, at stated numbers of requests.")
def steps(
    config: EngineConfig,
    decodes: str,
    prefills: str,
    input_len: str,
    output_len: int,
    repeat: int,
    seconds: float,
    kernels: int,
) -> BenchResult:
    """Have random prompts continued greedily, so many at once.

    LENGTHS is N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:MOST], or mixed:N:N... (in turn), in tokens; all runs of a
    size have prompts of the same lengths.

    The decode rate is the tokens behind each first one over the time that they add: the difference of two runs, one
    with all tokens and one with a single token, so that it holds all that the engine does for a token. The prefill rate
    is prompt tokens over the time of a run with one token. Rates are medians; one run before each is not counted. With
    --kernels, further steps are profiled: the time that kernels take of one, in all and by name, and the time between
    kernels. An engine of several ranks or replicas, or with --core-process, runs in processes of its own: it has
    neither a roofline nor --kernels. Replicas share the requests of each size.
    """
    if kernels:
        check_here(config, "hardpoint bench steps without --kernels")
    sizes = {"decode": _numbers(decodes, "--decode"), "prefill": _numbers(prefills, "--prefill")}
    for kind, numbers in sizes.items():
        check_at_once(config, max(numbers, default=0), f"--{kind}")
    inputs, seeds = Lengths.parse(input_len, "--input-len"), count()
    rows = []

    def lengths(size: int) -> list[int]:
        return inputs.draw(size, random.Random(0))

    with LLM.from_config(config) as llm, progress_bar("sizes", sum(map(len, sizes.values()))) as advance:
        has_roofline = runs_here(config)
        tokens = alphabet(llm)

        def requests(size: int, length: int) -> list[SyntheticRequest]:
            generator = random.Random(next(seeds))
            return [SyntheticRequest(generator.choices(tokens, k=k), length) for k in lengths(size)]

        def times_of(size: int, length: int) -> list[float]:
            """Seconds of each run: the first is not counted, since it may capture or compile."""
            generate(llm, requests(size, length))
            times: list[float] = []
            while len(times) < repeat or sum(times) < seconds:
                times.append(generate(llm, requests(size, length)))
            return times

        for kind, numbers in sizes.items():
            for size in numbers:
                name = f"{kind}, {size} x {input_len}"
                times = firsts = times_of(size, 1)
                made, roofline = sum(lengths(size)), None
                if kind == "decode":
                    first = statistics.median(firsts)
                    times = [taken - first for taken in times_of(size, output_len)]
                    made, roofline = size * (output_len - 1), size / read_seconds(llm, size) if has_roofline else None
                    if min(times) <= 0:
                        raise ConfigError(
                            f"{name}: what --output-len {output_len} adds to one token is less than the runs differ "
                            "by; raise it"
                        )
                rates = [made / x for x in times]
                note = f"from {min(rates):,.0f} to {max(rates):,.0f} in {len(times)} runs"
                if kind == "decode":
                    note += f"; {1e3 * statistics.median(times) / (output_len - 1):.3f} ms a step"
                rows.append(BenchRow(name, statistics.median(rates), "tokens/s", roofline, better="higher", note=note))
                if kernels:
                    rows += _kernel_rows(llm, requests(size, 1), kind, kernels)
                advance()
        rows.append(BenchRow("load", llm.stats.load_seconds, "s"))
    return BenchResult("steps", tuple(rows), roofline=ROOFLINE if has_roofline else "")


def _numbers(text: str, flag: str) -> list[int]:
    """A list such as "1,32". Raises ConfigError."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [0]
    if any(number < 1 for number in numbers):
        raise ConfigError(f"{flag} must be positive numbers with commas between them, got {text!r}")
    return numbers


def _kernel_rows(llm: LLM, data: Sequence[SyntheticRequest], kind: str, num_shown: int) -> Iterator[BenchRow]:
    """The device's work in a step, and its idle time; no rows where torch cannot see it.

    Raises ConfigError where sequences reach the longest that the engine takes before all steps are done.
    """
    from torch.profiler import profile

    core, num_steps = llm.core, 0
    most = core.max_model_len if kind == "decode" else 1
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    requests = [core.add_request(request.prompt, params, frozenset()) for request in data]
    while kind == "decode" and not all(request.output_token_ids for request in requests):
        core.step()
    if kind == "decode":
        for _ in range(_STEPS_BEFORE):
            core.step()
        began = time.perf_counter()
        for _ in range(_PROFILED_STEPS):
            core.step()
        wall = 1e3 * (time.perf_counter() - began) / _PROFILED_STEPS
        yield BenchRow("  step", wall, "ms", note="by the host's clock, not profiled")
    with profile(activities=_device_activities()) as profiler:
        while num_steps < _PROFILED_STEPS if kind == "decode" else not core.is_idle:
            core.step()
            num_steps += 1
        llm.core.blueprint.platform.synchronize()
    if kind == "decode" and any(request.finish_reason is not None for request in requests):
        raise ConfigError(
            f"--kernels takes {_STEPS_BEFORE + 2 * _PROFILED_STEPS} steps behind prompts, but sequences end before, "
            f"at {core.max_model_len} tokens (--max-model-len, or the cache's size); shorten --input-len, or raise that"
        )
    for request in requests:
        core.abort(request)
    intervals = device_intervals(profiler.events() or ())
    found = (BusyTime.of_repeated if kind == "decode" else BusyTime.of_all)(intervals, num_steps)
    if found is None:
        return
    yield BenchRow("  kernels", found.busy / 1e3, "ms", share=found.busy / found.step, note="of a profiled step")
    for share in found.kernels[:num_shown]:
        note = f"{share.times:.1f} x {share.microseconds / share.times:.1f} us"
        yield BenchRow(
            f"    {share.name[:60]}", share.microseconds / 1e3, "ms", share=share.microseconds / found.step, note=note
        )
    idle = found.step - found.busy
    yield BenchRow("  nothing", idle / 1e3, "ms", share=idle / found.step)
    for share in found.idle[:num_shown]:
        note = f"{share.times:.1f} x {share.microseconds / share.times:.1f} us before it"
        yield BenchRow(
            f"    {share.name[:60]}", share.microseconds / 1e3, "ms", share=share.microseconds / found.step, note=note
        )


def _device_activities() -> set[Any]:
    """Activities of devices that torch can record; the host's operators as well would slow the host down."""
    from torch.profiler import ProfilerActivity, supported_activities

    found: set[Any] = supported_activities()
    return found - {ProfilerActivity.CPU} or found
