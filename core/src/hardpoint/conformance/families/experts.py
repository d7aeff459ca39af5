"""Trials of experts kernels: every claimed dtype, pair of specs, activation and format, on every kind of routing.

The truth is the family's reference in float64 on the host. A kernel is tried between core's own prepare and finalize,
so that kernels of both formats, and those that leave the weighting to core, are all held to the same results.

Axes: T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch.nn import functional

from hardpoint.conformance.checks import ADVERSARIAL, kernel_checks
from hardpoint.conformance.families.linear import summed_one_by_one
from hardpoint.conformance.families.ops import batch_invariant
from hardpoint.conformance.families.router_weights import draw_router_weights
from hardpoint.conformance.families.specs import ClaimedSpecs, Pair, claimed_specs, pair_of, static_scales
from hardpoint.conformance.families.steps import worst
from hardpoint.conformance.memory import POISON, Placement, place, soil_allocator
from hardpoint.conformance.plan import Exclusions, Plan, Row
from hardpoint.conformance.site import Subject, TrialResources
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint.context import Context
from hardpoint.dtypes import dtype_of
from hardpoint.experts.middle import is_gated, names
from hardpoint.experts.prepare_finalize import AnyExpertsKernel, PrepareFinalize
from hardpoint.numerics import quantize_weight
from hardpoint.ops.comparison import Comparison
from hardpoint.ops.error_model import ErrorModel
from hardpoint.ops.judge import Call, Expectation, Expected, Input, judge_call
from hardpoint.reference.experts import ReferenceExperts
from hardpoint.reference.local_all2all import LocalAll2All, LocalBatches
from hardpoint_plugin_api import (
    All2AllWorkload,
    Contribution,
    ExpertsCall,
    ExpertsWorkload,
    Feature,
    QuantSpec,
)
from hardpoint_plugin_api.experts import MATRICES

ERRORS = ErrorModel(finest=2.0**-20)
"""Hardware approximates the exponentials of activations."""

_HOST = torch.device("cpu")
_EVALUATIONS = 8
_BATCHES = {"one": 1, "few": 7, "many": 150, "none": 0}
_BORDERS = (1, 2, 3, 5, 6, 15, 16, 17, 31, 33, 63, 65, 127, 129)
"""Steps about the edges of tiles; with one expert these are the tiles' rows."""
_MIXTURES = {"8x2": (8, 2), "60x4": (60, 4), "5x5": (5, 5), "1x1": (1, 1)}
_WIDTHS = {
    "even": (128, 64),
    "odd": (34, 58),
    "wide": (160, 224),
    "long": (4224, 64),
    "long-inner": (72, 4224),
    "tiled": (640, 384),
    "blocks": (512, 256),
}
"""Hidden and intermediate sizes. Long ones are sums of more than 4,096 products, of the first matrix and the second;
the last are whole blocks of 256 columns, as GGUF's K types have."""
_BLOCKS_OF_W13 = {"blocks-of-w13": (256, 96)}
"""Whole blocks of 256 columns in the first matrix alone, for kernels that take another spec in the second."""
_ALIKE = "w2-alike"
_W2 = {_ALIKE: 0, "w2-next": 1, "w2-second-next": 2}
"""How far w2's specs are behind w13's in the list of claimed ones: each meets two others in each matrix, however many
are claimed."""
_ABSENT = {"here": 0.0, "some-elsewhere": 0.4, "all-elsewhere": 1.0}
"""How many of a token's experts are on other ranks."""
_OTHER_PARAMETERS = "swiglu_oai(1.25,2.0)"
"""An activation with other parameters than its usual ones: most numbers of the middle are clamped."""
_LARGEST_OF_ROW = 8.0
"""How much larger the largest of the middle's numbers is than their root mean square, at most."""


