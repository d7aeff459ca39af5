"""Trials of linear kernels: every claimed dtype and pair of specs, on widths and batches of several sizes.

The truth is the product in float64 of the dequantized weight and of the activations as their spec rounds them.

Axes: T tokens, N out features, K in features.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch.nn import functional

from hardpoint.conformance.checks import ADVERSARIAL, kernel_checks
from hardpoint.conformance.families.ops import batch_invariant
from hardpoint.conformance.families.specs import Pair, claimed_specs, pair_of, static_scales
from hardpoint.conformance.families.steps import error_parts, raised, worst
from hardpoint.conformance.memory import Placement, place, place_far, soil_allocator
from hardpoint.conformance.plan import Exclusions, Plan, Row
from hardpoint.conformance.site import Subject, TrialResources, limits_of
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint.context import Context
from hardpoint.dtypes import dtype_of
from hardpoint.numerics import fake_quantize, quantize_weight, travels
from hardpoint.ops.comparison import Comparison
from hardpoint.ops.error_model import ErrorModel, compare
from hardpoint.ops.judge import Call, Expectation, Expected, Input, judge_call
from hardpoint.ops.quantize_rows import quantize_rows
from hardpoint_plugin_api import (
    Contribution,
    Feature,
    LinearCall,
    LinearKernel,
    LinearWorkload,
    Reason,
    dequantize,
)

ERRORS = ErrorModel()

_TOKENS = {"one": 1, "few": 7, "many": 130, "none": 0}
_BORDERS = (1, 2, 3, 4, 5, 6, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130)
"""Steps about the edges of tiles of 4, 16, 32, 64 and 128 rows."""
_BETWEEN = ((8, 14), (66, 126), (131, 255), (257, 400))
"""Of each range, one step is drawn."""
_MOST_TOKENS = 1024
"""The end of a claimed range of tokens is tried up to this."""
_NUM_EXTREMES = 6
"""Rows of the check ``extremes``; a step has further rows where fewer are not claimed."""
_MOST_OWN_SIZES = 3
"""Of those that a kernel names, beside the others."""
_WIDTHS = {
    "even": (96, 128),
    "odd": (57, 33),
    "odd-out": (57, 34),
    "narrow": (3, 64),
    "wide": (160, 384),
    "long": (72, 4224),
    "broad": (656, 256),
    "broad-odd": (641, 192),
}
"""Out and in features. The long one is a sum of more than 4,096 products; broad ones have several tiles of columns."""
_LARGE, _SMALL = {"float16": (2.0**12, 2.0**-13)}, (2.0**60, 2.0**-60)
"""Magnitudes of rows, by dtype and for all others."""
_OVERFLOWS = 2.0**14
"""Times the signs of a row of the weight, the result of this row is beyond float16."""
_LIGHT, _LIGHTER = ("odd-out", "narrow"), 2.0**-10
"""Widths whose quantized weights are this much smaller, so that a scale of 16 bits would be a subnormal number."""
_ORDERS = 4
"""Orders of summation for the reference's own error; where results have 16 bits, an order changes next to nothing."""


class LinearTrials:
    """The generator of the family ``linear``."""

    family = "linear"

    def serves(self, contribution: Contribution) -> bool:
        """Every kernel: all share one interface."""
        return True

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """Combinations of what is claimed and what every kernel must cope with."""
        own = subject.target.trial_sizes(subject.site.platform.info)[:_MOST_OWN_SIZES]
        shapes = [(256, 256), *((out_features, in_features) for _, out_features, in_features in own)]
        sized = [partial(LinearWorkload, out_features=n, in_features=k) for n, k in shapes]
        claims = claimed_specs(subject, plan, sized)
        yield from claims.untried()
        if not claims.served:
            return
        factors: dict[str, Sequence[Any]] = {
            "dtype": claims.dtypes,
            "spec": tuple(claims.served),
            "widths": (*_WIDTHS, *("x".join(map(str, size)) for size in own)),
            "tokens": _numbers_of_tokens(subject),
            "bias": ("bias", "no-bias"),
        }
        senseless: Exclusions = {
            ("dtype", "spec"): claims.is_foreign,
            ("spec", "widths"): lambda spec, widths: _is_half(claims.pairs.get(spec), widths),
        }
        seen: set[tuple[Any, ...]] = set()
        for number, row in enumerate(plan.combinations(factors, senseless)):
            probe = LinearProbe(subject, row, claims.pairs)
            key = (row["dtype"], row["spec"], row["widths"])
            yield _trial(probe, plan, number, with_sizes=key not in seen)
            seen.add(key)


