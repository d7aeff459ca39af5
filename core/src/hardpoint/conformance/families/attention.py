"""Trials of attention backends: every claimed dtype, head size, block size and feature, on every kind of batch.

The truth is ``attend``, the family's definition, in float64, over keys and values as the cache's dtype holds them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import cast

import torch

from hardpoint.conformance.checks import ADVERSARIAL, kernel_checks
from hardpoint.conformance.families.attention_checks import (
    batch_invariant,
    bounds,
    declarations,
    group,
    interleaved,
    sizes,
)
from hardpoint.conformance.families.attention_replay import UNUSED_REQUESTS, replay
from hardpoint.conformance.families.attention_situations import (
    Situation,
    beyond,
    block_sizes,
    factors,
    head_sizes,
    senseless,
)
from hardpoint.conformance.families.cache_layout import keys_and_values, layout_trials
from hardpoint.conformance.families.scaled_cache import clash, scalings, set_scales
from hardpoint.conformance.families.steps import (
    HIGH_SCORE,
    LOW_SCORES,
    Piece,
    PlacedStep,
    Request,
    Tables,
    draw_constants,
    draw_requests,
    draw_tables,
    expectations,
    lay_out,
    pages_to_be_far,
    without_first_row,
)
from hardpoint.conformance.memory import Placement, poison
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Subject, TrialResources, limits_of
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint.context import Context
from hardpoint.ops.error_model import ErrorModel
from hardpoint.ops.judge import Call, Expectation, Expected, Input
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionCall,
    AttentionMetadata,
    CaptureGrade,
    Contribution,
    Feature,
    StepLimits,
    Workload,
)

ERRORS = ErrorModel(scale="row", finest=2.0**-20)
"""The exponentials of vector units, torch's own on CPUs among them, are good to 20 bits or a few more."""
HEIGHTS = {"large": HIGH_SCORE, "low": -min(LOW_SCORES)}
"""How far all scores are from zero. A score of this height, rounded to float32 once, changes its weight by 2^-24 of it.
"""


class AttentionTrials:
    """The generator of causal attention."""

    family = "attention"

    def serves(self, contribution: Contribution) -> bool:
        """All backends of that kind: they share one interface."""
        return contribution.of == "causal"

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """The declarations, the cache layout, then steps."""
        yield Trial("declared", (Check("declarations", partial(declarations, subject), decisive=True),))
        sizes_of_heads = head_sizes(subject, plan)
        yield from layout_trials(subject, plan, block_sizes(subject), keys_and_values(sizes_of_heads))
        given, excludes = factors(subject, sizes_of_heads, plan.seed), dict(senseless(sizes_of_heads))
        if True in scalings(subject):
            given["static_scales"], excludes["kv_dtype", "static_scales"] = scalings(subject), clash
        rows = plan.combinations(given, excludes)
        # Spans in blocks and in tokens may come to the same.
        situations = {situation.title: situation for situation in map(Situation.of, rows)}
        for number, situation in enumerate(situations.values()):
            seed = plan.seed_of(f"{subject.offer.contribution}/{situation.title}")
            yield attention_trial(AttentionProbe(subject, situation, seed), plan, number)


def attention_trial(probe: AttentionProbe, plan: Plan, number: int) -> Trial:
    """Build the trial of a backend in one situation: its checks, or the reason why it is unsupported."""
    title, seed = probe.situation.title, probe.seed
    if reason := probe.subject.refuses(probe.workload):
        return Trial(title, unsupported=reason, workload=probe.workload)
    own: dict[str, Callable[[AttentionProbe, int], Finding]] = {
        "group": group,
        "interleaved": interleaved,
        "sizes": sizes,
    }
    if not getattr(probe.subject.target, "exact_lengths", True):
        own["bounds"] = bounds
    checks = kernel_checks(probe, seed, plan, number, without=("replay",))
    if plan.includes(list(ADVERSARIAL).index("replay"), number):
        checks.append(Check("replay", partial(replay, probe, seed)))
    checks += [Check(name, partial(check, probe, seed)) for name, check in own.items() if plan.includes(number, 0)]
    if Feature.BATCH_INVARIANT in probe.subject.features:
        checks.append(Check("batch-invariant", partial(batch_invariant, probe, seed)))
    checks = [replace(check, run=partial(_within_limits, probe, check.run)) for check in checks]
    return Trial(title, checks, workload=probe.workload)