class ExpertsTrials:
    """The generator of the family ``experts``."""

    family = "experts"

    def serves(self, contribution: Contribution) -> bool:
        """Every kernel: all share one interface."""
        return True

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """Combinations of what is claimed and what every kernel must cope with."""
        usual = partial(
            ExpertsWorkload,
            activation=next(iter(subject.claimed("activation") or names())),
            format=next(iter(subject.claimed("format") or ("standard",))),
            num_experts=8,
            top_k=2,
            hidden_size=256,
            intermediate_size=256,
        )
        claims = claimed_specs(subject, plan, [usual])
        yield from claims.untried()
        if not claims.served:
            return
        is_mixed = Feature.W2_SPEC in subject.features
        few: Exclusions = {
            ("dtype", "spec"): claims.is_foreign,
            ("absent", "widths"): lambda absent, widths: absent == "all-elsewhere" and "long" in widths,
            ("batch", "mixture"): lambda batch, mixture: (batch, mixture) == ("many", "60x4"),
            ("mixture", "widths"): lambda mixture, widths: mixture == "60x4" and "long" in widths,
            **(_mixed_exclusions(claims) if is_mixed else _exclusions(claims.pairs)),
        }
        factors: dict[str, Sequence[Any]] = {
            "dtype": claims.dtypes,
            "spec": tuple(claims.served),
            "activation": tuple(subject.claimed("activation") or (*names(), _OTHER_PARAMETERS)),
            "format": tuple(subject.claimed("format") or ("standard",)),
            "batch": tuple(_BATCHES),
            "mixture": tuple(_MIXTURES),
            "widths": (*_WIDTHS, *(_BLOCKS_OF_W13 if is_mixed else ())),
            "absent": tuple(_ABSENT),
            "bias": ("bias", "no-bias") if Feature.EXPERT_BIAS in subject.features else ("no-bias",),
            **({"w2": tuple(_W2)} if is_mixed else {}),
        }
        seen: set[tuple[Any, ...]] = set()
        for number, row in enumerate(plan.combinations(factors, few)):
            key = (row["dtype"], row["spec"], row["widths"])
            yield _trial(ExpertsProbe(subject, row, claims.pairs), plan, number, with_sizes=key not in seen)
            seen.add(key)


def _exclusions(pairs: Mapping[str, Pair]) -> Exclusions:
    """Sizes that the specs of both matrices do not divide."""
    return {("spec", "widths"): lambda spec, widths: _do_not_fit(pairs, spec, _ALIKE, widths)}


def _mixed_exclusions(claims: ClaimedSpecs) -> Exclusions:
    """The same where w2 may have specs of its own; also pairs that are w13's, or not claimed in the dtype."""
    pairs = claims.pairs
    return {
        ("spec", "w2"): lambda spec, w2: w2 != _ALIKE and _of_w2(pairs, spec, w2) == spec,
        ("dtype", "spec", "w2"): lambda dtype, spec, w2: claims.is_foreign(dtype, _of_w2(pairs, spec, w2)),
        ("spec", "w2", "widths"): partial(_do_not_fit, pairs),
    }


def _of_w2(pairs: Mapping[str, Pair], spec: str, w2: str) -> str:
    """The name of w2's specs where w13's is ``spec``; plain weights stand beside plain ones."""
    names = list(pairs)
    return names[(names.index(spec) + _W2[w2]) % len(names)] if spec in pairs else spec


def _do_not_fit(pairs: Mapping[str, Pair], spec: str, w2: str, widths: str) -> bool:
    """Whether a row of either matrix would end within what its specs keep together."""
    names, sizes = (spec, _of_w2(pairs, spec, w2)), (_WIDTHS | _BLOCKS_OF_W13)[widths]
    return any(_cuts(pairs.get(name), columns) for name, columns in zip(names, sizes, strict=True))


def _cuts(pair: Pair | None, columns: int) -> bool:
    """Whether so many columns end within a unit of storage, a group (no kernel has such) or an outer block."""
    if pair is None:
        return False
    group = max(1, pair[0].scales[0].block[1] if pair[0].scales[0].block[0] == 1 else 1)
    unit = max(pair[0].per_byte, *(scale.block[1] for scale in pair[0].scales[1:] if scale.block[0] == 1), 1)
    return columns % unit > 0 or (columns % group > 0 and columns > group)


