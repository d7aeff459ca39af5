"""Measures every kernel that could serve a linear layer's matmul, on random weights, for the tuning file.

Axes: T tokens, N out features, K in features.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, pairwise
from typing import TypeVar

import torch
from packaging.requirements import Requirement

from hardpoint.bench.device_timer import DeviceTimer, Product, Run
from hardpoint.config import EngineConfig
from hardpoint.context import Context
from hardpoint.dtypes import dtype_of
from hardpoint.engine.blueprint import draw
from hardpoint.logs import log_once
from hardpoint.numerics import travels
from hardpoint.ops.quantize_rows import quantize_rows
from hardpoint.plugin_host import Offer
from hardpoint.plugin_host.blame import blame, construct
from hardpoint.resources import EngineResources
from hardpoint.selection import Plan, TuningFile, Verdict
from hardpoint.selection.decide import Contender, Decision, Times, decide, verdicts, within_noise
from hardpoint.selection.tuning import versions_of
from hardpoint.terminal.progress import progress_bar
from hardpoint_plugin_api import (
    HardpointError,
    LinearCall,
    LinearKernel,
    LinearWorkload,
    Quantized,
    QuantSpec,
    Scheme,
    WeightSlot,
    weight_slots,
)
from hardpoint_plugin_api.requirements import PackageRequirement

logger = logging.getLogger(__name__)
T = TypeVar("T")

_WORKING_SET = 256 * 2**20
"""Bytes of weights that are gone through before one is read again: more than caches hold."""
_HEAVY = 1.25
"""Times the bytes of the weight as loaded; a layout's padding of small matrices is less."""
_HOPELESS = 8.0
"""Times the best's time: a candidate that takes more is not tried with more tokens, from ``_MANY_TOKENS`` on."""
_MANY_TOKENS = 16
_PATIENCE = 0.25
"""Seconds. With fewer tokens, a hopeless candidate is left where one call with the next number would take longer."""
_RUNGS = (2, _MANY_TOKENS)
"""Numbers of tokens that are tried once, where none near them is measured, before a hopeless candidate gets more."""
_FINITE = 0x77
"""Bits of a floating-point element of 8 bits that make neither infinity nor NaN."""


@dataclass(frozen=True)
class Roofline:
    """Bytes a second that the device reads, and operations a second of torch's matmul ``product``, both measured."""

    bytes_per_second: float
    flops_per_second: float
    product: Product

    def seconds(self, nbytes: int, flops: int) -> float:
        """The least time for reading so much and computing so much."""
        return max(nbytes / self.bytes_per_second, flops / self.flops_per_second)


@dataclass(frozen=True)
class Measured:
    """One workload: what serves it now, the times, and the versions that mattered.

    ``contenders`` are those of every number of tokens. ``nbytes`` are those of the packed weight by layout,
    ``loaded_bytes`` before it is packed; ``itemsize`` is that of plain inputs and outputs.
    """

    plan: Plan
    contenders: Sequence[Contender]
    times: Times
    nbytes: Mapping[str, int]
    loaded_bytes: int
    versions: Mapping[str, str]
    itemsize: int

    @property
    def heavy(self) -> frozenset[str]:
        """Layouts that take clearly more memory than the weight as loaded: to save it may be why it is quantized."""
        return frozenset(layout for layout, nbytes in self.nbytes.items() if nbytes > _HEAVY * self.loaded_bytes)

    def with_times_of(self, older: Iterable[Verdict]) -> Measured:
        """This, and the times that verdicts with the same versions hold of other numbers of tokens.

        A verdict has one time of a candidate, which stands for both forms of its input.
        """
        times = dict(self.times)
        for verdict in older:
            if verdict.versions == self.versions:
                for tokens, microseconds in verdict.measured.items():
                    able = (contender for contender in self.contenders if contender.serves(tokens))
                    times.setdefault(tokens, {c: microseconds.get(c.name, math.inf) / 1e6 for c in able})
        return replace(self, times=dict(sorted(times.items())))


@dataclass(frozen=True)
class Tuned:
    """The decision on each workload, and the tuning file's new contents."""

    decided: Sequence[tuple[Measured, Decision]]
    roofline: Roofline
    file: TuningFile


