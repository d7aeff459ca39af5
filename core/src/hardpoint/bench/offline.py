"""The engine alone, in this process: how many tokens it makes, and how soon."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import click

from hardpoint import LLM, SamplingParams
from hardpoint.bench.lengths import SAMPLE_TEXT, Lengths, SyntheticRequest, synthetic_requests
from hardpoint.bench.load import percentile_rows, percentiles
from hardpoint.bench.registry import BenchResult, BenchRow, Curve, benchmark
from hardpoint.config import EngineConfig
from hardpoint.layers import Embedding, Experts
from hardpoint.terminal.progress import progress_bar
from hardpoint_plugin_api import ConfigError

ROOFLINE = (
    "every weight is read once in each step (of an untied embedding a few rows, of experts those that tokens choose at "
    "random), as fast as torch sums as many bytes on this device"
)


@click.option(
    "--requests",
    default=64,
    show_default=True,
    type=click.IntRange(min=1),
    help="Number of requests, submitted at once.",
)
@click.option("--input-len", default="128", show_default=True, metavar="LENGTHS", help="Tokens of each prompt.")
@click.option("--output-len", default="64", show_default=True, metavar="LENGTHS", help="Tokens of each output.")
@click.option("--data-seed", default=0, show_default=True, help="Seed of lengths and prompts.")
@click.option(
    "--repeat", default=3, show_default=True, type=click.IntRange(min=1), help="Runs to measure; the median counts."
)
@benchmark("throughput", "Tokens a second of the engine in process, with all requests at once.")
def throughput(
    config: EngineConfig, requests: int, input_len: str, output_len: str, data_seed: int, repeat: int
) -> BenchResult:
    """Have synthetic prompts continued, all given at once: greedy, each by a set number of tokens.

    LENGTHS is N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:MOST], or mixed:N:N... (in turn), in tokens. One run before
    is not counted.
    """
    inputs, outputs = Lengths.parse(input_len, "--input-len"), Lengths.parse(output_len, "--output-len")
    check_here(config)
    with LLM.from_config(config) as llm, progress_bar("runs", repeat + 1) as advance:
        times = []
        for number in range(repeat + 1):
            # new prompts for each run: the prefix cache holds the last one's
            data = synthetic_requests(requests, inputs, outputs, alphabet(llm), data_seed + number)
            times.append(
                (generate(llm, data), sum(r.num_output_tokens for r in data), sum(len(r.prompt) for r in data))
            )
            advance()
        running = min(requests, config.max_num_seqs)
        most = running / read_seconds(llm, running)
    measured = times[1:]
    rates = {
        "output throughput": [out / seconds for seconds, out, _ in measured],
        "all throughput": [(out + prompt) / seconds for seconds, out, prompt in measured],
        "requests": [requests / seconds for seconds, _, _ in measured],
    }
    rows = [
        BenchRow(
            name,
            statistics.median(values),
            "1/s" if name == "requests" else "tokens/s",
            roofline=most if name == "output throughput" else None,
            better="higher",
            note=f"from {min(values):.4g} to {max(values):.4g}",
        )
        for name, values in rates.items()
    ]
    return BenchResult("throughput", tuple(rows), roofline=f"{ROOFLINE}, for {running} sequences")


@click.option("--batch-size", default=1, show_default=True, type=click.IntRange(min=1), help="Requests of a batch.")
@click.option("--input-len", default=128, show_default=True, type=click.IntRange(min=1), help="Tokens of each prompt.")
@click.option("--output-len", default=64, show_default=True, type=click.IntRange(min=2), help="Tokens of each output.")
@click.option("--data-seed", default=0, show_default=True, help="Seed of the prompts.")
@click.option("--repeat", default=10, show_default=True, type=click.IntRange(min=1), help="Batches to measure.")
@benchmark("latency", "How long the engine in process takes for a batch: first token, each further one, all.")
def latency(
    config: EngineConfig, batch_size: int, input_len: int, output_len: int, data_seed: int, repeat: int
) -> BenchResult:
    """Have batches of synthetic prompts of one length continued greedily: one by a single token, the next by all.

    The time per token is that of the steps without prompts, divided by their number. One pair before is not counted.
    """
    check_here(config)
    check_at_once(config, batch_size, "--batch-size")
    first: list[float] = []
    token: list[float] = []
    whole: list[float] = []
    prompts = Lengths.parse(str(input_len), "--input-len")
    with LLM.from_config(config) as llm, progress_bar("batches", repeat + 1) as advance:

        def batch(length: int, number: int) -> float:
            lengths = prompts, Lengths.parse(str(length), "--output-len")
            return 1e3 * generate(llm, synthetic_requests(batch_size, *lengths, alphabet(llm), data_seed + number))

        for number in range(0, 2 * repeat + 2, 2):  # new prompts each time, which no cache holds
            first.append(batch(1, number))
            before = llm.stats.decode_seconds
            whole.append(batch(output_len, number + 1))
            token.append(1e3 * (llm.stats.decode_seconds - before) / (output_len - 1))
            advance()
        floor = 1e3 * read_seconds(llm, batch_size)
    first, token, whole = first[1:], token[1:], whole[1:]
    values = {"time to first token": (first, floor), "time per token": (token, floor)}
    values["end to end"] = (whole, floor * output_len)
    rows = [row for name, (times, best) in values.items() for row in percentile_rows(name, times, "ms", best)]
    shares = tuple(number / 100 for number in range(101))
    curves = [
        Curve(name, "ms", "share of batches at most that long", tuple(percentiles(times, range(101))), shares)
        for name, (times, _) in values.items()
    ]
    return BenchResult("latency", tuple(rows), roofline=ROOFLINE, curves=tuple(curves))


def generate(llm: LLM, data: Sequence[SyntheticRequest]) -> float:
    """Have every prompt continued by as many tokens as it says, and return the seconds that all took.

    Raises ConfigError for one that the engine would end early, at the longest sequence that it takes.
    """
    longest = max((len(request.prompt) + request.num_output_tokens for request in data), default=0)
    most = llm.client.facts.max_model_len
    if longest > most:
        raise ConfigError(
            f"--input-len and --output-len make a sequence of {longest} tokens, and the engine ends one at {most} "
            "(--max-model-len, or the cache's size); give shorter ones, or raise that"
        )
    params = [SamplingParams(temperature=0, max_tokens=r.num_output_tokens, ignore_eos=True) for r in data]
    began = time.perf_counter()
    outputs = llm.generate([request.prompt for request in data], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert [len(output.outputs[0].token_ids) for output in outputs] == [request.num_output_tokens for request in data]
    return seconds


_LARGEST_READ = 2**30
"""Bytes: the cache leaves little memory beside it."""


def runs_here(config: EngineConfig) -> bool:
    """Whether the engine's core is in this process, and has the only rank."""
    return not config.wants_core_process(default=False) and config.topology.local_size == 1