def _trial(probe: ExpertsProbe, plan: Plan, number: int, *, with_sizes: bool) -> Trial:
    if reason := probe.subject.refuses(probe.workload):
        return Trial(probe.title, unsupported=reason, workload=probe.workload)
    seed = plan.seed_of(f"{probe.subject.offer.contribution}/{probe.title}")
    is_empty = probe.has_no_results
    checks = kernel_checks(probe, seed, plan, number, without=tuple(ADVERSARIAL) if is_empty else ())
    if with_sizes:
        checks.append(Check("sizes", partial(sizes, probe, seed)))
        checks.append(Check("extremes", partial(extremes, probe, seed)))
        checks.append(Check("instances", partial(instances, probe, seed)))
    if Feature.BATCH_INVARIANT in probe.subject.features and not is_empty:
        checks.append(Check("batch-invariant", partial(batch_invariant, probe, seed, has_rows=True)))
    return Trial(probe.title, checks, workload=probe.workload)


@dataclass(frozen=True)
class Drawn:
    """The inputs of one seed, on the host: x [T, H], ids and weights [T, K]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def rows(self, index: torch.Tensor | slice) -> Drawn:
        """Some of the tokens."""
        return Drawn(self.x[index], self.ids[index], self.weights[index])


class _Float32Experts(ReferenceExperts):
    """The reference, whose products are summed in float32 at least, and rounded once to the activations' dtype.

    With a ``nudge``, each number of the first product is off by as much as a kernel's may be, upwards or downwards: in
    nudges 1 and 2 in opposite directions, and so in 3 and 4. A number that lies that near to where its code changes has
    the other code in one of the two.
    """

    nudge = 0

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = self.product(x.to(wide), weight.to(wide))
        if self.nudge and name == "w13":
            size = y.abs()
            if x.dtype == torch.float32:  # the error of a sum of n numbers grows with the root of n
                size += size.mean(-1, keepdim=True) * (x.shape[1] ** 0.5 / 4)
            upwards = torch.rand(y.shape, generator=torch.Generator().manual_seed((self.nudge + 1) // 2)) < 0.5
            y += torch.finfo(x.dtype).eps * torch.where(upwards == (self.nudge % 2 == 1), size, -size)
        return y.to(x.dtype)

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [T, columns] times weight [rows, columns]."""
        return functional.linear(x, weight)


class _OneByOneExperts(_Float32Experts):
    """Each product is added to the sum of those before it, as a kernel may whose threads have a result each."""

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return summed_one_by_one(x, weight)