def tune_linears(
    config: EngineConfig,
    known: TuningFile,
    tokens: Sequence[int],
    decisive: Collection[int],
    margin: float,
    most_rounds: int,
    save: Callable[[TuningFile], None],
) -> Tuned:
    """Measure and decide about all matrices of the model of ``config``, whose tuning file holds ``known``.

    See ``decide`` for ``decisive`` and ``margin``. ``save`` gets the new contents after each matrix that changes them,
    so that an interrupt loses one. Where nothing has changed by more than noise, ``known`` is returned.
    Raises the errors of ``draw``, and PluginLoadError.
    """
    blueprint = draw(config)
    ctx = blueprint.ctx
    if ctx.torch_device.type == "meta":  # of several ranks, which run elsewhere
        blueprint.platform.share_host(0, config.topology.size)
        ctx = replace(ctx, torch_device=blueprint.platform.activate(config.device_index))
    context = blueprint.platform.tuning_context()
    plans = [plan for plan in ctx.selector.plans if isinstance(plan.workload, LinearWorkload)]
    tuner = LinearTuner(ctx, DeviceTimer(blueprint.platform, ctx.torch_device, _WORKING_SET), most_rounds)
    winners, decided = dict(known.winners), []
    with torch.inference_mode(), progress_bar("matmuls measured", len(plans) * len(tokens)) as advance:
        roofline = tuner.roofline()
        for plan in plans:
            key = (ctx.device.name, plan.workload.family, plan.workload.of, plan.workload.key())
            elsewhere = tuple(v for v in winners.get(key, ()) if v.context and v.context != context)
            here = tuple(v for v in winners.get(key, ()) if v not in elsewhere)
            measured = tuner.measure(plan, tokens, advance).with_times_of(v for v in here if v.context == context)
            priority = partial(ctx.selector.priority, plan.workload)
            decision = decide(measured.times, plan, decisive, margin, priority, measured.heavy)
            decided.append((measured, decision))
            new = verdicts(decision, measured.times, measured.versions, context)
            if not within_noise(here, new, margin):
                winners[key] = (*elsewhere, *new)
                save(TuningFile(winners))
    return Tuned(decided, roofline, TuningFile(winners))


