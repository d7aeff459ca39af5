"""A server under load over HTTP, as its clients see it, and what its processes use meanwhile."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import click

from hardpoint.bench.http_stream import StreamClient
from hardpoint.bench.lengths import SAMPLE_TEXT, Lengths, SyntheticRequest, synthetic_requests
from hardpoint.bench.load import Load, Summary, Timing, redrawn
from hardpoint.bench.processes import OwnServer, ProcessSample, own_server, sample_processes
from hardpoint.bench.registry import BenchResult, BenchRow, benchmark
from hardpoint.config import EngineConfig
from hardpoint.terminal.engine_options import DEFAULTS
from hardpoint.terminal.progress import progress_bar
from hardpoint_plugin_api import ConfigError, HardpointError, UnknownNameError

_CPU_GOAL = "goal at most 60 us"
"""Of the server's process, from the requirements of serving."""


@click.option("--url", help="Server to measure, as http://HOST:PORT. Default: start one with the engine options.")
@click.option("--api-key", metavar="KEY", help="API key for the server at --url.")
@click.option(
    "--pid",
    type=int,
    help="Process id of the server at --url, if on this host: measures its processor time and memory.",
)
@click.option("--requests", default=100, show_default=True, type=click.IntRange(min=1), help="Number of requests.")
@click.option("--concurrency", type=click.IntRange(min=1), help="Concurrent requests.  [default: 16]")
@click.option(
    "--request-rate",
    type=click.FloatRange(min=0, min_open=True),
    help="Requests per second, at random times (Poisson), in place of --concurrency.",
)
@click.option(
    "--duration",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Go on for this long, with new prompts of the same lengths.",
)
@click.option(
    "--request-timeout",
    default=600.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Longest time of a request. Slower requests count as failed.",
)
@click.option(
    "--api-server-count",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Number of HTTP processes of the server that this command starts.",
)
@click.option(
    "--token-rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="RATE",
    help="Start the server with a stand-in for the engine, which gives RATE tokens a second: measures HTTP alone.",
)
@click.option(
    "--warmup",
    default=8,
    show_default=True,
    type=click.IntRange(min=0),
    help="Requests before the measurement, which do not count.",
)
@click.option("--input-len", default="128", show_default=True, metavar="LENGTHS", help="Tokens of each prompt.")
@click.option("--output-len", default="64", show_default=True, metavar="LENGTHS", help="Tokens of each output.")
@click.option("--data-seed", default=0, show_default=True, help="Seed of lengths, prompts and arrival times.")
@click.option(
    "--peer/--no-peer",
    default=True,
    show_default=True,
    help="Measure the engine in this process too, with the same requests.",
)
@benchmark("serve", "A server under load: throughput, latencies, processor time per token.")
def serve(
    config: EngineConfig,
    url: str | None,
    api_key: str | None,
    pid: int | None,
    requests: int,
    concurrency: int | None,
    request_rate: float | None,
    duration: float | None,
    request_timeout: float,
    api_server_count: int,
    token_rate: float | None,
    warmup: int,
    input_len: str,
    output_len: str,
    data_seed: int,
    peer: bool,
) -> BenchResult:
    """Send synthetic requests to a server and measure what clients see: streamed completions, greedy, of a set length.

    LENGTHS is N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:MOST], or mixed:N:N... (in turn), in tokens. The peer is the
    same engine in this process with the same requests, as many at a time (where a server was started, without
    --request-rate and --duration). Processor time is that of each process of the server, per token of the output.
    """
    inputs, outputs = Lengths.parse(input_len, "--input-len"), Lengths.parse(output_len, "--output-len")
    if concurrency is not None and request_rate is not None:
        raise ConfigError("--concurrency and --request-rate exclude each other; give one")
    if url is not None and (given := config.explicit - {"model"}):
        raise ConfigError(f"--url names a server that runs with its own settings; leave out {', '.join(sorted(given))}")
    if url is None and (pid is not None or api_key is not None):
        raise ConfigError("--pid and --api-key belong to a server that runs; give its --url too")
    if url is not None and token_rate is not None:
        raise ConfigError("--token-rate is for a server that is started here; leave out --url")
    in_flight = None if request_rate is not None else concurrency or 16
    load = Load(in_flight, request_rate, duration, data_seed)
    server: AbstractContextManager[OwnServer]
    server = (
        own_server(config, api_server_count, token_rate)
        if url is None
        else nullcontext(OwnServer(url.rstrip("/"), pid or 0))
    )
    with server as running:
        if url is None:
            asyncio.run(_wait_until_ready(running, config.core_start_timeout))
        # without MODEL, the config has the default
        model = config.model if url is not None and config.model != DEFAULTS["model"] else ""
        client, alphabet = asyncio.run(_connect(StreamClient(running.url, model, api_key, request_timeout)))
        data = synthetic_requests(requests, inputs, outputs, alphabet, data_seed)
        warm = synthetic_requests(warmup, inputs, outputs, alphabet, data_seed + 1)
        if url is not None:  # its prefix cache may hold the prompts of an earlier run
            data, warm = (list(redrawn(each, random.Random())) for each in (data, warm))
        asyncio.run(Load(in_flight or warmup, None, None, 0).apply(client.stream, warm, lambda timing: None))
        before = sample_processes(running.pid) if running.pid else {}
        timings = asyncio.run(_measure(load, client, data))
        after = sample_processes(running.pid) if running.pid else {}
    summary = Summary(timings)
    if not summary.good:
        raise HardpointError(f"every one of {len(timings)} requests failed, the first so: {timings[0].error}")
    beside, said = None, ""
    if peer and url is None and not duration and in_flight and token_rate is None:
        said = "the same engine in process, the same requests, as many at a time"
        try:
            beside = _in_process(config, warm, data, in_flight)
        except (Exception, KeyboardInterrupt) as error:  # what the server did is known all the same
            said += f"; not measured: {str(error) or type(error).__name__}"
    rows = [*summary.rows(beside), *_usage(before, after, summary.num_output_tokens)]
    return BenchResult("serve", tuple(rows), peer=said, curves=summary.curves())


