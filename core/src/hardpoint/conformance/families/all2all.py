"""Trials of all-to-alls: what a token gets back is what all of its experts make of it, wherever they are.

Experts are functions that tell them apart and need no weights: expert e makes ``x * a[e] + b[e]`` of a token. A trial
plays the kernel between dispatch and combine, in the format that is dispatched, on ranks in threads.

Axes: T tokens of a rank, K experts per token, E experts of all ranks, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import cast

import torch

from hardpoint.conformance.families.router_weights import draw_router_weights
from hardpoint.conformance.families.steps import worst
from hardpoint.conformance.plan import Plan, Row
from hardpoint.conformance.ranks import CommunicatorGroup, Member, device_of, together, too_few_devices, worlds
from hardpoint.conformance.site import Subject, TrialResources
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint.context import Context
from hardpoint.dtypes import dtype_of
from hardpoint.ops.comparison import Comparison, Fault
from hardpoint.ops.error_model import ErrorModel, compare
from hardpoint.parallel.groups import Group, alone
from hardpoint.reference.torch_distributed import TorchDistributed
from hardpoint_plugin_api import (
    All2All,
    All2AllWorkload,
    CommunicatorWorkload,
    Contribution,
    Dispatched,
    Feature,
    GroupMember,
)

ERRORS = ErrorModel()
_HOST = torch.device("cpu")
_HIDDEN = 24
_MODEL_DTYPES = ("float32", "float16", "bfloat16")
_ROWS = {
    "even": (6, 6, 6, 6),
    "uneven": (2, 7, 1, 4),
    "first-none": (0, 5, 3, 2),
    "last-none": (5, 1, 0, 0),
    "none": (0, 0, 0, 0),
    "many": (130, 97, 128, 1),
}
"""Tokens of each rank."""

_MIXTURES = {"12x3": (12, 3), "24x6": (24, 6), "12x1": (12, 1)}
"""Experts of all ranks, and of a token."""

_ROUTES = ("drawn", "some-absent", "all-absent", "one-rank")
"""Which experts a token has: any; some ids -1; all ids -1; only such as the last rank has."""

_SEVERAL = ("ep", "tp+ep")


class All2AllTrials:
    """The generator of the family ``all2all``."""

    family = "all2all"

    def serves(self, contribution: Contribution) -> bool:
        """Every contribution: all share one interface."""
        return True

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """Combinations of what is claimed and what every all-to-all must cope with."""
        claimed = tuple(subject.claimed("parallel") or ("none", "tp", *_SEVERAL))
        for ways, ranks in (
            ([p for p in claimed if p not in _SEVERAL], (1,)),
            ([p for p in claimed if p in _SEVERAL], worlds(plan)),
        ):
            factors: dict[str, Sequence[object]] = {
                "parallel": ways,
                "world": ranks,
                "dtype": [dtype for dtype in subject.dtypes() if dtype in _MODEL_DTYPES],
                "rows": tuple(_ROWS),
                "mixture": tuple(_MIXTURES),
                "routes": _ROUTES,
                "travels": ("plain", "int8"),
            }
            if ways:
                for row in plan.combinations(factors):
                    yield _trial(All2AllProbe(subject, plan, row))


def _trial(probe: All2AllProbe) -> Trial:
    if reason := probe.subject.refuses(probe.workload):
        return Trial(probe.title, unsupported=reason, workload=probe.workload)
    checks = [Check("values", probe.values, decisive=True)]
    if too_few_devices(probe.subject.site, probe.world) is None:
        checks += [Check(name, partial(probe.told, name)) for name in ("dispatch", "inputs", "handle")]
        checks.append(Check("in-place", probe.in_place))
        if probe.subject.deterministic:
            checks.append(Check("repeat", probe.repeat))
    return Trial(probe.title, checks, workload=probe.workload)


@dataclass(frozen=True)
class _DispatchedStep:
    """The tokens that one step dispatches, on the host, for all ranks: tokens of rank 0, of rank 1, and so on."""

    x: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    rows: tuple[int, ...]
    replicated: bool

    @property
    def most(self) -> int:
        """Tokens of the rank that has the most."""
        return sum(self.rows) if self.replicated else max(self.rows)

    def part(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """Of what all ranks have, what one has."""
        return full if self.replicated else full.split(self.rows)[rank]

    def of(
        self, rank: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """The part of one rank, copied to its device."""
        x, ids, weights = (self.part(full, rank).to(device, copy=True) for full in (self.x, self.ids, self.weights))
        scales = None if self.scales is None else self.part(self.scales, rank).to(device, copy=True)
        return x, scales, ids, weights


@dataclass(frozen=True)
class _Seen:
    """The tensors that one rank got in each step, on the host, and faults by the name of their check."""

    results: list[torch.Tensor]
    faults: list[tuple[str, Fault]]


class All2AllProbe:
    """One situation. Ranks meet once for all of its checks, and keep one all-to-all, as the layers of a model do."""

    def __init__(self, subject: Subject, plan: Plan, row: Row) -> None:
        self.subject, self._row = subject, row
        self.title = "/".join(str(value) for value in row.values())
        self.world: int = row["world"]
        self._experts, self._top_k = _MIXTURES[row["mixture"]]
        self._dtype = dtype_of(row["dtype"])
        self.workload = All2AllWorkload(
            dtype=row["dtype"],
            parallel=row["parallel"],
            ranks=self.world,
            num_experts=self._experts,
            top_k=self._top_k,
            hidden_size=_HIDDEN,
            features=frozenset({Feature.BATCH_INVARIANT} & subject.features),
        )
        self._seed = plan.seed_of(f"{subject.offer.contribution}/{self.title}")

    @cached_property
    def _steps(self) -> list[_DispatchedStep]:
        """Two steps of unlike numbers of tokens, and the first again."""
        rows = _ROWS[self._row["rows"]][: self.world]
        first = self._draw(self._seed, rows)
        return [first, self._draw(self._seed + 1, tuple(reversed(rows))), first]

    def _draw(self, seed: int, rows: tuple[int, ...]) -> _DispatchedStep:
        generator, tokens, routes = torch.Generator().manual_seed(seed), sum(rows), self._row["routes"]
        first = self._experts // self.world * (self.world - 1) if routes == "one-rank" else 0
        choices = self._experts - first
        ids = torch.rand(tokens, choices, generator=generator).argsort(-1)[:, : self._top_k] + first
        share = {"some-absent": 0.4, "all-absent": 1.0}.get(routes, 0.0)
        ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < share, -1).to(torch.int32)
        weights = draw_router_weights(ids.shape, generator)
        x, scales = torch.randn(tokens, _HIDDEN, generator=generator).to(self._dtype), None
        if self._row["travels"] == "int8":
            scales = torch.rand(tokens, 1, generator=generator) + 0.5
            x = torch.randint(-127, 128, x.shape, generator=generator, dtype=torch.int8)
        return _DispatchedStep(x, scales, ids, weights, rows, bool(getattr(self.subject.target, "replicated", False)))

    @cached_property
    def _functions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Factor and offset of every expert, [E, 1] each, float64."""
        number = torch.arange(self._experts, dtype=torch.float64)[:, None]
        return 0.5 + number / 7, (number - 3) / 5

    def _expect(self, step: _DispatchedStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all tokens [T, H]: the dense layer with results rounded as ranks round theirs, and in float64."""
        factor, offset = self._functions
        x = step.x.double() if step.scales is None else step.x.double() * step.scales.double()
        true = torch.zeros_like(x)
        of_ranks = torch.zeros(self.world, *x.shape, dtype=torch.float64)
        for place in range(self._top_k):
            ids = step.ids[:, place].long()
            here = (ids >= 0)[:, None]
            made = (x * factor[ids.clamp(min=0)] + offset[ids.clamp(min=0)]) * step.weights[:, place, None].double()
            true += torch.where(here, made, 0.0)
            for rank in range(self.world):
                mine = here & (ids // (self._experts // self.world) == rank)[:, None]
                of_ranks[rank] += torch.where(mine, made, 0.0)
        rounded = of_ranks.to(self._dtype)
        orders = [sum_in(rounded.roll(shift, 0)) for shift in range(self.world)]
        return worst(true, orders), true

    def _experts_of(self, rank: int, sent: Dispatched) -> torch.Tensor:
        """Return the output of this rank's experts for its tokens; weighted and summed where that is their task."""
        own = self._experts // self.world
        factor, offset = (f[rank * own : (rank + 1) * own].to(sent.x.device, torch.float32) for f in self._functions)
        x = sent.x.float() if sent.scales is None else sent.x.float() * sent.scales
        if sent.counts is not None:
            made = x * factor[:, None] + offset[:, None]
            meant = torch.arange(x.shape[1], device=x.device) < sent.counts[:, None]
            return torch.where(meant[..., None], made, float("nan")).to(self._dtype)
        assert sent.ids is not None
        assert sent.weights is not None
        out = torch.zeros_like(x)
        for place in range(sent.ids.shape[1]):
            ids = sent.ids[:, place].long()
            made = (x * factor[ids.clamp(min=0)] + offset[ids.clamp(min=0)]) * sent.weights[:, place, None]
            out += torch.where((ids >= 0)[:, None], made, 0.0)
        return out.to(self._dtype)

    @cached_property
    def _seen(self) -> list[_Seen]:
        steps = self._steps
        if self.world == 1:
            return together(1, lambda rank: self._act(self._alone(), rank, steps), lambda: None)
        workload = CommunicatorWorkload(dtype=self._row["dtype"], parallel="ep", ranks=self.world)
        group = CommunicatorGroup(self.subject, TorchDistributed, workload)
        return group.run(lambda member: self._act(self._among(member), member.rank, steps, member))

    def _alone(self) -> Context:
        site = self.subject.site
        return site.context(self._dtype, device=device_of(site, 0))

    def _among(self, member: Member) -> Context:
        """The build context of a rank whose experts are divided among a group's."""
        groups = alone()
        ep = Group("ep", tuple(range(member.world)), member.rank, [(None, member.communicator)])
        parallel = replace(member.context.parallel, tp=ep, ep=ep, expert_tp=groups.expert_tp)
        return replace(self.subject.site.context(self._dtype, device=member.device), parallel=parallel)

    def _act(
        self, context: Context, rank: int, steps: Sequence[_DispatchedStep], member: Member | None = None
    ) -> _Seen:
        made: All2All = self.subject.target(context.for_plugin(self.subject.offer.plugin), self.workload)
        resources = cast(TrialResources, context.resources)
        resources.allocate_collective(context.torch_device)
        resources.allocate(context.torch_device)
        if member is None or not isinstance(made, GroupMember):
            return self._go(made, context, rank, steps)
        try:
            made.init(member.store, rank, member.world, "ep")
            seen = self._go(made, context, rank, steps)
            made.close()
        except BaseException:
            made.abort()  # the others wait for this rank
            raise
        return seen

    def _go(self, made: All2All, context: Context, rank: int, steps: Sequence[_DispatchedStep]) -> _Seen:
        """The steps of one rank, which has joined its group."""
        seen = _Seen([], [])
        where = f"rank {rank}"

        def fault(check: str, code: str, message: str) -> None:
            seen.faults.append((check, Fault(code, where, message)))

        most = max(step.most for step in steps)
        for number, step in enumerate(steps):
            x, scales, ids, weights = step.of(rank, context.torch_device)
            sent = made.dispatch(x, scales, ids, weights)
            for message in self._wrong(made, sent, most):
                fault("dispatch", "dispatched", message)
            for name, now, drawn in zip(
                ("x", "ids", "weights"), (x, ids, weights), (step.x, step.ids, step.weights), strict=True
            ):
                if not torch.equal(now.cpu(), step.part(drawn, rank)):
                    fault("inputs", "mutated", f"dispatch has changed {name}")
            y = self._experts_of(rank, sent)
            # The contract lets the result be written to the tokens themselves where these were dispatched as they are.
            is_in_place = number == 2 and sent.x is x and x.dtype == self._dtype
            out = (
                x
                if is_in_place
                else torch.full((x.shape[0], _HIDDEN), float("nan"), dtype=self._dtype, device=x.device)
            )
            made.combine(y.clone(), sent.handle, out)
            for name, now, drawn in zip(("ids", "weights"), (ids, weights), (step.ids, step.weights), strict=True):
                if not torch.equal(now.cpu(), step.part(drawn, rank)):
                    fault("inputs", "mutated", f"combine has changed {name}")
            seen.results.append(out.cpu().clone())
        try:
            # Ranks that take a dead handle for a living one wait for each other: all of them come here.
            made.combine(y.clone(), sent.handle, torch.empty_like(out))
        except RuntimeError:
            pass
        else:
            fault("handle", "handle", "a handle was combined twice; the second time must raise RuntimeError")
        return seen

    def _wrong(self, made: All2All, sent: Dispatched, tokens: int) -> Iterator[str]:
        """Faults in the form of a dispatch's result."""
        own, received = self._experts // self.world, sent.x.shape[:-1].numel()
        if sent.x.shape[-1] != _HIDDEN:
            yield f"x is {list(sent.x.shape)}; rows of {_HIDDEN} were sent"
        if (sent.scales is not None) != (self._row["travels"] == "int8"):
            yield "scales must come with what was sent with scales, and with nothing else"
        if received > made.most_rows(tokens):
            yield f"{received} rows came, and most_rows({tokens}) says {made.most_rows(tokens)}"
        if made.format == "batched":
            if sent.counts is None or sent.counts.dtype != torch.int32 or list(sent.counts.shape) != [own]:
                yield f"counts must be int32 [{own}], got {sent.counts!r:.80}"
            elif sent.x.shape[0] != own or int(sent.counts.max()) > sent.x.shape[1] or int(sent.counts.min()) < 0:
                yield f"counts of {sent.counts.tolist()} do not fit x {list(sent.x.shape)}"
            return
        if sent.counts is not None:
            yield "counts are of the format batched"
        shape = [received, self._top_k]
        for name, tensor, dtype in (("ids", sent.ids, torch.int32), ("weights", sent.weights, torch.float32)):
            if tensor is None or tensor.dtype != dtype or list(tensor.shape) != shape:
                yield f"{name} must be {dtype} {shape}, got {tensor!r:.80}"
        if sent.ids is not None and sent.ids.numel() and not -1 <= int(sent.ids.min()) <= int(sent.ids.max()) < own:
            yield f"ids count the {own} experts of a rank from 0, got {int(sent.ids.min())} to {int(sent.ids.max())}"

    def values(self) -> Finding:
        """``values``: each token gets what all of its experts make of it, in steps of unlike numbers of tokens."""
        return too_few_devices(self.subject.site, self.world) or self._judge((0, 1))

    def in_place(self) -> Finding:
        """``in-place``: the same where the result goes to the tokens themselves, if these were what was dispatched."""
        return self._judge((2,))

    def _judge(self, numbers: Sequence[int]) -> Finding:
        found = Comparison()
        for number in numbers:
            step = self._steps[number]
            own, true = self._expect(step)
            results = [seen.results[number] for seen in self._seen]
            if step.replicated:
                results = [sum_in(torch.stack(results))]
            for rank, result in enumerate(results):
                where = f"step {number}, rank {rank} of tokens {list(step.rows)}"
                one = compare(where, result, step.part(own, rank), step.part(true, rank), ERRORS, _HOST)
                found.add(one)
        return Finding.of(found)

    def told(self, check: str) -> Finding:
        """``dispatch``, ``inputs``, ``handle``: what ranks noticed on their way."""
        return Finding(tuple(fault for seen in self._seen for name, fault in seen.faults if name == check))

    def repeat(self) -> Finding:
        """``repeat``: the first step again gives equal bits."""
        for rank, seen in enumerate(self._seen):
            if not torch.equal(seen.results[0], seen.results[2]):
                return Finding.failed("repeat", f"rank {rank}", "the same step gives other bits the second time")
        return Finding()


def sum_in(parts: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' [N, T, H] in their order, rounded after each."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