class LinearTuner:
    """Measures on a context's device; ``most_rounds`` of each number of tokens."""

    def __init__(self, ctx: Context, timer: DeviceTimer, most_rounds: int) -> None:
        self._ctx, self._timer, self._most_rounds = ctx, timer, most_rounds

    def roofline(self) -> Roofline:
        """Measure the roofline."""
        timer, rounds = self._timer, self._most_rounds
        return Roofline(timer.read_speed(rounds), timer.product_speed(rounds), timer.product)

    def measure(self, plan: Plan, tokens: Sequence[int], advance: Callable[[], None] = lambda: None) -> Measured:
        """Measure all candidates for ``plan.workload`` with each number of tokens; ``advance`` is called after each.

        ``tokens`` ascend. A candidate that takes many times the best's time with many of them is not tried with more;
        nor is it with few of them, where a call would take long. The kernel that serves now is always measured.

        The weight is packed once for each layout, and copied until caches cannot hold all. A candidate that cannot be
        built or run is left out with a warning. Raises the error of the kernel that serves now.
        """
        workload = plan.workload
        assert isinstance(workload, LinearWorkload)
        assert workload.in_features is not None
        offers = self._ctx.selector.candidates(workload)
        serving = {entry.offer for entry in plan.entries}
        kernels = {}
        for offer in offers:
            kernel = self._attempt(partial(self._construct, offer, workload), offer, offer in serving)
            if kernel is not None:
                kernels[offer] = kernel
        slots = random_slots(workload, self._ctx.torch_device)
        loaded_bytes = sum(x.nbytes for x in slots.values())
        weights, nbytes = self._packed(kernels, slots)
        del slots
        contenders = {c: kernel for offer, kernel in kernels.items() for c in _contenders(offer, kernel)}
        runs_of = partial(self._attempted, contenders, weights, workload.in_features, serving)
        times = self._times(runs_of, contenders, serving, tokens, advance)
        versions, itemsize = _versions(offers), self._ctx.dtype.itemsize
        return Measured(plan, tuple(contenders), times, nbytes, loaded_bytes, versions, itemsize)

    def _times(
        self,
        runs_of: Callable[[int, Collection[Contender]], dict[Contender, Run]],
        contenders: Collection[Contender],
        serving: Collection[Offer],
        tokens: Sequence[int],
        advance: Callable[[], None],
    ) -> Times:
        """Seconds by number of tokens and contender, infinite where it failed or was left aside as hopeless.

        ``runs_of`` gives calls with so many tokens of those of the contenders that can run.
        """
        times: dict[int, dict[Contender, float]] = {}
        hopeful = dict.fromkeys(contenders)

        def leave(seconds: Mapping[Contender, float], longest: float) -> None:
            """Have no hope of those that take many times the best's time, and longer than ``longest``."""
            slow = max(longest, _HOPELESS * min(seconds.values(), default=0.0))
            for contender, own in seconds.items():
                if own > slow and contender.offer not in serving:
                    del hopeful[contender]

        for last, number in pairwise((0, *tokens)):
            for rung in (rung for rung in _RUNGS if last < rung < number):
                once = {contender: self._timer.once(run) for contender, run in runs_of(rung, hopeful).items()}
                leave(once, _PATIENCE * rung / number)
            runs = runs_of(number, hopeful)
            seconds = self._timer.in_turns(list(runs.values()), self._most_rounds)
            times[number] = {c: math.inf for c in contenders if c.serves(number)}
            times[number] |= zip(runs, seconds, strict=True)
            following = next((n for n in tokens if n > number), number)
            longest = 0.0 if number >= _MANY_TOKENS else _PATIENCE * number / following
            leave(dict(zip(runs, seconds, strict=True)), longest)
            advance()
        return times

    def _attempted(
        self,
        contenders: Mapping[Contender, LinearKernel],
        weights: Mapping[str, Iterator[dict[str, torch.Tensor]]],
        in_features: int,
        serving: Collection[Offer],
        number: int,
        hopeful: Collection[Contender],
    ) -> dict[Contender, Run]:
        """Calls with so many tokens of the hopeful contenders, each of which was called once and did not fail."""
        x = torch.randn(number, in_features, device=self._ctx.torch_device).to(self._ctx.dtype)
        runs = {c: self._run(c, contenders[c], weights[c.form.layout], x) for c in hopeful if c.serves(number)}
        return {c: run for c, run in runs.items() if self._attempt(run, c.offer, c.offer in serving) is not None}

    def _attempt(self, call: Callable[[], T], offer: Offer, must_succeed: bool) -> T | None:
        """The result of ``call``, code of the offer's plugin; None, with a warning, where it fails and may fail."""
        try:
            with blame(offer):
                return call()
        except HardpointError as error:
            if must_succeed:
                raise
            log_once(logger, logging.WARNING, str(error), f"left out: {error}", self)
            return None

    def _construct(self, offer: Offer, workload: LinearWorkload) -> LinearKernel:
        ctx = replace(self._ctx, resources=EngineResources(), _shared={})
        kernel = construct(offer, ctx.load(offer), LinearKernel, ctx, workload)
        ctx.resources.allocate(ctx.torch_device)
        return kernel

    def _packed(
        self, kernels: Mapping[Offer, LinearKernel], slots: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, Iterator[dict[str, torch.Tensor]]], dict[str, int]]:
        """By layout, a weight on every call, each another copy; and the bytes of one."""
        weights: dict[str, Iterator[dict[str, torch.Tensor]]] = {}
        nbytes: dict[str, int] = {}
        for offer, kernel in kernels.items():
            layout = offer.contribution.layout
            if layout in weights:
                continue
            with blame(offer):
                packed = kernel.prepack({name: x.clone() for name, x in slots.items()})
            nbytes[layout] = sum(x.nbytes for x in packed.values())
            copies = -(-self._timer.working_set // max(1, nbytes[layout])) - 1
            others = [{name: x.clone() for name, x in packed.items()} for _ in range(copies)]
            weights[layout] = cycle([packed, *others])
        return weights, nbytes

    def _run(
        self, contender: Contender, kernel: LinearKernel, weights: Iterator[dict[str, torch.Tensor]], x: torch.Tensor
    ) -> Run:
        """The kernel on ``x``, in the contender's form of input."""
        if contender.input_spec is None:
            return lambda: kernel.apply(LinearCall(x, next(weights)))
        rounded = self._rounded(x, contender.input_spec)
        return lambda: kernel.apply(LinearCall(rounded.data, next(weights), scales=rounded.scale))

    def _rounded(self, x: torch.Tensor, spec: QuantSpec) -> Quantized:
        data, scale = quantize_rows.bind(self._ctx, spec=spec)(x, spec=spec)
        return Quantized(data, scale, spec)


def _contenders(offer: Offer, kernel: LinearKernel) -> Iterator[Contender]:
    """The kernel with plain input, which it may round for itself, and with input in the form that it wants."""
    yield Contender(offer)
    if kernel.input_spec is not None and travels(kernel.input_spec):
        yield Contender(offer, kernel.input_spec)


def random_slots(workload: LinearWorkload, device: torch.device) -> dict[str, torch.Tensor]:
    """A weight [N, K] of the workload's spec as it is loaded, with random elements and scales near one."""
    assert workload.spec is not None
    assert workload.out_features is not None
    assert workload.in_features is not None
    scheme = Scheme(*workload.spec)
    slots = weight_slots(scheme, (("", workload.out_features),), workload.in_features)
    fill = partial(_filled, weight=scheme.weight, device=device)
    return {name: fill(name, slot) for name, slot in slots.items()}


def _filled(name: str, slot: WeightSlot, weight: QuantSpec, device: torch.device) -> torch.Tensor:
    dtype = dtype_of(slot.dtype)
    if name == "weight" and weight.is_plain:
        return torch.randn(slot.shape, dtype=dtype, device=device)
    if name == "weight":
        bits = torch.randint(0, 256, slot.shape, dtype=torch.uint8, device=device)
        return (bits.bitwise_and_(_FINITE) if dtype.is_floating_point else bits).view(dtype)
    if name == "weight_group_index":
        columns = slot.shape[-1]
        group = weight.scales[0].block[1]
        return (
            (torch.arange(columns, device=device) // (columns if group == -1 else group)).to(dtype).expand(slot.shape)
        )
    return torch.ones(slot.shape, dtype=dtype, device=device)


def _versions(offers: Sequence[Offer]) -> dict[str, str]:
    """Of torch, of who brings the candidates, and of the packages that they need."""
    needs = (r for offer in offers for r in offer.contribution.requires if isinstance(r, PackageRequirement))
    names = {"torch", *(offer.distribution for offer in offers), *(Requirement(need.spec).name for need in needs)}
    return versions_of(sorted(names))
