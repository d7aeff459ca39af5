"""Kernels of experts: the reference against the definition, the others by the kit, and faults that it must find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hardpoint.conformance.families.experts import ExpertsProbe, ExpertsTrials
from hardpoint.conformance.families.ops import batch_invariant
from hardpoint.conformance.plan import Plan, Row
from hardpoint.conformance.probe import same_bits
from hardpoint.conformance.site import Site, Subject
from hardpoint.conformance.trials import Finding
from hardpoint.experts.middle import is_gated, names
from hardpoint.experts.prepare_finalize import PrepareFinalize
from hardpoint.numerics import quantize_weight
from hardpoint.ops.judge import judge_call
from hardpoint.plugin_host import discover
from hardpoint.reference.batch_invariant_experts import BatchInvariantExperts
from hardpoint.reference.batched_experts import BatchedMatmul
from hardpoint.reference.experts import ReferenceExperts
from hardpoint.reference.grouped_experts import GroupedMatmul
from hardpoint.reference.local_all2all import LocalAll2All
from hardpoint_plugin_api import (
    All2AllWorkload,
    BuildContext,
    DispatchHandle,
    ExpertsCall,
    ExpertsKernel,
    ExpertsWorkload,
    PluginLoadError,
    QuantSpec,
    Scale,
    UnknownNameError,
)
from tests.support.specs import SPECS

ROW: Row = {
    "dtype": "float32",
    "spec": "plain",
    "activation": "silu_and_mul",
    "format": "standard",
    "batch": "few",
    "mixture": "8x2",
    "widths": "even",
    "absent": "some-elsewhere",
    "bias": "no-bias",
}
ROWS: list[Row] = [
    ROW,
    ROW | {"dtype": "bfloat16", "batch": "many", "absent": "here"},
    ROW | {"batch": "one", "mixture": "60x4", "activation": "relu2"},
    ROW | {"dtype": "float16", "mixture": "5x5", "widths": "wide", "absent": "all-elsewhere"},
    ROW | {"batch": "none", "mixture": "1x1", "activation": "swiglu_oai"},
    ROW | {"spec": "int8-dynamic", "mixture": "5x5", "activation": "gelu_tanh_and_mul"},
    ROW | {"spec": "fp8-tiles", "dtype": "bfloat16", "widths": "wide"},
    ROW | {"bias": "bias", "activation": "swiglu_oai(1.25,2.0)"},
    ROW | {"bias": "bias", "dtype": "bfloat16", "batch": "many", "mixture": "5x5", "activation": "relu2"},
    ROW | {"bias": "bias", "spec": "int8-dynamic", "batch": "one"},
    ROW | {"spec": "uint4-pairs", "widths": "odd", "absent": "here"},
]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """The CPU with one thread: matrices are small, and threads that wait for each other take long beside neighbours."""
    threads = torch.get_num_threads()
    yield Site.open(discover(), "cpu", {"cpu": {"threads": 1}})
    torch.set_num_threads(threads)


def subject_of(site: Site, name: str) -> Subject:
    offer = next(o for o in site.plugins.offers("experts") if o.contribution.name == name)
    return Subject.load(offer, site)


def findings(subject: Subject, rows: list[Row]) -> Iterator[Finding]:
    """The kit's findings in each of ``rows`` that is claimed."""
    for row in rows:
        probe = ExpertsProbe(subject, row, SPECS)
        if subject.refuses(probe.workload) is None:
            yield Finding.of(judge_call(probe.call(3)))


# The reference