def _is_half(pair: Pair | None, widths: str) -> bool:
    """Whether a row of such a weight would end within a unit of storage."""
    return pair is not None and _of_widths(widths)[1] % pair[0].per_byte != 0


def _of_widths(widths: str) -> tuple[int, int]:
    """Out and in features, by name or of a kernel's own size."""
    if widths in _WIDTHS:
        return _WIDTHS[widths]
    _, out_features, in_features = map(int, widths.split("x"))
    return out_features, in_features


def _numbers_of_tokens(subject: Subject) -> tuple[str, ...]:
    """Steps of the claimed range: usual ones by name, and its ends; its beginning however large it is."""
    need = subject.tokens
    named = [name for name, n in _TOKENS.items() if need.min <= max(n, 1) <= (need.max or n + 1)]
    ends = {need.min, *([need.max] if need.max and need.max <= _MOST_TOKENS else [])}
    return (*named, *map(str, sorted(ends - {0} - {_TOKENS[name] for name in named})))


def _trial(probe: LinearProbe, plan: Plan, number: int, *, with_sizes: bool) -> Trial:
    if reason := probe.subject.refuses(probe.workload):
        return Trial(probe.title, unsupported=reason, workload=probe.workload)
    seed = plan.seed_of(f"{probe.subject.offer.contribution}/{probe.title}")
    is_empty = not probe.num_tokens
    checks = kernel_checks(probe, seed, plan, number, without=tuple(ADVERSARIAL) if is_empty else ())
    if with_sizes:
        checks.append(Check("sizes", partial(sizes, probe, seed)))
        checks.append(Check("extremes", partial(extremes, probe, seed)))
        checks.append(Check("instances", partial(instances, probe, seed)))
    checks.append(Check("unpack", partial(unpack, probe)))
    checks.append(Check("quantized-input", partial(quantized_input, probe, seed)))
    if Feature.BATCH_INVARIANT in probe.subject.features and not is_empty:
        checks.append(Check("batch-invariant", partial(batch_invariant, probe, seed, has_rows=True)))
    return Trial(probe.title, checks, workload=probe.workload)


