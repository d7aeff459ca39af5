"""Trials of experts kernels: every claimed dtype, pair of specs, activation and format, on every kind of routing.

The truth is the family's reference in float64 on the host. A kernel is tried between core's own prepare and finalize,
so that kernels of both formats, and those that leave the weighting to core, are all held to the same results.

Axes: T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch

from hardpoint.conformance.checks import ADVERSARIAL, kernel_checks
from hardpoint.conformance.families.ops import batch_invariant
from hardpoint.conformance.families.specs import SPECS, Specs, pair_of, unclaimed
from hardpoint.conformance.families.steps import worst
from hardpoint.conformance.memory import POISON, Placement, place, soil_allocator
from hardpoint.conformance.plan import Exclusions, Plan, Row
from hardpoint.conformance.site import Subject, TrialResources
from hardpoint.conformance.trials import Check, Trial
from hardpoint.context import Context
from hardpoint.dtypes import dtype_of
from hardpoint.experts.local import LocalAll2All, LocalBatches
from hardpoint.experts.middle import is_gated, names
from hardpoint.experts.prepare_finalize import AnyExpertsKernel, PrepareFinalize
from hardpoint.experts.reference import ReferenceExperts
from hardpoint.ops.error_model import ErrorModel
from hardpoint.ops.judge import Call, Expectation, Expected, Input
from hardpoint.quantization.numerics import quantize_weight
from hardpoint_plugin_api import (
    All2AllWorkload,
    Contribution,
    ExpertsWorkload,
    Feature,
    QuantSpec,
    Scale,
)

ERRORS = ErrorModel(finest=2.0**-20)
"""Hardware approximates the exponentials of activations."""

_HOST = torch.device("cpu")
_EVALUATIONS = 8
_BATCHES = {"one": 1, "few": 7, "many": 150, "none": 0}
_MIXTURES = {"8x2": (8, 2), "60x4": (60, 4), "5x5": (5, 5), "1x1": (1, 1)}
_WIDTHS = {"even": (64, 32), "odd": (34, 58), "wide": (160, 224)}
_ABSENT = {"here": 0.0, "some-elsewhere": 0.4, "all-elsewhere": 1.0}
"""How many of a token's experts are on other ranks."""

_SPECS: Specs = {name: SPECS[name] for name in ("int8-rows", "int8-dynamic", "fp8-tiles")} | {
    "uint4-pairs": (QuantSpec("uint4", scales=(Scale("float32", (1, 2)),), zero_point=True), None),
    "uint4-groups": (QuantSpec("uint4", scales=(Scale("float32", (1, 32)),), zero_point=True), None),
}
"""Groups divide the widths: pairs all of them, those of 32 all but odd ones."""


class ExpertsTrials:
    """The generator of the family ``experts``."""

    family = "experts"

    def serves(self, contribution: Contribution) -> bool:
        """All kernels: they share one interface."""
        return True

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """Combinations of what is claimed and what every kernel must cope with."""
        claims = {spec: unclaimed(subject, _SPECS, spec, ExpertsWorkload) for spec in ("plain", *_SPECS)}
        for spec, reason in claims.items():
            if reason is not None:
                yield Trial(f"spec/{spec}", unsupported=reason)
        few: Exclusions = {
            ("batch", "mixture"): lambda batch, mixture: (batch, mixture) == ("many", "60x4"),
            ("spec", "widths"): lambda spec, widths: (spec, widths) == ("uint4-groups", "odd"),
        }
        factors: dict[str, Sequence[Any]] = {
            "dtype": subject.dtypes(),
            "spec": [spec for spec, reason in claims.items() if reason is None],
            "activation": tuple(subject.claimed("activation") or names()),
            "format": tuple(subject.claimed("format") or ("standard",)),
            "batch": tuple(_BATCHES),
            "mixture": tuple(_MIXTURES),
            "widths": tuple(_WIDTHS),
            "absent": tuple(_ABSENT),
        }
        for number, row in enumerate(plan.combinations(factors, few)):
            yield _trial(ExpertsProbe(subject, row), plan, number)