class ExpertsProbe:
    """One kernel in one situation. Its weights are the same for every seed: they are packed once."""

    allocates = True

    def __init__(self, subject: Subject, row: Row, pairs: Mapping[str, Pair], *, weights: int = 1) -> None:
        """``pairs`` are those of specs by name, ``weights`` is the seed of the experts' weights."""
        self.subject, self._row, self._pairs, self._weights_seed = subject, row, pairs, weights
        self.title = "/".join(str(value) for value in row.values())
        self._experts, self._top_k = _MIXTURES[row["mixture"]]
        self._hidden, self._width = (_WIDTHS | _BLOCKS_OF_W13)[row["widths"]]
        is_mixed, of_w2 = row.get("w2", _ALIKE) != _ALIKE, _of_w2(pairs, row["spec"], row.get("w2", _ALIKE))
        self.workload = ExpertsWorkload(
            dtype=row["dtype"],
            spec=pair_of(pairs, row["spec"], row["dtype"]),
            w2_spec=pair_of(pairs, of_w2, row["dtype"]) if is_mixed else None,
            activation=row["activation"],
            routing="topk_softmax",
            parallel="none" if row["absent"] == "here" else "ep",
            format=row["format"],
            num_experts=self._experts,
            top_k=self._top_k,
            hidden_size=self._hidden,
            intermediate_size=self._width,
            features=frozenset({Feature.BATCH_INVARIANT} & subject.features)
            | ({Feature.EXPERT_BIAS} if row["bias"] == "bias" else frozenset())
            | ({Feature.W2_SPEC} if is_mixed else frozenset()),
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
        drawn = self.draw(seed, _BATCHES[self._row["batch"]])
        if order is not None:
            drawn = drawn.rows(torch.tensor(order))
        return self.call_of(drawn, lambda: self.expect(drawn), placement)

    def call_of(self, drawn: Drawn, expect: Callable[[], Expected], placement: Placement = Placement.AS_DRAWN) -> Call:
        """The call with inputs ``drawn``, which are on the host."""
        device = self.subject.site.device
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
            expect=expect,
            errors=self.errors,
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

    def draw(self, seed: int, tokens: int) -> Drawn:
        """The inputs of a seed."""
        generator, experts = torch.Generator().manual_seed(seed), self._experts
        x = torch.randn(tokens, self._hidden, generator=generator).to(dtype_of(self._row["dtype"]))
        ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, : self._top_k]
        away = torch.rand(ids.shape, generator=generator) < _ABSENT[self._row["absent"]]
        weights = draw_router_weights(ids.shape, generator)
        return Drawn(x, ids.masked_fill(away, -1).to(torch.int32), weights)

    @cached_property
    def _weights(self) -> Mapping[str, torch.Tensor]:
        """The slots as loaded, on the host."""
        assert self.workload.activation is not None
        dtype = dtype_of(self._row["dtype"])
        generator = torch.Generator().manual_seed(self._weights_seed)
        rows = self._width * (2 if is_gated(self.workload.activation) else 1)
        slots: dict[str, torch.Tensor] = {}
        for name, shape in {"w13": (rows, self._hidden), "w2": (self._hidden, self._width)}.items():
            drawn = torch.randn(self._experts, *shape, generator=generator) * shape[1] ** -0.5
            spec, activation = self._specs(name)
            each = [{"weight": w.to(dtype)} if spec.is_plain else quantize_weight(w, spec) for w in drawn]
            each = [one | static_scales(activation) for one in each]
            slots |= {f"{name}.{slot}": torch.stack([one[slot] for one in each]) for slot in each[0]}
            if self._row["bias"] == "bias":
                slots[f"{name}.bias"] = torch.randn(self._experts, shape[0], generator=generator).to(dtype)
        return slots

    def expect(self, drawn: Drawn) -> Expected:
        """The truth, and the reference's own.

        Where activations are rounded to few bits on the way, that is the worst of several whose first product is off by
        roundings: which of its elements end at another code is luck, and a code is many roundings.
        """
        dtype, true = dtype_of(self._row["dtype"]), self._reference(drawn, torch.float64)
        count = 1 if self._specs("w2")[1].is_plain else _EVALUATIONS
        evaluations = [self._reference(drawn, dtype, _Float32Experts, nudge) for nudge in range(count)]
        if dtype == torch.float32:
            evaluations.append(self._reference(drawn, dtype, _OneByOneExperts))
        return Expected((Expectation("output 0", worst(true, evaluations), true),))

    def _reference(
        self, drawn: Drawn, dtype: torch.dtype, kind: type[_Float32Experts] | None = None, nudge: int = 0
    ) -> torch.Tensor:
        """By a reference of that kind in ``dtype``."""
        ctx = self.subject.site.context(dtype, device=_HOST)
        is_plain = self._specs("w13")[0].is_plain
        w = {
            name: value.to(dtype) if is_plain or name.endswith(".bias") else value
            for name, value in self._weights.items()
        }
        out = torch.empty(drawn.x.shape, dtype=dtype)
        reference = (kind or _Float32Experts)(ctx, self.workload)
        reference.nudge = nudge
        scratch = torch.empty(0, dtype=torch.uint8)
        reference.apply(ExpertsCall(drawn.x.to(dtype), drawn.ids, drawn.weights, w, out, scratch))
        return out

    @property
    def errors(self) -> ErrorModel:
        """In float32, units no finer than what one code makes of a row: seldom does one of the middle's numbers lie
        where a last bit decides between two codes, and then either is right.
        """
        activation = self._specs("w2")[1]
        if activation.is_plain or self._row["dtype"] != "float32":
            return ERRORS
        element = activation.number_format
        widest = max(b - a for a, b in pairwise(element.values))
        one_code = _LARGEST_OF_ROW * widest / element.largest / self._width**0.5
        return replace(ERRORS, finest=max(ERRORS.finest, one_code / 2))

    @property
    def rows_share_a_scale(self) -> bool:
        """Whether how a row of activations is rounded depends on the others."""
        return any(scale.block[0] == -1 for spec in self.rounded_by if not spec.static for scale in spec.scales)

    @property
    def rounded_by(self) -> list[QuantSpec]:
        """How the inputs of both matrices are rounded; without those that stay as they are."""
        return [spec for spec in (self._specs(name)[1] for name in MATRICES) if not spec.is_plain]

    def _specs(self, name: str) -> tuple[QuantSpec, QuantSpec]:
        """The specs of weight and input of the matrix ``name``, w13 or w2."""
        specs = self.workload.spec_of(name)
        assert specs is not None
        return specs

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

    def alike(self, *, weights: int = 1) -> ExpertsProbe:
        """A probe of another instance, with weights of its own."""
        return ExpertsProbe(self.subject, self._row, self._pairs, weights=weights)

    def take_weights(self, other: ExpertsProbe) -> None:
        """Replace the packed weights, at their addresses, by those of ``other``, packed by this kernel."""
        device = self.subject.site.device
        packed = self._kernel.prepack({name: place(value, device) for name, value in other._weights.items()})
        for name, value in packed.items():
            self._packed[name].copy_(value)

    @cached_property
    def _around(self) -> PrepareFinalize:
        kind = LocalBatches if self._row["format"] == "batched" else LocalAll2All
        exchange = All2AllWorkload(dtype=self._row["dtype"], ranks=1, num_experts=self._experts)
        return PrepareFinalize(self._context, kind(self._context, exchange), self._kernel)

    def _scratch_bytes(self, tokens: int) -> int:
        rows = tokens * self._experts if self._row["format"] == "batched" else tokens
        return self._kernel.workspace_bytes(rows)


