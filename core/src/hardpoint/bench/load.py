"""Load on a server: when requests arrive, and what their clients saw."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hardpoint.bench.lengths import SyntheticRequest
from hardpoint.bench.registry import BenchRow, Curve

PERCENTILES = (50, 90, 99)


@dataclass
class Timing:
    """The client's view of one streamed request; seconds of ``time.perf_counter``.

    ``deliveries`` are the moments at which something of the output came; several tokens may have come together.
    """

    began: float
    deliveries: list[float] = field(default_factory=list)
    ended: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None


Send = Callable[[SyntheticRequest], Awaitable[Timing]]


@dataclass(frozen=True)
class Load:
    """How requests arrive: ``concurrency`` of them always open, or ``rate`` a second at random moments (Poisson).

    Where ``seconds`` are given, requests begin for so long: the given ones, then others of the same lengths.
    """

    concurrency: int | None
    rate: float | None
    seconds: float | None
    seed: int

    async def apply(
        self, send: Send, requests: Sequence[SyntheticRequest], advance: Callable[[Timing], None]
    ) -> list[Timing]:
        """Send ``requests`` at the times of this load, and return their timings when all have ended.

        ``advance`` is called as each ends.
        """
        timings: list[Timing] = []
        coming = iter(requests) if self.seconds is None else _rounds(requests, self.seed)
        due = time.perf_counter()
        end = math.inf if self.seconds is None else due + self.seconds

        async def one(request: SyntheticRequest) -> None:
            timings.append(await send(request))
            advance(timings[-1])

        async def one_after_another() -> None:
            for request in coming:
                if time.perf_counter() >= end:
                    return
                await one(request)

        if self.rate is None:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.concurrency or 1):
                    group.create_task(one_after_another())
            return timings
        generator = random.Random(self.seed)
        async with asyncio.TaskGroup() as group:
            for request in coming:
                if due >= end:
                    break
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(one(request))
                due += generator.expovariate(self.rate)
        return timings


def redrawn(requests: Iterable[SyntheticRequest], generator: random.Random) -> Iterator[SyntheticRequest]:
    """As many requests of the same lengths, with other prompts: no prefix cache finds these for those.

    The tokens of each are drawn from those of its prompt.
    """
    for request in requests:
        yield replace(request, prompt=generator.choices(request.prompt, k=len(request.prompt)))


def _rounds(requests: Sequence[SyntheticRequest], seed: int) -> Iterator[SyntheticRequest]:
    """``requests``, and again and again others of their lengths."""
    yield from requests
    generator = random.Random(seed)
    while True:
        yield from redrawn(requests, generator)


@dataclass(frozen=True)
class Summary:
    """Many timings as rows and curves; times in milliseconds."""

    timings: Sequence[Timing]

    @property
    def good(self) -> list[Timing]:
        """The requests that ended well."""
        return [timing for timing in self.timings if timing.error is None]

    @property
    def seconds(self) -> float:
        """From the first request's beginning to the last one's end."""
        return max(t.ended for t in self.timings) - min(t.began for t in self.timings)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all that ended well."""
        return sum(timing.num_output_tokens for timing in self.good)

    @property
    def latencies(self) -> dict[str, list[float]]:
        """To the first token, between deliveries, of a token behind the first one on average, and to the end.

        A server delivers text that is certain: where tokens' text seldom is, as that of random weights, deliveries are
        of many tokens each.
        """
        return {
            "time to first token": [1e3 * (t.deliveries[0] - t.began) for t in self.good if t.deliveries],
            "inter-token latency": [
                1e3 * (after - before)
                for t in self.good
                for before, after in zip(t.deliveries, t.deliveries[1:], strict=False)
            ],
            "time per output token": [
                1e3 * (t.ended - t.deliveries[0]) / (t.num_output_tokens - 1)
                for t in self.good
                if t.deliveries and t.num_output_tokens > 1
            ],
            "end to end": [1e3 * (t.ended - t.began) for t in self.good],
        }

    def rows(self, peer: float | None) -> Iterator[BenchRow]:
        """Throughput beside ``peer``'s (output tokens a second), then percentiles of every latency."""
        prompt_tokens = sum(timing.num_prompt_tokens for timing in self.good)
        rates = {
            "output throughput": (self.num_output_tokens, "tokens/s"),
            "all throughput": (self.num_output_tokens + prompt_tokens, "tokens/s"),
            "requests": (len(self.good), "1/s"),
        }
        for name, (count, unit) in rates.items():
            beside = peer if name == "output throughput" else None
            yield BenchRow(name, count / self.seconds, unit, peer=beside, better="higher", note=f"{count} in all")
        errors = sorted({timing.error for timing in self.timings if timing.error is not None})
        yield BenchRow("failed requests", len(self.timings) - len(self.good), "", note="; ".join(errors)[:200])
        for name, values in self.latencies.items():
            yield from percentile_rows(name, values, "ms")

    def curves(self) -> tuple[Curve, ...]:
        """For every latency, which share of its values is at most so long."""
        shares = [number / 100 for number in range(101)]
        return tuple(
            Curve(
                name, "ms", "share of values at most that long", tuple(percentiles(values, range(101))), tuple(shares)
            )
            for name, values in self.latencies.items()
            if values
        )


def percentile_rows(name: str, values: Sequence[float], unit: str, roofline: float | None = None) -> Iterator[BenchRow]:
    """p50, p90 and p99; the roofline stands beside the median. None where there are no values."""
    for percent, value in zip(PERCENTILES, percentiles(values, PERCENTILES), strict=False):
        yield BenchRow(f"{name} p{percent}", value, unit, roofline=roofline if percent == 50 else None)


def percentiles(values: Iterable[float], percents: Iterable[int]) -> list[float]:
    """The smallest values that so many per cent of all do not exceed (nearest rank); none of none."""
    ordered = sorted(values)
    return [ordered[max(0, -(-percent * len(ordered) // 100) - 1)] for percent in percents] if ordered else []