def _trial(probe: ExpertsProbe, plan: Plan, number: int) -> Trial:
    if reason := probe.subject.refuses(probe.workload):
        return Trial(probe.title, unsupported=reason, workload=probe.workload)
    seed = plan.seed_of(f"{probe.subject.offer.contribution}/{probe.title}")
    is_empty = probe.has_no_results
    checks = kernel_checks(probe, seed, plan, number, without=tuple(ADVERSARIAL) if is_empty else ())
    if Feature.BATCH_INVARIANT in probe.subject.features and not is_empty:
        checks.append(Check("batch-invariant", partial(batch_invariant, probe, seed)))
    return Trial(probe.title, checks, workload=probe.workload)


@dataclass(frozen=True)
class _Drawn:
    """What one seed draws, on the host."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class ExpertsProbe:
    """One kernel in one situation. Its weights are the same for every seed: they are packed once."""

    allocates = True

    def __init__(self, subject: Subject, row: Row) -> None:
        self.subject, self._row = subject, row
        self.title = "/".join(str(value) for value in row.values())
        self._experts, self._top_k = _MIXTURES[row["mixture"]]
        self._hidden, self._width = _WIDTHS[row["widths"]]
        self.workload = ExpertsWorkload(
            dtype=row["dtype"],
            spec=pair_of(_SPECS, row["spec"], row["dtype"]),
            activation=row["activation"],
            routing="topk_softmax",
            parallel="none" if row["absent"] == "here" else "ep",
            format=row["format"],
            num_experts=self._experts,
            top_k=self._top_k,
            hidden_size=self._hidden,
            intermediate_size=self._width,
            features=frozenset({Feature.BATCH_INVARIANT} & subject.features),
        )

    @property
    def has_no_results(self) -> bool:
        """Whether there is no token, or none with an expert here."""
        return bool(self._row["batch"] == "none" or self._row["absent"] == "all-elsewhere")

    def call(
        self,
        seed: int,
        placement: Placement = Placement.AS_DRAWN,
        *,
        far: str | None = None,
        order: Sequence[int] | None = None,
    ) -> Call:
        """See Probe. Inputs are contiguous, by the contract."""
        drawn, device = self._draw(seed), self.subject.site.device
        if order is not None:
            index = torch.tensor(order)
            drawn = _Drawn(drawn.x[index], drawn.ids[index], drawn.weights[index])
        at = Placement.AS_DRAWN if placement is Placement.APART else placement
        x, ids, weights = (place(value, device, at) for value in (drawn.x, drawn.ids, drawn.weights))
        scratch = torch.empty(self._scratch_bytes(x.shape[0]), dtype=torch.uint8, device=device)
        around, w = self._around, self._packed

        def before() -> None:
            scratch.fill_(POISON)
            soil_allocator([x])
            cast(TrialResources, self._context.resources).spoil()

        return Call(
            inputs=(
                *(Input(n, n, v) for n, v in {"x": x, "ids": ids, "weights": weights}.items()),
                *(Input("w", f"w[{name}]", value) for name, value in w.items()),
            ),
            run=lambda: around.run(x, ids, weights, w, scratch),
            expect=lambda: self._expect(drawn),
            errors=ERRORS,
            idle=lambda: torch.full_like(x, float("nan")),
            before=before,
        )

    def num_rows(self, call: Call) -> int:
        """The tokens."""
        return _BATCHES[self._row["batch"]]

    def not_recorded(self) -> str | None:
        """Kernels are recorded with the steps that call them."""
        return None if self._kernel.capturable else "the kernel says capturable = False"

    def far_inputs(self, call: Call) -> Sequence[str]:
        """None: inputs are contiguous, and that many tokens or experts would fill most memories."""
        return ()

    def _draw(self, seed: int) -> _Drawn:
        generator = torch.Generator().manual_seed(seed)
        tokens, experts = _BATCHES[self._row["batch"]], self._experts
        x = torch.randn(tokens, self._hidden, generator=generator).to(dtype_of(self._row["dtype"]))
        ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, : self._top_k]
        away = torch.rand(ids.shape, generator=generator) < _ABSENT[self._row["absent"]]
        weights = torch.rand(ids.shape, generator=generator) + 0.1
        return _Drawn(x, ids.masked_fill(away, -1).to(torch.int32), weights)

    @cached_property
    def _weights(self) -> Mapping[str, torch.Tensor]:
        """The slots as loaded, on the host."""
        assert self.workload.spec is not None
        assert self.workload.activation is not None
        spec, dtype = self.workload.spec[0], dtype_of(self._row["dtype"])
        generator = torch.Generator().manual_seed(1)
        rows = self._width * (2 if is_gated(self.workload.activation) else 1)
        slots: dict[str, torch.Tensor] = {}
        for name, shape in {"w13": (rows, self._hidden), "w2": (self._hidden, self._width)}.items():
            drawn = torch.randn(self._experts, *shape, generator=generator) * shape[1] ** -0.5
            each = [{"weight": w.to(dtype)} if spec.is_plain else quantize_weight(w, spec) for w in drawn]
            slots |= {f"{name}.{slot}": torch.stack([one[slot] for one in each]) for slot in each[0]}
        return slots

    def _expect(self, drawn: _Drawn) -> Expected:
        """The truth, and the reference's own.

        Where activations are rounded to few bits on the way, that is the worst of several whose first product is off by
        up to a rounding: which of its elements end at another code is luck, and a code is many roundings.
        """
        assert self.workload.spec is not None
        dtype, true = dtype_of(self._row["dtype"]), self._reference(drawn, torch.float64)
        count = 1 if self.workload.spec[1].is_plain else _EVALUATIONS
        own = worst(true, [self._reference(drawn, dtype, nudge) for nudge in range(count)])
        return Expected((Expectation("output 0", own, true),))

    def _reference(self, drawn: _Drawn, dtype: torch.dtype, nudge: int = 0) -> torch.Tensor:
        """In ``dtype``; with a ``nudge``, each row of the first weight a little longer or shorter, another way each."""
        ctx = self.subject.site.context(dtype, device=_HOST)
        assert self.workload.spec is not None
        is_plain = self.workload.spec[0].is_plain
        w = {name: value.to(dtype) if is_plain else value for name, value in self._weights.items()}
        if nudge:
            name = "w13.weight" if is_plain else "w13.weight_scale"
            rows = torch.rand(w[name].shape[:2], generator=torch.Generator().manual_seed(nudge)) - 0.5
            factor = 1 + torch.finfo(dtype).eps * rows
            w[name] = (w[name] * factor.view(*rows.shape, *[1] * (w[name].dim() - 2))).to(w[name].dtype)
        out = torch.empty(drawn.x.shape, dtype=dtype)
        scratch = torch.empty(0, dtype=torch.uint8)
        ReferenceExperts(ctx, self.workload).apply(drawn.x.to(dtype), drawn.ids, drawn.weights, w, out, scratch)
        return out

    @cached_property
    def _context(self) -> Context:
        alike = Feature.BATCH_INVARIANT in self.workload.features  # and then the kernel's middle has to be as well
        return self.subject.site.context(self._row["dtype"], batch_invariant=alike)

    @cached_property
    def _kernel(self) -> AnyExpertsKernel:
        kernel: AnyExpertsKernel = self.subject.target(
            self._context.for_plugin(self.subject.offer.plugin), self.workload
        )
        self._context.resources.allocate(self.subject.site.device)
        return kernel

    @cached_property
    def _packed(self) -> dict[str, torch.Tensor]:
        device = self.subject.site.device
        return self._kernel.prepack({name: place(value, device) for name, value in self._weights.items()})

    @cached_property
    def _around(self) -> PrepareFinalize:
        kind = LocalBatches if self._row["format"] == "batched" else LocalAll2All
        exchange = All2AllWorkload(dtype=self._row["dtype"], ranks=1, num_experts=self._experts)
        return PrepareFinalize(self._context, kind(self._context, exchange), self._kernel)

    def _scratch_bytes(self, tokens: int) -> int:
        rows = tokens * self._experts if self._row["format"] == "batched" else tokens
        return self._kernel.workspace_bytes(rows)
