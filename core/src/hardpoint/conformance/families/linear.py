"""Trials of linear kernels: every claimed dtype and pair of specs, on widths and batches of several sizes.

The truth is the product in float64 of the dequantized weight and of the activations as their spec rounds them.

Axes: T tokens, N out features, K in features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch.nn import functional

from hardpoint.conformance.checks import ADVERSARIAL, kernel_checks
from hardpoint.conformance.families.ops import batch_invariant
from hardpoint.conformance.families.specs import SPECS, pair_of, unclaimed
from hardpoint.conformance.families.steps import worst
from hardpoint.conformance.memory import Placement, place, place_far, soil_allocator
from hardpoint.conformance.plan import Exclusions, Plan, Row
from hardpoint.conformance.site import Subject, TrialResources
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint.context import Context
from hardpoint.dtypes import dtype_of
from hardpoint.ops.error_model import Comparison, ErrorModel, compare
from hardpoint.ops.judge import Call, Expectation, Expected, Input, judge_call
from hardpoint.ops.quantize_rows import quantize_rows
from hardpoint.quantization.numerics import fake_quantize, quantize_weight, travels
from hardpoint_plugin_api import (
    Contribution,
    Feature,
    LinearKernel,
    LinearWorkload,
    Quantized,
    Reason,
    dequantize,
)

ERRORS = ErrorModel()

_TOKENS = {"one": 1, "few": 7, "many": 130, "none": 0}
_MOST_TOKENS = 1024
"""The ends of a claimed range of tokens are tried up to this."""
_MOST_SIZES = 3
"""Of those that a kernel itself says it is for."""
_WIDTHS = {"even": (96, 64), "odd": (57, 33), "odd-out": (57, 34), "narrow": (3, 64), "wide": (160, 384)}
_EVALUATIONS = 8


class LinearTrials:
    """The generator of the family ``linear``."""

    family = "linear"

    def serves(self, contribution: Contribution) -> bool:
        """All kernels: they share one interface."""
        return True

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """Combinations of what is claimed and what every kernel must cope with."""
        claims = {spec: unclaimed(subject, SPECS, spec, LinearWorkload) for spec in ("plain", *SPECS)}
        for spec, reason in claims.items():
            if reason is not None:
                yield Trial(f"spec/{spec}", unsupported=reason)
        factors: dict[str, Sequence[Any]] = {
            "dtype": subject.dtypes(),
            "spec": [spec for spec, reason in claims.items() if reason is None],
            **_sizes(subject),
            "bias": ("bias", "no-bias"),
        }
        halves: Exclusions = {}
        if "widths" in factors:
            halves = {("spec", "widths"): lambda spec, widths: (spec, widths) == ("uint4-groups", "odd")}
        for number, row in enumerate(plan.combinations(factors, halves)):
            yield _trial(LinearProbe(subject, row), plan, number)


def _sizes(subject: Subject) -> dict[str, Sequence[str]]:
    """The factors that say how large products are: widths, and tokens of the claimed range, or the kernel's own."""
    own = subject.target.trial_sizes(subject.site.platform.info)[:_MOST_SIZES]
    if own:
        return {"size": ["x".join(map(str, size)) for size in own]}
    need = subject.tokens
    named = [name for name, n in _TOKENS.items() if need.min <= max(n, 1) <= (need.max or n + 1)]
    ends = {n for n in (need.min, need.max) if n and n <= _MOST_TOKENS} - {_TOKENS[name] for name in named}
    return {"widths": tuple(_WIDTHS), "tokens": (*named, *map(str, sorted(ends)))}


def _trial(probe: LinearProbe, plan: Plan, number: int) -> Trial:
    if reason := probe.subject.refuses(probe.workload):
        return Trial(probe.title, unsupported=reason, workload=probe.workload)
    seed = plan.seed_of(f"{probe.subject.offer.contribution}/{probe.title}")
    is_empty = not probe.num_tokens
    checks = kernel_checks(probe, seed, plan, number, without=tuple(ADVERSARIAL) if is_empty else ())
    checks.append(Check("unpack", partial(unpack, probe)))
    checks.append(Check("quantized-input", partial(quantized_input, probe, seed)))
    if Feature.BATCH_INVARIANT in probe.subject.features and not is_empty:
        checks.append(Check("batch-invariant", partial(batch_invariant, probe, seed)))
    return Trial(probe.title, checks, workload=probe.workload)


