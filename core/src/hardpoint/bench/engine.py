"""Host time of a decode step, scheduler to sampled tokens, with a model that computes nothing."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from itertools import cycle, islice
from typing import Any, cast

import click
import torch

from hardpoint.bench.registry import BenchResult, BenchRow, benchmark
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import draw
from hardpoint.engine.client import CoreClient
from hardpoint.engine.core import EngineCore
from hardpoint.engine.frontend.conversation import Conversation
from hardpoint.engine.frontend.prompts import TokenizedPrompt
from hardpoint.engine.outputs import RequestOutputKind
from hardpoint.engine.requests import RequestProgress
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.engine.scheduling.admission import Admission
from hardpoint.server.generation import Cursor
from hardpoint.tokenizer import Detokenizer, Tokenizer
from hardpoint_plugin_api import ConfigError, ForwardStep

_GOALS = {1: 0.3, 64: 0.6, 256: 2.0}
"""Milliseconds on one core, from the engine's requirements."""

_PROMPT_TOKENS = 16
_STEPS_BEFORE = 4
"""Steps that read the prompts, and some that are not counted."""
_LONG_STREAM, _SHORT_STREAM, _WINDOW = 32_000, 100, 1_000
"""Tokens of a stream. After each window of the long one, as many tokens of short ones are measured."""
_MOST_STEPS = 2000
"""The demo model's sequences have at most 2048 tokens."""


@click.option("--dry-device", is_flag=True, help="Run steps without a model. Required: no other mode exists yet.")
@click.option(
    "--running",
    multiple=True,
    type=click.IntRange(min=1),
    default=(1, 64, 256),
    show_default=True,
    help="Number of running requests; repeatable.",
)
@click.option(
    "--waiting",
    default=10_000,
    show_default=True,
    type=click.IntRange(min=0),
    help="Requests in the queue, in the second measurement of each number of running ones.",
)
@click.option(
    "--steps",
    default=100,
    show_default=True,
    type=click.IntRange(2, _MOST_STEPS),
    help="Steps to measure; the median counts.",
)
@benchmark("engine", "Host time per decode step, without a model.")
def engine(dry_device: bool, running: tuple[int, ...], waiting: int, steps: int) -> BenchResult:
    """Measure decode steps at each number of RUNNING requests, with none and with WAITING requests in the queue.

    Everything of a step but the model is real: scheduling, staging, planning, sampling (greedy), committing. The peer
    of a row with waiting requests is the row without.
    """
    if not dry_device:
        raise ConfigError("bench engine measures the host alone; say so with --dry-device")
    rows = []
    for count in running:
        alone = _milliseconds(count, 0, steps)
        goal = f"goal {_GOALS[count]} ms" if count in _GOALS else ""
        rows.append(BenchRow(f"{count} running", alone, "ms", note=goal))
        if waiting:
            queued = _milliseconds(count, waiting, steps)
            rows.append(BenchRow(f"{count} running, {waiting} waiting", queued, "ms", peer=alone, note=goal))
    rows.append(BenchRow("detokenize one token", _detokenize_microseconds(), "us"))
    short, long, last = _stream_microseconds()
    rows.append(BenchRow(f"stream one token, of streams of {_SHORT_STREAM}", short, "us"))
    rows.append(BenchRow(f"stream one token, of a stream of {_LONG_STREAM:,}", long, "us", peer=short))
    rows.append(BenchRow(f"stream one token, of its last {_WINDOW:,}", last, "us", peer=short))
    return BenchResult("engine", tuple(rows), peer="the same without waiting requests; of a stream, short streams")