async def _connect(client: StreamClient) -> tuple[StreamClient, list[int]]:
    """``client`` of its model, or else of the first that is served, and tokens to make prompts of.

    Raises UnknownNameError for a model that is not served, HardpointError for a server that answers otherwise than
    OpenAI's and vLLM's do.
    """
    asked, answer = "/v1/models", None
    try:
        answer = await client.get(asked)
        served = [str(model["id"]) for model in answer["data"]]
        client = replace(client, model=client.model or served[0])
        if client.model not in served:
            raise UnknownNameError("model", client.model, served, f"It is asked for at {client.url}.")
        body = {"model": client.model, "prompt": SAMPLE_TEXT, "add_special_tokens": False}
        asked = "/tokenize"
        answer = await client.post(asked, body)
        return client, sorted(set(answer["tokens"]))
    except (OSError, UnicodeError) as error:  # the latter for a name that no host can have
        raise HardpointError(f"the server at {client.url} cannot be reached: {error}") from None
    except (LookupError, TypeError):
        raise HardpointError(
            f"{client.url}{asked} does not answer as servers of completions do: {str(answer)[:300]}"
        ) from None


async def _wait_until_ready(server: OwnServer, timeout: float) -> None:
    """Wait for a server that may be loading. Raises HardpointError where it ends, or takes longer."""
    client, end = StreamClient(server.url), time.monotonic() + timeout
    while True:
        try:
            await client.get("/ready")
            return
        except OSError:
            raise HardpointError(f"the server has ended while it was loading: {server.why_ended()}") from None
        except HardpointError as error:
            if time.monotonic() > end:
                raise HardpointError(f"the server is not ready after {timeout:g} seconds: {error}") from None
        await asyncio.sleep(0.1)


async def _measure(load: Load, client: StreamClient, data: Sequence[SyntheticRequest]) -> list[Timing]:
    with progress_bar("requests", None if load.seconds else len(data)) as advance:
        return await load.apply(client.stream, data, lambda timing: advance())


def _in_process(
    config: EngineConfig, warm: Sequence[SyntheticRequest], data: Sequence[SyntheticRequest], in_flight: int
) -> float:
    """Output tokens a second of the engine without server and process boundary."""
    from hardpoint.bench.offline import generate
    from hardpoint.engine.llm import LLM

    with LLM.from_config(config.model_copy(update={"max_num_seqs": min(in_flight, config.max_num_seqs)})) as llm:
        generate(llm, warm)
        return sum(request.num_output_tokens for request in data) / generate(llm, data)


def _usage(
    before: Mapping[int, ProcessSample], after: Mapping[int, ProcessSample], num_tokens: int
) -> Iterator[BenchRow]:
    is_alone = not any(sample.name.startswith("server ") for sample in before.values())
    for old, new in ((before[pid], after[pid]) for pid in before if pid in after):
        note = _CPU_GOAL if new.name == "server" and is_alone else ""
        microseconds = 1e6 * (new.cpu_seconds - old.cpu_seconds) / num_tokens
        yield BenchRow(f"{new.name}: processor time per token", microseconds, "us", note=note)
        grown = (new.resident_bytes - old.resident_bytes) / 2**20
        held = f"{new.resident_bytes / 2**20:.0f} MiB held in the end"
        yield BenchRow(f"{new.name}: growth since the warm-up", grown, "MiB", note=held)
        more = new.num_descriptors - old.num_descriptors
        yield BenchRow(f"{new.name}: more descriptors", more, "", note=f"{new.num_threads - old.num_threads:+} threads")
