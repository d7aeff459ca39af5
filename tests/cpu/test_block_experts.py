"""Experts in GGUF's blocks by the compiled kernels: beside dequantized products, by the kit, and planted faults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from hardpoint.checkpoint.gguf.blocks import SPECS
from hardpoint.conformance.families.experts import ExpertsProbe
from hardpoint.conformance.plan import Row
from hardpoint.conformance.site import Site, Subject
from hardpoint.conformance.trials import Finding
from hardpoint.dtypes import dtype_name
from hardpoint.numerics import fake_quantize, quantize_stack
from hardpoint.ops.judge import judge_call
from hardpoint.plugin_host import discover
from hardpoint_cpu.block_linear import BlockPanelLinear
from hardpoint_cpu.experts import BlockExperts
from hardpoint_plugin_api import ExpertsCall, ExpertsWorkload, Feature, QuantSpec, Scale, dequantize
from tests.checkpoint.gguf_writer import write_gguf
from tests.checkpoint.test_gguf_experts import EXPERTS as STACKS
from tests.checkpoint.test_gguf_experts import PROMPT, quantize
from tests.cpu.building import needs_kernels
from tests.support.engines import prompt_logits, small_llm

needs_kernels()

ROUNDED = QuantSpec("int8", scales=(Scale("float32", (1, 32)),), static=False)
SERVED = [name for name in SPECS if name not in ("IQ4_NL", "IQ4_XS", "MXFP4")]
BY_DAY = ("Q4_K", "Q6_K", "Q8_0")
EXPERTS, TOP_K, HIDDEN, WIDTH = 5, 2, 512, 256
TOKENS = (1, 9, 120)
"""Of one expert: one, some, and more than vector registers multiply where there are tiles, which round to bfloat16."""
ROW: Row = {
    "dtype": "bfloat16",
    "spec": "Q4_K",
    "activation": "silu_and_mul",
    "format": "standard",
    "batch": "few",
    "mixture": "5x5",
    "widths": "blocks",
    "absent": "some-elsewhere",
    "bias": "no-bias",
}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    threads = torch.get_num_threads()
    yield Site.open(discover(), "cpu", {"cpu": {"threads": 1}})
    torch.set_num_threads(threads)


Kinds = Mapping[str, str]
"""GGUF's name of the type of each matrix."""


def _both(name: str) -> Kinds:
    return {"w13": name, "w2": name}


def _slots(kinds: Kinds, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Experts of unlike sizes, so that no one's scales serve another."""
    generator, slots = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for matrix, shape in {"w13": (2 * WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH)}.items():
        drawn = torch.randn(EXPERTS, *shape, generator=generator) * torch.arange(1, EXPERTS + 1).view(-1, 1, 1)
        found = quantize_stack(drawn * shape[1] ** -0.5, SPECS[kinds[matrix]].spec)
        slots |= {f"{matrix}.{slot}": value for slot, value in found.items()}
        slots[f"{matrix}.bias"] = torch.randn(EXPERTS, shape[0], generator=generator).to(dtype)
    return slots


def _matrices(slots: dict[str, torch.Tensor], kinds: Kinds, matrix: str) -> torch.Tensor:
    own = {slot.removeprefix(f"{matrix}."): value for slot, value in slots.items() if slot.startswith(f"{matrix}.")}
    each = [{slot: value[e] for slot, value in own.items() if slot != "bias"} for e in range(EXPERTS)]
    return torch.stack([dequantize(one, SPECS[kinds[matrix]].spec, torch.float64) for one in each])


def _expected(call: ExpertsCall, slots: dict[str, torch.Tensor], kinds: Kinds) -> torch.Tensor:
    """One token and expert at a time, in float64, the inputs of both products rounded to int8 as the spec says."""
    w13, w2 = (_matrices(slots, kinds, matrix) for matrix in ("w13", "w2"))
    x, out = fake_quantize(call.x.double(), ROUNDED, {}), torch.zeros(call.x.shape, dtype=torch.float64)
    for token, expert in ((t, k) for t in range(len(x)) for k in range(TOP_K)):
        e = int(call.ids[token, expert])
        if e < 0:
            continue
        gate, up = (x[token] @ w13[e].T + slots["w13.bias"][e]).to(call.x.dtype).double().chunk(2)
        middle = (functional.silu(gate) * up).to(call.x.dtype).double()[None]
        y = fake_quantize(middle, ROUNDED, {})[0] @ w2[e].T + slots["w2.bias"][e]
        out[token] += call.weights[token, expert] * y
    return out


def _call(tokens: int, dtype: torch.dtype, w: dict[str, torch.Tensor]) -> ExpertsCall:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOP_K].int()
    ids[::4, 0] = -1
    weights = torch.rand(tokens, TOP_K, generator=generator)
    return ExpertsCall(x, ids, weights, w, torch.full_like(x, torch.nan), torch.empty(0, dtype=torch.uint8))


def _kernel(site: Site, kinds: Kinds, dtype: torch.dtype, *features: Feature) -> BlockExperts:
    specs = {matrix: (SPECS[name].spec, ROUNDED) for matrix, name in kinds.items()}
    workload = ExpertsWorkload(
        dtype=dtype_name(dtype),
        spec=specs["w13"],
        w2_spec=specs["w2"] if specs["w2"] != specs["w13"] else None,
        activation="silu_and_mul",
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        features=frozenset({Feature.EXPERT_BIAS, *features}),
    )
    assert not BlockExperts.supports(workload, site.platform.info)
    return BlockExperts(site.context(dtype), workload)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in SERVED]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multiplies_as_its_spec_says(site: Site, name: str, dtype: torch.dtype) -> None:
    _check(site, _both(name), dtype)