def sizes(probe: ExpertsProbe, seed: int) -> Finding:
    """``sizes``: one instance serves steps of all sizes about the borders of tiles, small ones first and again last."""
    drawn = probe.draw(seed + 1, _BORDERS[-1])
    (whole,) = probe.expect(drawn).outputs
    middle = torch.randperm(len(_BORDERS), generator=torch.Generator().manual_seed(seed)).tolist()

    def expect(count: int) -> Expected:
        if probe.rows_share_a_scale:
            return probe.expect(drawn.rows(slice(count)))
        return Expected((Expectation(f"{count} tokens", whole.own[:count], whole.truth[:count]),))

    found = Comparison()
    for count in (_BORDERS[0], _BORDERS[-1], *(_BORDERS[i] for i in middle)):
        found.add(judge_call(probe.call_of(drawn.rows(slice(count)), partial(expect, count))))
    return Finding.of(found)


def extremes(probe: ExpertsProbe, seed: int) -> Finding:
    """``extremes``: a token of zeros, one with a NaN, one whose weights are zero: no other may notice."""
    if probe.rows_share_a_scale:
        return Finding.not_claimed("shared-scale", "rows share a scale")
    drawn = probe.draw(seed + 2, 7)
    drawn.x[1], drawn.weights[5] = 0, 0
    if not any(spec.static for spec in probe.rounded_by):  # a NaN has no code of its own
        drawn.x[3, drawn.x.shape[1] // 2] = torch.nan
    return Finding.of(judge_call(probe.call_of(drawn, partial(probe.expect, drawn))))


def instances(probe: ExpertsProbe, seed: int) -> Finding:
    """``instances``: two of one shape keep to their own weights, and one takes new weights where its old ones lay."""
    one, two = probe.alike(), probe.alike(weights=2)
    drawn, found = probe.draw(seed, 7), Comparison()
    for each in (one, two, one):
        found.add(judge_call(each.call_of(drawn, partial(each.expect, drawn))))
    with torch.inference_mode():
        one.take_weights(two)
    found.add(judge_call(one.call_of(drawn, partial(two.expect, drawn))))
    return Finding.of(found)