def check_here(config: EngineConfig, elsewhere: str = "hardpoint bench serve") -> None:
    """Raise ConfigError for an engine that does not run here; ``elsewhere`` is the command that measures it."""
    if not runs_here(config):
        topology = config.topology
        flags = {"--core-process": config.core_process, "--on-engine-failure restart": config.restarts_engine}
        for axis in ("data", "pipeline", "tensor"):
            flags[f"--{axis}-parallel-size"] = getattr(topology, axis) > 1
        given = " and ".join(flag for flag, is_given in flags.items() if is_given)
        raise ConfigError(
            f"this measures an engine of one rank in this process; leave out {given}, or measure it with: {elsewhere}"
        )


def check_at_once(config: EngineConfig, count: int, flag: str) -> None:
    """Raise ConfigError where the engine would not run all of ``count`` requests, as ``flag`` asks for, at once."""
    if count > config.max_num_seqs:
        raise ConfigError(
            f"{flag} {count}: at most {config.max_num_seqs} sequences run at once; raise --max-num-seqs to {count}, or "
            "give fewer"
        )


def alphabet(llm: LLM) -> list[int]:
    """Tokens that synthetic prompts are drawn from."""
    return sorted(set(llm.tokenizer.encode(SAMPLE_TEXT)) - set(llm.tokenizer.special_ids))


def read_seconds(llm: LLM, tokens: int, repeat: int = 30) -> float:
    """How long torch takes to sum as many bytes as a step of ``tokens`` tokens reads of the weights.

    The engine has one rank: several have devices of their own, in other processes.
    """
    import torch

    nbytes = max(4, bytes_read(llm, tokens))
    part = min(nbytes, _LARGEST_READ)
    values = torch.ones(part // 4, dtype=torch.float32, device=llm.core.blueprint.ctx.torch_device)
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        values.sum().item()  # item waits for the device
        times.append(time.perf_counter() - began)
    return min(times) * nbytes / part


def bytes_read(llm: LLM, tokens: int) -> int:
    """Bytes of the weights that a step of ``tokens`` tokens reads.

    Of an untied embedding it looks up a few rows, which do not count. A tied one is the head's weight, of which a step
    reads all. Of a layer's E experts, n tokens that each choose K at random read E (1 - (1 - K / E)^n) on the average.
    """
    model = llm.core.blueprint.model
    nbytes = llm.memory_report().by_tag["weights"]
    for layer in model.modules():
        if isinstance(layer, Embedding):
            nbytes -= sum(weight.nbytes for weight in layer.weights.values())
        if isinstance(layer, Experts):
            unread = (1 - layer.args.router.top_k / layer.args.router.num_experts) ** tokens
            nbytes -= int(unread * sum(weight.nbytes for weight in layer.weights.values()))
    return nbytes
