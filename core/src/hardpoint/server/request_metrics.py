"""Metrics of requests, by model, under Hardpoint's names and vLLM's."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
_WAITS = (0.001, 0.005, 0.01, *_SECONDS)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_NUMBERS = (1, 2, 5, 10, 20)


class _Histogram:
    """A histogram that a value costs a fraction of a microsecond: one thread alone writes it, so it needs no locks."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count ``count`` times ``value``."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_to(self, family: HistogramMetricFamily, model: str) -> None:
        """Write the histogram into ``family``."""
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family.add_metric([model], buckets, self._sum)


@dataclass(frozen=True)
class _Name:
    """How a histogram is called here and in vLLM, and the upper bounds of its buckets."""

    own: str
    vllm: str
    help: str
    bounds: Sequence[float]


_HISTOGRAMS = {
    "first_token": _Name(
        "time_to_first_token_seconds",
        "time_to_first_token_seconds",
        "From a request's admission to its first token.",
        _SECONDS,
    ),
    "inter_token": _Name(
        "inter_token_latency_seconds",
        "inter_token_latency_seconds",
        "Between two deliveries of a stream, for each token that came.",
        _TOKEN_SECONDS,
    ),
    "per_token": _Name(
        "request_seconds_per_output_token",
        "request_time_per_output_token_seconds",
        "Mean time between the tokens of a request, behind its first.",
        _TOKEN_SECONDS,
    ),
    "whole": _Name(
        "request_seconds", "e2e_request_latency_seconds", "From a request's admission to its end.", _SECONDS
    ),
    "queue": _Name(
        "request_queue_seconds",
        "request_queue_time_seconds",
        "From a request's admission to its first step.",
        _WAITS,
    ),
    "prefill": _Name(
        "request_prefill_seconds",
        "request_prefill_time_seconds",
        "From a request's first step to its first token.",
        _WAITS,
    ),
    "decode": _Name(
        "request_decode_seconds", "request_decode_time_seconds", "From a request's first token to its end.", _SECONDS
    ),
    "inference": _Name(
        "request_inference_seconds",
        "request_inference_time_seconds",
        "From a request's first step to its end.",
        _SECONDS,
    ),
    "prompt_tokens": _Name("request_prompt_tokens", "request_prompt_tokens", "Tokens of a request's prompts.", _TOKENS),
    "completion_tokens": _Name(
        "request_completion_tokens", "request_generation_tokens", "Tokens drawn for a request.", _TOKENS
    ),
    "longest_completion": _Name(
        "request_longest_completion_tokens",
        "request_max_num_generation_tokens",
        "Tokens of a request's longest completion.",
        _TOKENS,
    ),
    "completions": _Name("request_completions", "request_params_n", "Completions asked for, per prompt.", _NUMBERS),
    "max_tokens": _Name(
        "request_max_tokens", "request_params_max_tokens", "Limits of output tokens that requests gave.", _TOKENS
    ),
}


@dataclass
class EndedRequest:
    """A request that has ended. Times are seconds since its admission; None where it did not come so far.

    ``started``: of its first step. ``reasons``: why its completions ended.
    """

    seconds: float
    prompt_tokens: int
    completion_tokens: int
    longest_completion: int
    num_completions: int
    max_tokens: int | None
    started: float | None
    first_token: float | None
    reasons: Sequence[str]


@dataclass
class _OfModel:
    histograms: Mapping[str, _Histogram] = field(
        default_factory=lambda: {key: _Histogram(name.bounds) for key, name in _HISTOGRAMS.items()}
    )
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class RequestMetrics(Collector):
    """The per-request metrics of one server. To be used in the server's event loop alone."""

    def __init__(self, models: Sequence[str], *, vllm_names: bool) -> None:
        """``models`` are there from the start, before they have requests. ``vllm_names``: under vLLM's names, too."""
        self._models = {model: _OfModel() for model in models}
        self._vllm_names = vllm_names

    def inter_token(self, model: str) -> Callable[[float, int], None]:
        """A function that counts tokens which came together: the seconds per token, and how many they are."""
        return self._of(model).histograms["inter_token"].observe

    def first_token(self, model: str, seconds: float) -> None:
        """Count the first token of a request."""
        self._of(model).histograms["first_token"].observe(seconds)

    def ended(self, model: str, request: EndedRequest) -> None:
        """Count a request that has ended, well or not."""
        of_model = self._of(model)
        of_model.prompt_tokens += request.prompt_tokens
        of_model.completion_tokens += request.completion_tokens
        of_model.reasons.update(request.reasons)
        values: dict[str, float | None] = {
            "whole": request.seconds,
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": request.completion_tokens,
            "longest_completion": request.longest_completion,
            "completions": request.num_completions,
            "max_tokens": request.max_tokens,
            "queue": request.started,
        }
        started, first = request.started, request.first_token
        if started is not None:
            values["inference"] = request.seconds - started
        if started is not None and first is not None:
            values["prefill"] = max(0.0, first - started)
        if first is not None:
            values["decode"] = request.seconds - first
            if request.longest_completion > 1:
                values["per_token"] = (request.seconds - first) / (request.longest_completion - 1)
        for key, value in values.items():
            if value is not None:
                of_model.histograms[key].observe(value)

    def _of(self, model: str) -> _OfModel:
        found = self._models.get(model)
        if found is None:  # setdefault would make all histograms at each call
            found = self._models[model] = _OfModel()
        return found

    def collect(self) -> Iterator[Metric]:
        yield from self._families("hardpoint_", "model", lambda name: name.own)
        if self._vllm_names:
            yield from self._families("vllm:", "model_name", lambda name: name.vllm)

    def _families(self, prefix: str, label: str, called: Callable[[_Name], str]) -> Iterator[Metric]:
        is_own = prefix == "hardpoint_"
        for key, name in _HISTOGRAMS.items():
            family = HistogramMetricFamily(prefix + called(name), name.help, labels=[label])
            for model, of_model in self._models.items():
                of_model.histograms[key].add_to(family, model)
            yield family
        prompt, completion, ended = (
            ("served_prompt_tokens", "served_completion_tokens", "completions_ended")
            if is_own
            else ("prompt_tokens", "generation_tokens", "request_success")
        )
        reason = "reason" if is_own else "finished_reason"
        prompts = CounterMetricFamily(prefix + prompt, "Tokens of the prompts that were answered.", labels=[label])
        completions = CounterMetricFamily(prefix + completion, "Tokens drawn in answers.", labels=[label])
        reasons = CounterMetricFamily(prefix + ended, "Completions that ended, by reason.", labels=[label, reason])
        for model, of_model in self._models.items():
            prompts.add_metric([model], of_model.prompt_tokens)
            completions.add_metric([model], of_model.completion_tokens)
            for why in ("stop", "length", "abort"):
                reasons.add_metric([model, why], of_model.reasons[why])
        yield from (prompts, completions, reasons)