class _NoModel:
    """Stands where a model stands, and computes nothing: zeros everywhere."""

    def __init__(self, vocabulary: int, most_rows: int) -> None:
        self._zero, self._logits = torch.zeros(1, 1), torch.zeros(most_rows, vocabulary)

    def hidden(self, ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        return self._zero.expand(ids.shape[0], 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: hidden.shape[0]]


def _milliseconds(running: int, waiting: int, steps: int) -> float:
    """The median time of a step in which ``running`` requests decode."""
    config = EngineConfig.create(
        model="demo",
        platform="cpu",
        max_num_seqs=running,
        max_num_batched_tokens=max(2048, running * _PROMPT_TOKENS),
        max_model_len=max(1024, _PROMPT_TOKENS + _STEPS_BEFORE + steps + 8),  # none ends while steps are measured
        enable_prefix_caching=False,
        plugin_config={"cpu": {"threads": 1}},
    )
    core = EngineCore.start(draw(config), model=_NoModel(vocabulary=8, most_rows=running))
    params = SamplingParams(temperature=0, max_tokens=_STEPS_BEFORE + steps + 8, ignore_eos=True)
    for number in range(running):
        core.add_request([2 + number % 5] * _PROMPT_TOKENS, params, frozenset())
    for _ in range(_STEPS_BEFORE):
        core.step()
    for _ in range(waiting):
        core.add_request([2] * _PROMPT_TOKENS, replace(params, max_tokens=1), frozenset())
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - began)
    core.close()
    return statistics.median(times) * 1e3


class _ScriptedCore:
    """Takes requests; the bench appends their tokens."""

    def __init__(self, vocabulary: int) -> None:
        self._admission = Admission(2 * _LONG_STREAM, vocabulary, seed=0)
        self.draw_seed = self._admission.draw_seed

    def add_request(self, *args: Any, **options: Any) -> RequestProgress:
        """Admit a request and return its progress, which this core never advances."""
        return RequestProgress(self._admission.admit(*args, **options))

    def abort(self, request: RequestProgress) -> None:
        """Do nothing: the bench ends each request itself."""


class _Stream:
    """A stream of one request, whose tokens are said in advance."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("It is a truth universally acknowledged, that a single man. ")
        params = SamplingParams(max_tokens=_LONG_STREAM, output_kind=RequestOutputKind.DELTA)
        core = cast(CoreClient, _ScriptedCore(max(ids) + 1))
        prompt = TokenizedPrompt.read([1], tokenizer)
        self._conversation = Conversation(core, tokenizer, prompt, params, frozenset())
        self._tokens, self._cursor = cycle(ids), Cursor()

    def seconds(self, tokens: int) -> list[float]:
        """The front end's time for each of the next ``tokens``, from the core's report to a part that is ready to be
        written."""
        (request,), times = self._conversation.requests, []
        for token in islice(self._tokens, tokens):
            request.token_ids.append(token)
            began = time.perf_counter()
            self._conversation.advance(request)
            for part in self._conversation.take().outputs:
                self._cursor.take(part)
            times.append(time.perf_counter() - began)
        return times


def _stream_microseconds() -> tuple[float, float, float]:
    """Median microseconds for a token of short streams, of a long one, and of the long one's last window, in turns."""
    from hardpoint.checkpoint.source import demo_model

    tokenizer = Tokenizer.load(demo_model())
    stream, long, short = _Stream(tokenizer), list[float](), list[float]()
    for _ in range(_LONG_STREAM // _WINDOW):
        long += stream.seconds(_WINDOW)
        for _ in range(_WINDOW // _SHORT_STREAM):
            short += _Stream(tokenizer).seconds(_SHORT_STREAM)
    return _median_us(short), _median_us(long), _median_us(long[-_WINDOW:])


def _median_us(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e6


def _detokenize_microseconds(tokens: int = 2000) -> float:
    """Text from one more token of a stream, on the average."""
    from hardpoint.checkpoint.source import demo_model

    tokenizer = Tokenizer.load(demo_model())
    ids = tokenizer.encode("It is a truth universally acknowledged, that a single man. " * (tokens // 12))[:tokens]
    detokenizer = Detokenizer(tokenizer)
    began = time.perf_counter()
    for token in ids:
        detokenizer.add([token])
    return (time.perf_counter() - began) / len(ids) * 1e6
