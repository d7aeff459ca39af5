"""Trials of ops that sum an input over the ranks of a group: each rank has a partial sum of its own.

The truth is the op's reference on the sum, both in float64; the error that is honest is that of adding the partial sums
in turn in the dtype, and of the reference in the dtype after that.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch

from hardpoint.conformance.memory import equal_bits, share_storage
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.ranks import in_group, too_few_devices, worlds
from hardpoint.conformance.site import Subject, TrialResources
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint.context import Context
from hardpoint.dtypes import dtype_of
from hardpoint.ops.base import Case, CustomOp
from hardpoint.ops.comparison import Comparison, Fault
from hardpoint.ops.error_model import compare
from hardpoint.ops.judge import sequence
from hardpoint_plugin_api import Feature, GroupMember, OpWorkload, Reason, TokensRequirement

_HOST = torch.device("cpu")
_BAND = 128
"""Bytes beside each input that nobody may write to."""


def summed_trials(subject: Subject, op: CustomOp[..., Any], plan: Plan) -> Iterator[Trial]:
    """The op's cases, in each claimed dtype, among groups of several sizes."""
    names = [case.name for case in _cases(op, "float32", plan.seed)]
    factors: dict[str, Sequence[Any]] = {"dtype": subject.dtypes(), "world": worlds(plan), "case": names}
    for row in plan.combinations(factors):
        probe = SummedProbe(subject, op, plan, **row)
        if reason := probe.refuses():
            yield Trial(probe.title, unsupported=reason, workload=probe.workload)
            continue
        checks = [Check("values", probe.values, decisive=True)]
        if too_few_devices(subject.site, probe.world) is None:
            checks += [Check("inputs", probe.inputs), Check("agree", probe.agree)]
            if subject.deterministic:
                checks.append(Check("repeat", probe.repeat))
            if Feature.BATCH_INVARIANT in subject.features and probe.num_rows:
                checks.append(Check("batch-invariant", probe.batch_invariant))
        yield Trial(probe.title, checks, workload=probe.workload)


def _cases(op: CustomOp[..., Any], dtype: str, seed: int) -> Iterator[Case]:
    return op.cases(torch.Generator().manual_seed(seed), dtype_of(dtype), _HOST)