class LinearProbe:
    """One kernel in one situation. Its weights are the same for every seed: they are packed once."""

    allocates = True

    def __init__(self, subject: Subject, row: Row, *, turned: bool = False) -> None:
        """``turned`` exchanges the widths of inputs and outputs."""
        self.subject, self._row = subject, row
        self.title = "/".join(str(value) for value in row.values())
        self.pair = pair_of(SPECS, row["spec"], row["dtype"])
        self.dtype = dtype_of(row["dtype"])
        if "size" in row:
            self.num_tokens, *widths = map(int, row["size"].split("x"))
        else:
            tokens = row["tokens"]
            self.num_tokens = _TOKENS[tokens] if tokens in _TOKENS else int(tokens)
            widths = [*_WIDTHS[row["widths"]]]
        out_features, in_features = reversed(widths) if turned else widths
        self.workload = LinearWorkload(
            dtype=row["dtype"],
            in_features=in_features,
            out_features=out_features,
            spec=self.pair,
            features=frozenset({Feature.BATCH_INVARIANT} & subject.features),
        )

    def call(
        self,
        seed: int,
        placement: Placement = Placement.AS_DRAWN,
        *,
        far: str | None = None,
        order: Sequence[int] | None = None,
    ) -> Call:
        """See Probe."""
        site, w, bias = self.subject.site, self.packed, self.placed_bias
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(self.num_tokens, cast(int, self.workload.in_features), generator=generator).to(self.dtype)
        if order is not None:
            drawn = drawn[torch.tensor(order)]
        x = place_far(drawn, site.device, site.free_bytes) if far else place(drawn, site.device, placement)

        def before() -> None:
            soil_allocator([drawn.new_empty(drawn.shape[0], cast(int, self.workload.out_features))])
            cast(TrialResources, self.context.resources).spoil()

        return Call(
            inputs=(
                Input("x", "x", x),
                *(Input("weights", f"weights[{name}]", value) for name, value in w.items()),
                *([] if bias is None else [Input("bias", "bias", bias)]),
            ),
            run=lambda: self.kernel.apply(x, w, bias),
            expect=lambda: self._expect(drawn),
            errors=ERRORS,
            idle=lambda: x.new_full((x.shape[0], cast(int, self.workload.out_features)), float("nan")),
            before=before,
        )

    def num_rows(self, call: Call) -> int:
        """The tokens."""
        return self.num_tokens

    def not_recorded(self) -> str | None:
        """Matmuls are recorded with the steps that call them."""
        return None if self.subject.capturable else "the target declares capturable = False"

    def far_inputs(self, call: Call) -> Sequence[str]:
        """The activations, where there are several rows."""
        return ("x",) if self.num_tokens > 1 else ()

    def links(self) -> Sequence[Callable[[torch.Tensor], torch.Tensor]] | Reason:
        """See Chained: there and back, by a weight of the same kernel's whose widths are exchanged."""
        back = LinearProbe(self.subject, self._row, turned=True)
        if reason := self.subject.refuses(back.workload):
            return reason
        return [partial(p.kernel.apply, weights=p.packed, bias=p.placed_bias) for p in (self, back)]

    @cached_property
    def context(self) -> Context:
        """The kernel's build context."""
        return self.subject.site.context(self._row["dtype"])

    @cached_property
    def kernel(self) -> LinearKernel:
        """The kernel."""
        made = self.subject.target(self.context.for_plugin(self.subject.offer.plugin), self.workload)
        assert isinstance(made, LinearKernel), f"{self.subject.offer.contribution.target} makes no LinearKernel"
        self.context.resources.allocate(self.subject.site.device)
        return made

    @cached_property
    def packed(self) -> dict[str, torch.Tensor]:
        """The weights in the kernel's layout."""
        device = self.subject.site.device
        return self.kernel.prepack({name: place(value, device) for name, value in self.slots.items()})

    @cached_property
    def slots(self) -> Mapping[str, torch.Tensor]:
        """The slots as loaded, on the host."""
        shape = (cast(int, self.workload.out_features), cast(int, self.workload.in_features))
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * shape[1] ** -0.5
        return {"weight": drawn.to(self.dtype)} if self.pair[0].is_plain else quantize_weight(drawn, self.pair[0])

    def plain_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] as numbers of ``dtype``, on the host."""
        spec = self.pair[0]
        return self.slots["weight"].to(dtype) if spec.is_plain else dequantize(dict(self.slots), spec, dtype)

    @cached_property
    def _bias(self) -> torch.Tensor | None:
        if self._row["bias"] == "no-bias":
            return None
        generator = torch.Generator().manual_seed(3)
        return torch.randn(cast(int, self.workload.out_features), generator=generator).to(self.dtype)

    @cached_property
    def placed_bias(self) -> torch.Tensor | None:
        """The bias, where there is one."""
        return None if self._bias is None else place(self._bias, self.subject.site.device)

    def _expect(self, drawn: torch.Tensor) -> Expected:
        """The truth, and the product in the trial's dtype with the weight rounded to it, as emulation does.

        That is the worst of several orders of summation: where a row nearly cancels, how far off one is, is luck.
        """
        rounded, weight, bias = fake_quantize(drawn, self.pair[1], {}), self.plain_weight(self.dtype), self._bias
        true = functional.linear(
            fake_quantize(drawn.double(), self.pair[1], {}),
            self.plain_weight(torch.float64),
            None if bias is None else bias.double(),
        )
        if bias is not None:  # one more column: where in the order a kernel adds it is its own affair
            rounded = torch.cat([rounded, torch.ones_like(rounded[:, :1])], 1)
            weight = torch.cat([weight, bias[:, None]], 1)
        generator = torch.Generator().manual_seed(0)
        orders = [torch.randperm(weight.shape[1], generator=generator) for _ in range(_EVALUATIONS)]
        own = worst(true, [functional.linear(rounded[:, order], weight[:, order]) for order in orders])
        return Expected((Expectation("output 0", own, true),))


def quantized_input(probe: LinearProbe, seed: int) -> Finding:
    """``quantized-input``: input that comes in the form that the kernel wants gives what plain input does."""
    kernel = probe.kernel
    spec = kernel.input_spec
    if spec is None:
        return Finding()
    if not travels(spec):
        return Finding.failed("input-spec", "input_spec", f"{spec} is no form that can be made of a row alone")
    call = probe.call(seed)
    x, w, bias = call.inputs[0].tensor, probe.packed, probe.placed_bias

    def run() -> torch.Tensor:
        data, scale = (place(part, x.device) for part in quantize_rows.reference(x, spec=spec))
        return kernel.apply_quantized(Quantized(data, scale, spec), w, bias)

    return Finding.of(judge_call(call, run))


def unpack(probe: LinearProbe) -> Finding:
    """``unpack``: the packed weight can be read again, as a whole and by rows, as MLA and tied embeddings do."""
    device = probe.subject.site.device
    own, true = probe.plain_weight(probe.dtype), probe.plain_weight(torch.float64)
    ids = torch.tensor([0, own.shape[0] - 1, own.shape[0] // 2])
    with torch.inference_mode():
        whole = probe.kernel.unpack(probe.packed)
        rows = probe.kernel.rows(probe.packed, ids.to(device))
    found = Comparison()
    for where, got, o, t in (("unpack", whole, own, true), ("rows", rows, own[ids], true[ids])):
        one = compare(where, got, o, t, ErrorModel(scale="element"), device)
        found.faults += one.faults
        found.measured |= one.measured
    return Finding.of(found)