ACTIVATIONS: dict[str, Any] = {
    "silu_and_mul": lambda h: functional.silu(h[: h.shape[0] // 2]) * h[h.shape[0] // 2 :],
    "gelu_and_mul": lambda h: functional.gelu(h[: h.shape[0] // 2]) * h[h.shape[0] // 2 :],
    "relu2": lambda h: h.clamp(min=0) ** 2,
    "silu": lambda h: h / (1 + (-h).exp()),
}


def definition(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, activation: str) -> Tensor:
    """One token and one expert at a time."""
    rows = []
    for token, experts, shares in zip(x, ids.tolist(), weights, strict=True):
        total = torch.zeros_like(token)
        for expert, share in zip(experts, shares, strict=True):
            if expert >= 0:
                total += share * (w2[expert] @ ACTIVATIONS[activation](w13[expert] @ token))
        rows.append(total)
    return torch.stack(rows)


def run(kernel: ExpertsKernel, x: Tensor, ids: Tensor, weights: Tensor, w: dict[str, Tensor]) -> Tensor:
    out = torch.full_like(x, float("nan"))
    kernel.apply(ExpertsCall(x, ids, weights, w, out, torch.empty(0, dtype=torch.uint8)))
    return out


def draw(experts: int, top_k: int, hidden: int, width: int, activation: str) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    ids = torch.rand(9, experts).argsort(-1)[:, :top_k].int()
    rows = width * (2 if is_gated(activation) else 1)
    w13, w2 = torch.randn(experts, rows, hidden), torch.randn(experts, hidden, width)
    return torch.randn(9, hidden).double(), ids, torch.rand(9, top_k).double(), w13.double(), w2.double()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_reference_is_its_definition(site: Site, activation: str) -> None:
    x, ids, weights, w13, w2 = draw(6, 3, 10, 8, activation)
    ids[torch.rand(ids.shape) < 0.3] = -1
    ids[4] = -1
    kernel = ReferenceExperts(site.context(torch.float64), ExpertsWorkload(activation=activation))
    out = run(kernel, x, ids, weights, {"w13.weight": w13, "w2.weight": w2})
    torch.testing.assert_close(out, definition(x, ids, weights, w13, w2, activation))
    assert not out[4].any()


def test_quantized_weights_are_what_they_stand_for(site: Site) -> None:
    spec = QuantSpec("int8", scales=(Scale("float32", (1, -1)),))
    x, ids, weights, *given = draw(4, 2, 10, 8, "silu_and_mul")
    matrices = dict(zip(("w13", "w2"), given, strict=True))
    slots: dict[str, Tensor] = {}
    for name, matrix in matrices.items():
        each = [quantize_weight(w.float(), spec) for w in matrix]
        slots |= {f"{name}.{slot}": torch.stack([w[slot] for w in each]) for slot in each[0]}
    workload = ExpertsWorkload(activation="silu_and_mul", spec=(spec, QuantSpec("float64")))
    kernel = ReferenceExperts(site.context(torch.float64), workload)
    rounded = {n: slots[f"{n}.weight"].double() * slots[f"{n}.weight_scale"].double() for n in matrices}
    assert all(torch.equal(kernel.unpack(slots)[n], w) for n, w in rounded.items())
    expected = definition(x, ids, weights, rounded["w13"], rounded["w2"], "silu_and_mul")
    torch.testing.assert_close(run(kernel, x, ids, weights, slots), expected)
    assert (expected - definition(x, ids, weights, matrices["w13"], matrices["w2"], "silu_and_mul")).abs().max() > 1e-3


def test_every_middle_has_a_name_that_says_whether_it_is_gated() -> None:
    assert set(names()) >= {"silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "relu2", "silu", "swiglu_oai"}
    assert is_gated("swiglu_oai")
    assert not is_gated("relu2")
    with pytest.raises(UnknownNameError, match="did you mean 'silu_and_mul'"):
        is_gated("silu_and_mult")


# All kernels


@pytest.mark.parametrize("name", ["grouped", "batched", "reference", "batch_invariant"])
def test_cores_kernels_are_right(site: Site, name: str) -> None:
    rows = [row | {"format": "batched"} for row in ROWS] if name == "batched" else ROWS
    found = list(findings(subject_of(site, name), rows))
    assert len(found) >= (5 if name in ("grouped", "batched") else len(ROWS))
    assert not [str(f) for finding in found for f in finding.faults]


def test_the_kit_tries_what_is_claimed(site: Site) -> None:
    trials = list(ExpertsTrials().trials(subject_of(site, "grouped"), Plan()))
    assert {trial.case.split("/")[1] for trial in trials} == {"plain"}
    tried = [trial for trial in trials if trial.unsupported is None]
    assert len(tried) > 30
    assert len({trial.case for trial in trials}) == len(trials)
    for trial in tried[:3]:
        assert not [str(f) for _, finding in trial.run() for f in finding.faults]


def test_tokens_get_the_same_bits_whoever_is_with_them(site: Site) -> None:
    probe = ExpertsProbe(subject_of(site, "batch_invariant"), ROW | {"batch": "many"}, SPECS)
    with torch.inference_mode():
        whole = probe.call(5).run()
        for order in ([0], [149, 3, 77], list(range(20, 120))):
            part = probe.call(5, order=order).run()
            assert isinstance(whole, Tensor)
            assert isinstance(part, Tensor)
            assert same_bits([part], [whole[torch.tensor(order)]])


def test_whose_activations_are_rounded_to_few_bits_may_end_at_other_codes(site: Site) -> None:
    """Nobody else: there the reference's own evaluation stands alone."""
    row = ROW | {
        "dtype": "float16",
        "batch": "one",
        "mixture": "1x1",
        "activation": "sigmoid_and_mul",
        "absent": "here",
    }
    for spec, most in (("plain", 1.0), ("int8-rows", 1.0), ("int8-dynamic", 10.0)):
        probe = ExpertsProbe(subject_of(site, "reference"), row | {"spec": spec}, SPECS)
        drawn = probe.draw(5, 1)
        (found,) = probe.expect(drawn).outputs
        alone = probe._reference(drawn, torch.float16)
        error, least = ((x.double() - found.truth).norm() for x in (found.own, alone))
        assert least <= error <= most * least
        assert (error > least) == (spec == "int8-dynamic")


@pytest.mark.parametrize(("hidden", "width"), [(33, 64), (64, 30)])
def test_widths_that_a_grouped_matmul_does_not_take(site: Site, hidden: int, width: int) -> None:
    workload = ExpertsWorkload(dtype="bfloat16", hidden_size=hidden, intermediate_size=width)
    (reason,) = GroupedMatmul.supports(workload, site.platform.info)
    assert reason.code == "shape"
    assert str(hidden if hidden % 8 else width) in str(reason)


def test_elements_that_nobody_can_read(site: Site) -> None:
    spec = QuantSpec("float6_e3m2", scales=(Scale("float32", (1, -1)),))
    workload = ExpertsWorkload(dtype="float32", spec=(spec, QuantSpec("float32")))
    (reason,) = ReferenceExperts.supports(workload, site.platform.info)
    assert "float6_e3m2" in str(reason)


def test_a_batched_kernel_says_how_much_scratch_memory_it_takes(site: Site) -> None:
    workload = ExpertsWorkload(activation="silu_and_mul", intermediate_size=48)
    kernel = BatchedMatmul(site.context(torch.bfloat16), workload)
    assert kernel.workspace_bytes(100) == 100 * 2 * 48 * 2


@pytest.mark.parametrize(
    ("static", "block"), [(True, (1, -1)), (False, (-1, -1))], ids=["from-checkpoint", "for-all-tokens"]
)
def test_input_that_cannot_travel_quantized_is_refused(site: Site, static: bool, block: tuple[int, int]) -> None:
    class Wants(ReferenceExperts):
        input_spec = QuantSpec("int8", scales=(Scale("float32", block),), static=static)

    ctx = site.context(torch.float32)
    kernel = Wants(ctx, ExpertsWorkload(activation="relu2"))
    with pytest.raises(PluginLoadError, match="must be dynamic, with scales for each token"):
        PrepareFinalize(ctx, LocalAll2All(ctx, All2AllWorkload()), kernel)


def test_a_dispatch_is_combined_once() -> None:
    handle = DispatchHandle(1)
    assert handle.take() == 1
    with pytest.raises(RuntimeError, match="combined once"):
        handle.take()


# Other ways to be right


class Unreduced(ReferenceExperts):
    """Leaves weighting and summing to core, and writes nothing where an expert is not here."""

    reduces = False

    def apply(self, call: ExpertsCall) -> None:
        one = torch.ones(call.x.shape[0], 1)
        for k in range(call.ids.shape[1]):
            here = call.ids[:, k] >= 0
            made = torch.empty_like(call.x)
            super().apply(replace(call, ids=call.ids[:, k : k + 1], weights=one, out=made))
            call.out[here, k] = made[here]


class Packed(ReferenceExperts):
    """A layout of its own: matrices transposed."""

    layout = "transposed"

    def prepack(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: w.mT.contiguous() if name.endswith(".weight") else w for name, w in weights.items()}

    def apply(self, call: ExpertsCall) -> None:
        super().apply(replace(call, w=self.prepack(call.w)))


@pytest.mark.parametrize("target", [Unreduced, Packed])
def test_right_kernels_pass(site: Site, target: type[ExpertsKernel]) -> None:
    plain = [row for row in ROWS if row["spec"] == "plain"]
    assert not [
        f for finding in findings(replace(subject_of(site, "reference"), target=target), plain) for f in finding.faults
    ]


def test_a_layout_of_its_own_must_be_unpacked_by_its_owner(site: Site) -> None:
    kernel = Packed(site.context(torch.float32), ExpertsWorkload(activation="relu2"))
    with pytest.raises(NotImplementedError, match=r"'transposed' and must define unpack\(\)"):
        kernel.unpack({})


# Faults. Each is named by what it does wrong.


class GateAndUpSwapped(ReferenceExperts):
    def _multiply(self, x: Tensor, name: str, expert: int, w: dict[str, Tensor]) -> Tensor:
        y = super()._multiply(x, name, expert, w)
        return torch.cat(y.chunk(2, -1)[::-1], -1) if name == "w13" else y


class WeightsIgnored(ReferenceExperts):
    def apply(self, call: ExpertsCall) -> None:
        super().apply(replace(call, weights=torch.ones_like(call.weights)))


class AbsentTakenForTheLast(ReferenceExperts):
    def apply(self, call: ExpertsCall) -> None:
        super().apply(replace(call, ids=call.ids % call.w["w2.weight"].shape[0]))


class FirstExpertOfATokenAlone(ReferenceExperts):
    def apply(self, call: ExpertsCall) -> None:
        super().apply(replace(call, ids=call.ids[:, :1], weights=call.weights[:, :1]))


class TokensWithoutExpertsLeftOut(ReferenceExperts):
    def apply(self, call: ExpertsCall) -> None:
        super().apply(call)
        call.out[(call.ids < 0).all(-1)] = float("nan")


class AddsToItsOutput(ReferenceExperts):
    def apply(self, call: ExpertsCall) -> None:
        super().apply(call)
        call.out.add_(0.5)


class InputOverwritten(ReferenceExperts):
    def apply(self, call: ExpertsCall) -> None:
        super().apply(call)
        call.x.mul_(2)


class RouterWeightsTwice(ReferenceExperts):
    def apply(self, call: ExpertsCall) -> None:
        super().apply(replace(call, weights=call.weights**2))


class OneExpertsMatricesForAll(ReferenceExperts):
    def _multiply(self, x: Tensor, name: str, expert: int, w: dict[str, Tensor]) -> Tensor:
        return super()._multiply(x, name, 0, w)


class ScalesIgnored(ReferenceExperts):
    def _multiply(self, x: Tensor, name: str, expert: int, w: dict[str, Tensor]) -> Tensor:
        unscaled = {key: torch.ones_like(v) if key.endswith("_scale") else v for key, v in w.items()}
        return super()._multiply(x, name, expert, unscaled)


class SummedInHalfPrecision(ReferenceExperts):
    def apply(self, call: ExpertsCall) -> None:
        total = torch.zeros_like(call.out, dtype=torch.float16)
        for k in range(call.ids.shape[1]):
            super().apply(replace(call, ids=call.ids[:, k : k + 1], weights=call.weights[:, k : k + 1]))
            total += call.out.half()
        call.out.copy_(total)


def without(call: ExpertsCall, *names: str) -> ExpertsCall:
    return replace(call, w={name: w for name, w in call.w.items() if name not in names})


class FirstBiasIgnored(ReferenceExperts):
    def apply(self, call: ExpertsCall) -> None:
        super().apply(without(call, "w13.bias"))


class SecondBiasIgnored(ReferenceExperts):
    def apply(self, call: ExpertsCall) -> None:
        super().apply(without(call, "w2.bias"))


class BiasAddedAfterWeighting(ReferenceExperts):
    """Each expert's whole second bias, whatever its weight."""

    def apply(self, call: ExpertsCall) -> None:
        super().apply(without(call, "w2.bias"))
        if "w2.bias" in call.w:
            added = call.w["w2.bias"][call.ids.clamp(min=0)].masked_fill((call.ids < 0)[..., None], 0)
            call.out.add_(added.sum(1))


class BiasOfAbsentExperts(ReferenceExperts):
    """An expert that is elsewhere adds the bias of number 0."""

    def apply(self, call: ExpertsCall) -> None:
        super().apply(call)
        if "w2.bias" in call.w:
            call.out.add_(call.w["w2.bias"][0] * (call.weights * (call.ids < 0)).sum(1, keepdim=True))


class OneExpertsBiasForAll(ReferenceExperts):
    def apply(self, call: ExpertsCall) -> None:
        first = {name: w[:1].expand_as(w) for name, w in call.w.items() if name.endswith(".bias")}
        super().apply(replace(call, w=call.w | first))


class BiasOfGateAndUpSwapped(ReferenceExperts):
    def apply(self, call: ExpertsCall) -> None:
        swapped = {name: w.roll(w.shape[1] // 2, 1) for name, w in call.w.items() if name == "w13.bias"}
        super().apply(replace(call, w=call.w | swapped))


class ParametersIgnored(ReferenceExperts):
    """Takes swiglu_oai for gpt-oss's, whatever its parameters."""

    def __init__(self, ctx: BuildContext, workload: ExpertsWorkload) -> None:
        name = str(workload.activation).partition("(")[0]
        super().__init__(ctx, replace(workload, activation=name))


@pytest.mark.parametrize(
    "fault",
    [
        GateAndUpSwapped,
        WeightsIgnored,
        AbsentTakenForTheLast,
        FirstExpertOfATokenAlone,
        TokensWithoutExpertsLeftOut,
        AddsToItsOutput,
        InputOverwritten,
        RouterWeightsTwice,
        OneExpertsMatricesForAll,
        ScalesIgnored,
        SummedInHalfPrecision,
        FirstBiasIgnored,
        SecondBiasIgnored,
        BiasAddedAfterWeighting,
        BiasOfAbsentExperts,
        OneExpertsBiasForAll,
        BiasOfGateAndUpSwapped,
        ParametersIgnored,
    ],
)
def test_planted_faults_are_found(site: Site, fault: type[ExpertsKernel]) -> None:
    rows = [*ROWS, ROW | {"batch": "many", "absent": "all-elsewhere"}]
    subject = replace(subject_of(site, "reference"), target=fault)
    assert any(finding.faults for finding in findings(subject, rows))


def test_a_kernel_that_depends_on_the_batch_is_found(site: Site) -> None:
    class Careless(BatchInvariantExperts):
        def _multiply(self, x: Tensor, name: str, expert: int, w: dict[str, Tensor]) -> Tensor:
            return super()._multiply(x, name, expert, w) * (1 + 1e-6 * x.shape[0])

    subject = subject_of(site, "batch_invariant")
    assert not batch_invariant(ExpertsProbe(subject, ROW, SPECS), 5).faults
    careless = batch_invariant(ExpertsProbe(replace(subject, target=Careless), ROW, SPECS), 5)
    assert [fault.code for fault in careless.faults] == ["batch-variant"]