@dataclass
class _Seen:
    """Results of one rank's calls: two draws, the first again, and a row of that; on the host."""

    results: list[list[torch.Tensor]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


class SummedProbe:
    """One case of the op among so many ranks. They meet once for all of its checks."""

    def __init__(self, subject: Subject, op: CustomOp[..., Any], plan: Plan, dtype: str, world: int, case: str) -> None:
        self.subject, self.op, self.dtype, self.world = subject, op, dtype, world
        self.title = f"{dtype}/{world}/{case}"
        seed = plan.seed_of(f"{subject.offer.contribution}/{self.title}")
        self._draws = [self._draw(case, seed + 100 * number) for number in range(2)]
        first = self._draws[0][0]
        self.num_rows = first[self._summed].shape[0]
        self.workload = OpWorkload(
            of=op.name,
            dtype=dtype,
            parallel="tp",
            ranks=world,
            hidden_size=first[self._summed].shape[-1],
            scalars=op.scalars_of({name: first[name] for name in op.static}),
        )
        self.is_invariant = Feature.BATCH_INVARIANT in subject.features

    @property
    def _summed(self) -> str:
        assert self.op.sums is not None
        return self.op.sums

    def _draw(self, name: str, seed: int) -> list[dict[str, Any]]:
        """The arguments of each rank, which differ in the partial sum alone."""
        signature, found = inspect.signature(self.op.reference), list[dict[str, Any]]()
        for rank in range(self.world):
            case = next(c for c in _cases(self.op, self.dtype, seed + rank) if c.name == name)
            arguments = dict(signature.bind(*case.args, **case.kwargs).arguments)
            found.append((found[0] if found else arguments) | {self._summed: arguments[self._summed]})
        return found

    def refuses(self) -> Reason | None:
        """Why this is not for the contribution."""
        if self.subject.offer.contribution.form != "factory":
            return Reason("form", f"{self.op.name} takes a group of ranks, which only factories know of")
        for need in self.subject.offer.contribution.requires:
            if isinstance(need, TokensRequirement) and need.max is not None and self.num_rows > need.max:
                return Reason("tokens", "more tokens", wanted=str(self.num_rows), supported=f"up to {need.max}")
        return self.subject.refuses(self.workload)

    def _make(self, ctx: Context) -> Callable[..., Any]:
        offer = self.subject.offer
        made = self.subject.target(ctx.for_plugin(offer.plugin), self.workload, {})
        if isinstance(made, GroupMember):
            ctx.adopt(offer, made)
        return cast("Callable[..., Any]", made)

    @cached_property
    def _seen(self) -> list[_Seen]:
        def context(device: torch.device) -> Context:
            return self.subject.site.context(self.dtype, device=device, batch_invariant=self.is_invariant)

        return in_group(self.subject.site, self.world, self._make, self._act, context)

    def _act(self, rank: int, run: Callable[..., Any], ctx: Context) -> _Seen:
        first, second = (draw[rank] for draw in self._draws)
        seen, held = _Seen(), []
        for number, drawn in enumerate((first, second, first)):
            inputs = {name: _Banded(x, ctx.torch_device) for name, x in drawn.items() if isinstance(x, torch.Tensor)}
            time.sleep(0.001 * ((rank + number) % self.world))  # ranks are never at the same place
            cast(TrialResources, ctx.resources).spoil()
            outputs = sequence(run(**(drawn | {name: x.inner for name, x in inputs.items()})))
            held.append(outputs)
            seen.results.append([y.cpu().clone() for y in outputs])
            seen.faults += self._side_effects(inputs, outputs, f"rank {rank}")
        for outputs, copies in zip(held, seen.results, strict=True):
            if not all(equal_bits(y.cpu(), copy) for y, copy in zip(outputs, copies, strict=True)):
                seen.faults.append(Fault("overwritten", f"rank {rank}", "a later call has overwritten a result"))
        if self.is_invariant and self.num_rows:
            seen.results.append([y.cpu() for y in sequence(run(**self._row(first, ctx.torch_device)))])
        return seen

    def _row(self, drawn: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """The middle row of each input that has rows."""
        row = self.num_rows // 2
        return {
            name: (x[row : row + 1] if x.dim() > 1 else x).to(device, copy=True) if isinstance(x, torch.Tensor) else x
            for name, x in drawn.items()
        }

    def _side_effects(self, inputs: dict[str, _Banded], outputs: Sequence[torch.Tensor], where: str) -> Iterator[Fault]:
        for name, given in inputs.items():
            shared = {index for index, y in enumerate(outputs) if share_storage(y, given.inner)}
            for index in shared:
                if (index, name) not in self.op.aliases:
                    yield Fault("alias", where, f"output {index} shares memory with {name}, undeclared")
            if name != self._summed and not shared and given.is_changed:
                yield Fault("mutated", where, f"{name} has changed")
            if given.band_is_changed:
                yield Fault("out-of-bounds", where, f"memory beside {name} was written to")

    def _expected(self, draw: Sequence[dict[str, Any]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each output: the reference's in the dtype, and the truth."""
        partial_sums = [arguments[self._summed] for arguments in draw]
        own, true = partial_sums[0].clone(), partial_sums[0].double()
        for x in partial_sums[1:]:
            own, true = own + x, true + x.double()
        wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in draw[0].items()}
        pair = (
            sequence(self.op.reference(**(draw[0] | {self._summed: own}))),
            sequence(self.op.reference(**(wide | {self._summed: true}))),
        )
        return list(zip(*pair, strict=True))

    def values(self) -> Finding:
        """``values``: every rank gets what the reference makes of the sum, in two calls on unlike data."""
        if skipped := too_few_devices(self.subject.site, self.world):
            return skipped
        found = Comparison()
        for draw, number in zip(self._draws, range(2), strict=True):
            expected = self._expected(draw)
            for rank, seen in enumerate(self._seen):
                got = seen.results[number]
                if len(got) != len(expected):
                    return Finding.failed(
                        "structure", f"rank {rank}", f"expected {len(expected)} outputs, got {len(got)}"
                    )
                for index, (actual, (own, true)) in enumerate(zip(got, expected, strict=True)):
                    found.add(compare(f"rank {rank}, output {index}", actual, own, true, self.op.errors, _HOST))
        return Finding.of(found)

    def inputs(self) -> Finding:
        """``inputs``: nothing but the partial sum is written to, no memory beside inputs, and results stay."""
        return Finding(tuple(fault for seen in self._seen for fault in seen.faults))

    def repeat(self) -> Finding:
        """``repeat``: equal inputs give equal bits."""
        for rank, seen in enumerate(self._seen):
            if not all(map(equal_bits, seen.results[0], seen.results[2])):
                return Finding.failed("repeat", f"rank {rank}", "the same call gives other bits the second time")
        return Finding()

    def agree(self) -> Finding:
        """``agree``: every rank has the same bits. Where ranks differ, they go on to sample unlike tokens."""
        first, *others = (seen.results[0] for seen in self._seen)
        for rank, other in enumerate(others, 1):
            if not all(map(equal_bits, first, other)):
                return Finding.failed("agree", f"ranks 0 and {rank}", "have unlike results of the same numbers")
        return Finding()

    def batch_invariant(self) -> Finding:
        """``batch-invariant``: a row by itself has the bits that it has among others."""
        row = self.num_rows // 2
        for rank, seen in enumerate(self._seen):
            if not all(
                equal_bits(alone, among[row : row + 1])
                for alone, among in zip(seen.results[3], seen.results[0], strict=True)
            ):
                return Finding.failed("batch-invariant", f"rank {rank}", f"row {row} by itself has other bits")
        return Finding()


class _Banded:
    """A copy of ``x`` on a device, in memory that nobody may write to."""

    def __init__(self, x: torch.Tensor, device: torch.device) -> None:
        raw = torch.full((x.nbytes + 2 * _BAND,), 0xFF, dtype=torch.uint8, device=device)
        self.inner = raw[_BAND : _BAND + x.nbytes].view(x.dtype).view(x.shape)
        self.inner.copy_(x)
        self._raw, self._before = raw, raw.clone()

    @property
    def is_changed(self) -> bool:
        inner = slice(_BAND, len(self._raw) - _BAND)
        return not torch.equal(self._raw[inner], self._before[inner])

    @property
    def band_is_changed(self) -> bool:
        ends = (slice(_BAND), slice(len(self._raw) - _BAND, None))
        return not all(torch.equal(self._raw[end], self._before[end]) for end in ends)