class LinearProbe:
    """One kernel in one situation. Its weights are the same for every seed: they are packed once."""

    allocates = True

    def __init__(
        self, subject: Subject, row: Row, pairs: Mapping[str, Pair], *, turned: bool = False, weights: int = 1
    ) -> None:
        """``pairs`` are those of specs by name; ``turned`` exchanges the widths of inputs and outputs; ``weights`` is
        the seed of the weight.
        """
        self.subject, self._row, self._pairs, self._weights_seed = subject, row, pairs, weights
        self.title = "/".join(str(value) for value in row.values())
        self.pair = pair_of(pairs, row["spec"], row["dtype"])
        self.dtype = dtype_of(row["dtype"])
        tokens, widths = row["tokens"], row["widths"]
        self.num_tokens = _TOKENS[tokens] if tokens in _TOKENS else int(tokens)
        if widths not in _WIDTHS:
            self.num_tokens = int(widths.split("x")[0])
        out_features, in_features = reversed(_of_widths(widths)) if turned else _of_widths(widths)
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
        drawn = self.draw(seed, self.num_tokens)
        if order is not None:
            drawn = drawn[torch.tensor(order)]
        return self.call_of(drawn, lambda: self.expect(drawn), placement, far)

    def draw(self, seed: int, num_tokens: int) -> torch.Tensor:
        """Random activations [T, K], on the host."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(num_tokens, cast(int, self.workload.in_features), generator=generator).to(self.dtype)

    def call_of(
        self,
        drawn: torch.Tensor,
        expect: Callable[[], Expected],
        placement: Placement = Placement.AS_DRAWN,
        far: str | None = None,
    ) -> Call:
        """The call with activations ``drawn`` [T, K], which are on the host."""
        site, w, bias = self.subject.site, self.packed, self.placed_bias
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
            run=lambda: self.product(x),
            expect=expect,
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
        back = LinearProbe(self.subject, self._row, self._pairs, turned=True)
        if reason := self.subject.refuses(back.workload):
            return reason
        if (columns := cast(int, back.workload.in_features)) % (unit := self.pair[0].per_byte):
            return Reason("widths", f"a weight of {columns} columns would end within a unit of {unit} elements")
        return [self.product, back.product]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The kernel's result for x [T, in]."""
        return self.kernel.apply(LinearCall(x, self.packed, self.placed_bias))

    @cached_property
    def context(self) -> Context:
        """The kernel's build context."""
        most = max(self.num_tokens, self.subject.tokens.min + _NUM_EXTREMES)
        return self.subject.site.context(self._row["dtype"], limits=limits_of(tokens=most))

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
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(self._weights_seed)) * shape[1] ** -0.5
        weight, activation = self.pair
        if weight.is_plain:
            return {"weight": drawn.to(self.dtype)} | static_scales(activation)
        has_fine_scales = all(scale.format == "float32" for scale in weight.scales)
        slots = quantize_weight(drawn * (_LIGHTER if has_fine_scales and self._row["widths"] in _LIGHT else 1), weight)
        if weight.element == "int8":
            slots["weight"][0, 0] = -128
        if has_fine_scales:
            slots["weight_scale"][::2] *= -1
        return slots | static_scales(activation)

    def alike(self, *, weights: int = 1) -> LinearProbe:
        """A probe of another instance, with a weight of its own."""
        return LinearProbe(self.subject, self._row, self._pairs, weights=weights)

    def take_weights(self, other: LinearProbe) -> None:
        """Replace the packed weights, at their addresses, by those of ``other``, packed by this kernel."""
        device = self.subject.site.device
        packed = self.kernel.prepack({name: place(value, device) for name, value in other.slots.items()})
        for name, value in packed.items():
            self.packed[name].copy_(value)

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
        """The bias on the device that is tested; None for a case without bias."""
        return None if self._bias is None else place(self._bias, self.subject.site.device)

    @cached_property
    def given(self) -> dict[str, torch.Tensor]:
        """The slots that activations are rounded by, on the host."""
        return {name: value for name, value in self.slots.items() if name.startswith("input_")}

    def expect(self, drawn: torch.Tensor) -> Expected:
        """The truth, and the product summed in float32 with the weight rounded to the trial's dtype, as emulation does.

        Where results are float32, too, that is the worst of several orders of summation: where a row nearly cancels,
        how far off one is, is luck. Half of them add one product at a time, as a kernel may whose threads have a
        result each: that loses most. See also ``_without_luck``.
        """
        own, true = self._products(drawn)
        return Expected((Expectation("output 0", own, true),))

    def _products(self, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference's own result [T, N], and the truth."""
        rounded, weight, bias = (
            fake_quantize(drawn, self.pair[1], self.given),
            self.plain_weight(self.dtype),
            self._bias,
        )
        true = functional.linear(
            fake_quantize(drawn.double(), self.pair[1], self.given),
            self.plain_weight(torch.float64),
            None if bias is None else bias.double(),
        )
        rounded, weight = rounded.float(), weight.float()
        if bias is not None:  # one more column: where in the order a kernel adds it is its own affair
            rounded = torch.cat([rounded, torch.ones_like(rounded[:, :1])], 1)
            weight = torch.cat([weight, bias.float()[:, None]], 1)
        if self.dtype != torch.float32:
            return functional.linear(rounded, weight).to(self.dtype), true
        generator, products = torch.Generator().manual_seed(0), []
        for _ in range(_ORDERS):
            order = torch.randperm(weight.shape[1], generator=generator)
            some = rounded[:, order], weight[:, order]
            products += [functional.linear(*some), summed_one_by_one(*some)]
        return _without_luck(worst(true, products), true, rounded), true

    def steps(self, counts: Sequence[int]) -> list[int]:
        """The numbers of ``counts`` that the manifest's range of tokens admits."""
        need = self.subject.tokens
        return [n for n in counts if need.min <= n <= (need.max or n)]

    @property
    def rows_share_a_scale(self) -> bool:
        """Whether how a row of activations is rounded depends on the others."""
        activation = self.pair[1]
        return not activation.static and any(scale.block[0] == -1 for scale in activation.scales)


def _without_luck(own: torch.Tensor, true: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``own`` [T, N], float32, the error of each row raised to the root mean square of all rows' where it is less.

    An error counts as a share of the length of its row of ``x``. In a row of three elements that nearly cancel, every
    order of summation may be lucky. Errors along the true row and across it are told apart, as the error model does.
    """
    size = x.double().norm(dim=-1, keepdim=True)

    def usual(part: torch.Tensor) -> torch.Tensor:
        shares: torch.Tensor = part.norm(dim=-1, keepdim=True) / size
        found: torch.Tensor = shares.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt() * size
        return found

    along, across = error_parts(own, true)
    return raised(own, true, (usual(along), usual(across)))


def summed_one_by_one(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] times weight [N, K], both float32: each product is added to the sum of those before it."""
    total = x.new_zeros(x.shape[0], weight.shape[0])
    for column, other in zip(x.T[:, :, None], weight.T[:, None].contiguous(), strict=True):
        total.addcmul_(column, other)
    return total


def sizes(probe: LinearProbe, seed: int) -> Finding:
    """``sizes``: one instance serves steps of all sizes about the borders of tiles, small ones first and again last."""
    draw = random.Random(seed)
    counts = probe.steps(sorted({*_BORDERS, *(draw.randint(*ends) for ends in _BETWEEN)}))
    if not counts:
        return Finding.not_claimed("tokens", f"steps of 1 to {_BETWEEN[-1][-1]} tokens are not claimed")
    drawn = probe.draw(seed + 1, counts[-1])
    middle = torch.randperm(len(counts), generator=torch.Generator().manual_seed(seed)).tolist()
    (whole,) = probe.expect(drawn).outputs

    def expect(count: int) -> Expected:
        if probe.rows_share_a_scale:
            return probe.expect(drawn[:count])
        return Expected((Expectation(f"{count} tokens", whole.own[:count], whole.truth[:count]),))

    found = Comparison()
    for count in (counts[0], counts[-1], *(counts[i] for i in middle)):
        found.add(judge_call(probe.call_of(drawn[:count], partial(expect, count))))
    return Finding.of(found)


def extremes(probe: LinearProbe, seed: int) -> Finding:
    """``extremes``: rows of zeros, large and small ones, one with a NaN, and in float16 one whose result overflows.

    Each is right, and none is noticed by another.
    """
    activation = probe.pair[1]
    if probe.rows_share_a_scale:
        return Finding.not_claimed("shared-scale", "rows share a scale")
    large, small = _LARGE.get(probe.workload.dtype or "", _SMALL)
    drawn = probe.draw(seed + 2, _NUM_EXTREMES)
    drawn[1], drawn[2], drawn[4] = 0, drawn[2] * large, drawn[4] * small
    if activation.is_plain or not activation.static:  # a NaN has no code of its own
        drawn[3, drawn.shape[1] // 2] = torch.nan
    if probe.dtype == torch.float16:
        drawn[5] = probe.plain_weight(torch.float32)[0].sign() * _OVERFLOWS
    need, found = probe.subject.tokens, Comparison()
    at_once = min(_NUM_EXTREMES, need.max or _NUM_EXTREMES)
    for some in drawn.split(at_once):
        missing = max(0, need.min - len(some))
        x = torch.cat([some, probe.draw(seed + 3, missing)])
        found.add(judge_call(probe.call_of(x, partial(probe.expect, x))))
    return Finding.of(found)


def quantized_input(probe: LinearProbe, seed: int) -> Finding:
    """``quantized-input``: input that comes in the form that the kernel wants gives what plain input does."""
    kernel = probe.kernel
    spec = kernel.input_spec
    if spec is None:
        return Finding()
    if not travels(spec):
        return Finding.failed("input-spec", "input_spec", f"{spec} is no form that can be made of a row alone")
    w, bias, found = probe.packed, probe.placed_bias, Comparison()

    def run(x: torch.Tensor) -> torch.Tensor:
        data, scale = (place(part, x.device) for part in quantize_rows.reference(x, spec=spec))
        return kernel.apply(LinearCall(data, w, bias, scale))

    for count in dict.fromkeys((probe.num_tokens, *probe.steps([2]))):
        drawn = probe.draw(seed, count)
        call = probe.call_of(drawn, partial(probe.expect, drawn))
        found.add(judge_call(call, partial(run, call.inputs[0].tensor)))
    return Finding.of(found)


def instances(probe: LinearProbe, seed: int) -> Finding:
    """``instances``: two of one shape keep to their own weights, and one takes new weights where its old ones lay."""
    one, two = probe.alike(), probe.alike(weights=2)
    drawn, found = probe.draw(seed, probe.num_tokens), Comparison()
    for each in (one, two, one):
        found.add(judge_call(each.call_of(drawn, partial(each.expect, drawn))))
    with torch.inference_mode():
        one.take_weights(two)
    found.add(judge_call(one.call_of(drawn, partial(two.expect, drawn))))
    return Finding.of(found)


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
        found.add(one)
    return Finding.of(found)