@pytest.mark.parametrize("w2", ["Q6_K", "Q5_0", "Q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multiplies_by_matrices_of_two_types(site: Site, w2: str, dtype: torch.dtype) -> None:
    """As in files of Q4_K_M."""
    _check(site, {"w13": "Q4_K", "w2": w2}, dtype)


def _check(site: Site, kinds: Kinds, dtype: torch.dtype) -> None:
    slots, kernel = _slots(kinds, dtype), _kernel(site, kinds, dtype)
    weights = kernel.prepack({slot: value.clone() for slot, value in slots.items()})
    for matrix, unpacked in kernel.unpack(weights).items():
        expected = _matrices(slots, kinds, matrix)
        torch.testing.assert_close(unpacked.double(), expected, rtol=2**-8, atol=0)  # a rounding to bfloat16
    for tokens in TOKENS:
        call = _call(tokens, dtype, weights)
        kernel.apply(call)
        wanted = _expected(call, slots, kinds)
        error = (call.out.double() - wanted).norm() / wanted.norm()
        assert error < (2e-3 if dtype == torch.float32 else 1.2e-2), tokens


def test_a_token_has_the_same_bits_whoever_is_with_it(site: Site) -> None:
    kernel = _kernel(site, _both("Q4_K"), torch.bfloat16, Feature.BATCH_INVARIANT)
    whole = _call(120, torch.bfloat16, kernel.prepack(_slots(_both("Q4_K"), torch.bfloat16)))
    kernel.apply(whole)
    for rows in (slice(0, 1), slice(60, 63), slice(7, 40)):
        x, ids, weights, out = (t[rows] for t in (whole.x, whole.ids, whole.weights, whole.out))
        part = replace(whole, x=x, ids=ids, weights=weights, out=torch.empty_like(out))
        kernel.apply(part)
        assert torch.equal(part.out, out)


class ScalesOfTheFirst(BlockExperts):
    """Takes the first expert's outer scales for all."""

    def apply(self, call: ExpertsCall) -> None:
        first = {n: w[:1].expand_as(w).contiguous() for n, w in call.w.items() if n.endswith("weight_scale_2")}
        super().apply(replace(call, w=call.w | first))


class MinimaLeftOut(BlockExperts):
    """Adds no minima."""

    def apply(self, call: ExpertsCall) -> None:
        none = {name: torch.zeros_like(w) for name, w in call.w.items() if ".weight_min" in name}
        super().apply(replace(call, w=call.w | none))


class SumsLeftOut(BlockExperts):
    """Takes the sums of activations, by which minima are multiplied, for zero."""

    def _multiply(
        self, name: str, x: torch.Tensor, w: dict[str, torch.Tensor], routed: tuple[int, ...], top_k: int
    ) -> torch.Tensor:
        matrix = self._of[name]
        assert isinstance(matrix, BlockPanelLinear)
        read = matrix.read

        def without_sums(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            codes, scales, sums, *others = read(x)
            return codes, scales, sums.zero_(), *others

        matrix.read = without_sums  # type: ignore[method-assign]
        try:
            return super()._multiply(name, x, w, routed, top_k)
        finally:
            matrix.read = read  # type: ignore[method-assign]


@pytest.mark.parametrize("target", [BlockExperts, ScalesOfTheFirst, MinimaLeftOut, SumsLeftOut])
def test_the_kit_tells_right_from_wrong(site: Site, target: type[BlockExperts]) -> None:
    offers = site.plugins.offers("experts")
    offer = next(o for o in offers if o.contribution.name == "cpu_native_blocks")
    subject = replace(Subject.load(offer, site), target=target)
    probes = [
        ExpertsProbe(subject, ROW | {"dtype": dtype}, {"Q4_K": (SPECS["Q4_K"].spec, ROUNDED)})
        for dtype in ("bfloat16", "float32")
    ]
    assert not any(subject.refuses(probe.workload) for probe in probes)
    found = [Finding.of(judge_call(probe.call(3))) for probe in probes]
    assert bool([fault for finding in found for fault in finding.faults]) == (target is not BlockExperts)


@pytest.mark.parametrize("down", ["Q8_0", "Q5_0"])
@pytest.mark.parametrize(("dtype", "chosen"), [("bfloat16", "cpu_native_blocks"), ("float32", "reference")])
def test_a_file_is_multiplied_by_them(tmp_path: Path, dtype: str, chosen: str, down: str) -> None:
    """Activations of 16 bits are rounded as llama.cpp does; those of float32 stay as they are."""
    metadata, stored, _ = quantize("qwen3moe", dict.fromkeys(STACKS, "Q8_0") | {"ffn_down_exps": down})
    write_gguf(tmp_path / "model.gguf", metadata, stored)
    logits = []
    for settings in ({}, {"moe_backend": "reference"}):
        with small_llm(tmp_path / "model.gguf", dtype=dtype, skip_tokenizer_init=True, **settings) as llm:
            logits.append(prompt_logits(llm, PROMPT))
            found = {row.chosen for row in llm.table.rows if row.family == "experts"}
        assert found == {settings.get("moe_backend", chosen)}
    assert (logits[0] - logits[1]).norm() < 0.02 * logits[1].norm()