def _within_limits(probe: AttentionProbe, check: Callable[[], Finding]) -> Finding:
    """Make a check, unless the backend's own limits say that no step is like this."""
    reason = beyond(probe.limits, probe.pieces)
    return Finding(unsupported=reason) if reason else check()


Drawn = tuple[int, tuple[int, ...] | None, int]
"""The key of a call's values: seed, order of rows, layer."""


class AttentionProbe:
    """One backend in one situation. Two layers of it stand in one context, as in a model."""

    allocates = False

    def __init__(self, subject: Subject, situation: Situation, seed: int) -> None:
        """``seed`` draws what the case leaves open; it is the seed of the case's checks."""
        self.subject, self.situation, self.spec, self.seed = subject, situation, situation.spec, seed
        self.pieces = situation.pieces(subject.tokens, seed)
        self._expected: dict[Drawn, Expected] = {}

    @property
    def workload(self) -> Workload:
        """The workload that selects a backend."""
        return self.spec.workload()

    @cached_property
    def context(self) -> Context:
        """The build context of the layers."""
        spec, pieces = self.spec, self.pieces
        limits = limits_of(
            tokens=sum(piece.query for piece in pieces) + self.situation.padding,
            requests=len(pieces) + UNUSED_REQUESTS,
            length=max(piece.total for piece in pieces) + 2 * spec.block_size,  # of replays and bounds
        )
        return self.subject.site.context(spec.dtype, kv_dtype=spec.kv_dtype, block_size=spec.block_size, limits=limits)

    @cached_property
    def layers(self) -> tuple[AttentionBackend, AttentionBackend]:
        """Two layers of one group, each with constants of its own."""
        ctx = self.context.for_plugin(self.subject.offer.plugin)
        made = cast(
            "tuple[AttentionBackend, AttentionBackend]", tuple(self.subject.target(ctx, self.spec) for _ in range(2))
        )
        self.context.resources.allocate(self.subject.site.device)
        for number, (layer, constants) in enumerate(zip(made, self.constants, strict=True)):
            set_scales(layer, self.subject.site.device, number)
            layer.set_head_constants(*(None if x is None else x.to(self.subject.site.device) for x in constants))
        return made

    @cached_property
    def constants(self) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Sinks and slopes of each layer, on the host."""
        generator = torch.Generator().manual_seed(1)
        return [draw_constants(self.spec, generator) for _ in range(2)]

    @cached_property
    def limits(self) -> StepLimits:
        """The limits of a step with this backend on this platform."""
        return self.layers[0].step_limits().intersect(self.subject.site.platform.step_limits())

    def requests(self, seed: int) -> list[Request]:
        """The requests of a seed."""
        generator = torch.Generator().manual_seed(seed)
        return draw_requests(self.spec, self.pieces, generator, self.situation.values, self._shared)

    @property
    def first_is_undefined(self) -> bool:
        """Whether the first query holds a NaN: what becomes of it, the contract leaves open."""
        return self.situation.values == "nan"

    @property
    def _shared(self) -> int:
        """Positions of a common beginning, in whole blocks: about half of the longest context."""
        block = self.spec.block_size
        longest = max(piece.total - piece.query for piece in self.pieces)
        return max(block, longest // 2 // block * block) if self.situation.shared else 0

    def step(
        self,
        seed: int,
        requests: Sequence[Request],
        placement: Placement,
        far: str | None,
        layer: int = 0,
        room: Sequence[Sequence[Piece]] = (),
    ) -> PlacedStep:
        """Lay a step out, for one of the layers, in arrays that have ``room`` for steps of these requests, too."""
        backend, site = self.layers[layer], self.subject.site
        pages = pages_to_be_far(backend.layout, backend.cache_spec, self.spec.block_size) if far == "cache" else 0
        generator = torch.Generator().manual_seed(seed + 1)
        tables: Tables = draw_tables(self.spec, self.pieces, generator, self._shared, pages, room)
        buckets = self.limits.token_buckets
        tokens = sum(piece.query for piece in self.pieces)
        padding = next((b - tokens for b in buckets if b >= tokens), self.situation.padding)
        return lay_out(
            backend,
            self.pieces,
            requests,
            tables,
            site.device,
            placement=placement,
            far=far,
            padding=padding,
            slack=self.situation.slack * max(backend.layout.alignment, 16),
            free_bytes=site.free_bytes if far else 0,
        )

    def reshaped(self, pieces: tuple[Piece, ...]) -> AttentionProbe:
        """A probe of the same layers whose steps hold other requests."""
        assert self.layers  # which the copy then shares
        other = copy.copy(self)
        other.pieces, other._expected = pieces, {}
        return other

    def outputs(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The part of each request in ``out`` [T, H, D], without the query that nothing is expected of."""
        rows = sum(piece.query for piece in self.pieces)
        first, *rest = out[:rows].split([piece.query for piece in self.pieces])
        return (first[1:] if self.first_is_undefined else first, *rest)

    def expected(
        self, requests: Sequence[Request], layer: int, held: Sequence[tuple[torch.Tensor, torch.Tensor]] | None
    ) -> Sequence[Expectation]:
        """Return what is expected of each request's ``outputs``, the first query included; ``held`` as PlacedStep's."""
        return expectations(self.spec, requests, self.pieces, *self.constants[layer], held)

    def call(
        self,
        seed: int,
        placement: Placement = Placement.AS_DRAWN,
        *,
        far: str | None = None,
        order: Sequence[int] | None = None,
        layer: int = 0,
    ) -> Call:
        """See Probe. ``layer`` says which of the two."""
        requests = self.requests(seed)
        if order is not None:
            rows = torch.cat([r.q for r in requests])[torch.tensor(order)]
            parts = rows.split([piece.query for piece in self.pieces])
            requests = [replace(r, q=q) for r, q in zip(requests, parts, strict=True)]
        drawn = (seed, None if order is None else tuple(order), layer)
        step, backend = self.step(seed, requests, placement, far, layer), self.layers[layer]
        return self.call_of(step, requests, lambda: backend.plan(step.batch), drawn, whole=far != "cache")

    def call_of(
        self,
        step: PlacedStep,
        requests: Sequence[Request],
        plan: Callable[[], AttentionMetadata],
        drawn: Drawn,
        whole: bool = True,
    ) -> Call:
        """The call of a step that is laid out; ``plan`` makes its metadata, ``drawn`` is what ``requests`` are from."""
        layer = drawn[2]
        backend, planned = self.layers[layer], list[AttentionMetadata]()

        def make_plan() -> object:
            planned[:] = [plan()]
            return planned[0].token

        def forward() -> object:
            backend.forward(AttentionCall(step.q, step.k, step.v, step.cache, planned[0], step.out))
            return self.outputs(step.out)

        def expect() -> Expected:
            if drawn not in self._expected:  # most checks of a trial draw the same inputs
                first, *rest = self.expected(requests, layer, step.held)
                first = without_first_row(first) if self.first_is_undefined else first
                self._expected[drawn] = Expected((first, *rest))
            return self._expected[drawn]

        def before() -> None:
            poison([step.out])
            cast(TrialResources, self.context.resources).spoil()

        batch = step.batch
        tensors = {"q": step.q, "k": step.k, "v": step.v, "out": step.out, **({"cache": step.buffer} if whole else {})}
        tensors |= {n: getattr(batch, n) for n in ("query_start", "seq_lens", "block_table", "slot_mapping")}
        return Call(
            inputs=tuple(Input(name, name, x) for name, x in tensors.items()),
            plan=make_plan,
            run=forward,
            idle=partial(self.outputs, step.out),
            before=before,
            expect=expect,
            errors=replace(ERRORS, finest=max(ERRORS.finest, HEIGHTS.get(self.situation.values, 0.0) * 2.0**-24)),
            mutates=frozenset({"out"}),
            aliases=frozenset((i, "out") for i in range(len(self.pieces))),
        )

    def num_rows(self, call: Call) -> int:
        """The tokens of the step."""
        return sum(piece.query for piece in self.pieces) if self.situation.padding == 0 else 0

    def not_recorded(self) -> str | None:
        """By the grade that the backend claims: single-token steps, steps of as many tokens per request, or any."""
        grade = self.layers[0].capture
        counts = {piece.query for piece in self.pieces}
        recorded = {
            CaptureGrade.NEVER: False,
            CaptureGrade.SINGLE_TOKEN: counts == {1},
            CaptureGrade.UNIFORM: len(counts) == 1,
            CaptureGrade.ANY: True,
        }[grade]
        return None if recorded else f"its steps are not captured: 'capture' is CaptureGrade.{grade.name}"

    def far_inputs(self, call: Call) -> Sequence[str]:
        """The cache always; queries where there are several."""
        return ("cache", *(["q"] if call.inputs[0].tensor.shape[0] > 1 else []))
