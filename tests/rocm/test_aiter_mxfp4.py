"""AITER's experts in MXFP4 through a stand-in, on tensors of the host.

The kit has no experts of sizes that they take.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from hardpoint.numerics import fake_quantize, quantize_weight
from hardpoint_plugin_api import DeviceInfo, ExpertsCall, ExpertsWorkload, QuantSpec, Scale, dequantize
from hardpoint_plugin_api.experts import expert_matrix
from hardpoint_rocm.aiter_mxfp4 import AiterMxfp4Experts
from hardpoint_rocm.platform import describe_arch
from tests.quantization.writing import change_config, change_tensors
from tests.rocm.test_quark import MX, config, mxfp4
from tests.support.aiter_calls import CALLS
from tests.support.checkpoints import random_prompts, write_checkpoint
from tests.support.engines import prompt_logits, small_llm
from tests.support.on_host_settings import without_triton

MXFP4 = QuantSpec("float4_e2m1", scales=(Scale("float8_e8m0fnu", (1, 32)),))
ROUNDED = replace(MXFP4, static=False)
WORKLOAD = ExpertsWorkload(
    dtype="bfloat16",
    spec=(MXFP4, ROUNDED),
    activation="silu_and_mul",
    num_experts=3,
    top_k=2,
    hidden_size=512,
    intermediate_size=256,
)
MI355X: DeviceInfo = describe_arch("AMD Instinct MI355X", "gfx950")


def kernel() -> AiterMxfp4Experts:
    ctx: Any = SimpleNamespace(dtype=torch.bfloat16)
    return AiterMxfp4Experts(ctx, WORKLOAD)


def stored(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The slots of three experts."""
    slots: dict[str, torch.Tensor] = {}
    for name, shape in {"w13": (512, 512), "w2": (512, 256)}.items():
        each = [quantize_weight(torch.randn(shape, generator=generator) / 16, MXFP4) for _ in range(3)]
        slots |= {f"{name}.{slot}": torch.stack([one[slot] for one in each]) for slot in each[0]}
    return slots


def test_results_are_as_near_as_the_references(aiter: None) -> None:
    """To those of activations that nobody rounded: AITER rounds otherwise than core, and no worse."""
    generator = torch.Generator().manual_seed(0)
    weights, made = stored(generator), kernel()
    assert not AiterMxfp4Experts.supports(WORKLOAD, MI355X)
    x = torch.randn(9, 512, generator=generator).bfloat16()
    ids = torch.rand(9, 3, generator=generator).argsort(-1)[:, :2].int()
    routed = torch.rand(9, 2, generator=generator)
    dense = {
        name: [dequantize(expert_matrix(weights, name, e), MXFP4, torch.float32) for e in range(3)]
        for name in ("w13", "w2")
    }

    def expected(spec: QuantSpec) -> torch.Tensor:
        out = torch.zeros(9, 512)
        for token, place in torch.cartesian_prod(torch.arange(9), torch.arange(2)).tolist():
            expert = int(ids[token, place])
            row = fake_quantize(x[token : token + 1].float(), spec, {})
            gate, up = functional.linear(row, dense["w13"][expert]).chunk(2, -1)
            middle = fake_quantize(functional.silu(gate) * up, spec, {})
            out[token] += functional.linear(middle, dense["w2"][expert])[0] * routed[token, place]
        return out

    out = torch.full_like(x, float("nan"))
    made.apply(ExpertsCall(x, ids, routed, made.prepack(weights), out, torch.empty(0, dtype=torch.uint8)))
    true = expected(QuantSpec("float32"))
    own, core = ((found.float() - true).norm() / true.norm() for found in (out, expected(ROUNDED)))
    assert own < 1.1 * core < 0.3
    made.apply(ExpertsCall(x[:0], ids[:0], routed[:0], {}, out[:0], torch.empty(0, dtype=torch.uint8)))


def test_tiles_are_read_back(aiter: None) -> None:
    weights = stored(torch.Generator().manual_seed(1))
    packed = kernel().prepack(weights)
    assert not torch.equal(packed["w13.weight_scale"], weights["w13.weight_scale"].view(torch.uint8))
    found = kernel().unpack(packed)
    for name in ("w13", "w2"):
        for expert in range(3):
            wanted = dequantize(expert_matrix(weights, name, expert), MXFP4, torch.bfloat16)
            assert torch.equal(found[name][expert], wanted)


def test_sizes_that_are_no_tiles_are_refused(aiter: None) -> None:
    found = AiterMxfp4Experts.supports(replace(WORKLOAD, hidden_size=384, intermediate_size=640), MI355X)
    assert [(reason.code, reason.supported) for reason in found] == [
        ("hidden-size", "multiples of 256"),
        ("intermediate-size", "multiples of 256"),
    ]


def test_an_engine(aiter: None, mi355x: None, tmp_path: Path) -> None:
    """Logits are as near as with core's experts, which round by another rule, to those of activations as they are."""
    sizes: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 4}
    write_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=2, num_experts_per_tok=2, **sizes)

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name and name.endswith("_proj.weight")]:
            slots, _ = mxfp4(name, tensors.pop(name).float())
            tensors.update({name.removesuffix("weight") + key: value for key, value in slots.items()})

    change_tensors(tmp_path, quantize)
    exclude = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
    change_config(tmp_path, quantization_config=config(MX, MX | {"is_dynamic": True}, exclude=exclude))
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]

    def run(**more: Any) -> tuple[torch.Tensor, set[str]]:
        with small_llm(tmp_path, **(without_triton("rocm", dtype="bfloat16") | more)) as llm:
            return prompt_logits(llm, ids), {row.chosen for row in llm.table.rows if row.family == "experts"}

    got, chosen = run()
    assert chosen == {"aiter_fused_mxfp4"}
    assert CALLS["fused_moe"] > 0
    by_core, chosen = run(deny=(*without_triton("rocm")["deny"], "experts=aiter_fused_mxfp4"))
    assert chosen == {"reference"}
    change_config(tmp_path, quantization_config=config(MX, exclude=exclude))
    true, _ = run()
    own, core = (functional.cosine_similarity(found, true, dim=-1).median() for found in (got, by_core))
    assert own > core - 0.01 > 0.9


@pytest.mark.parametrize("rows", [256, 512])
def test_the_stand_in_reads_back_what_it_shuffles(rows: int) -> None:
    """So that a test above could have failed."""
    from tests.support.aiter_mxfp4_stand_in import e8m0_shuffle, scales_in_rows

    scales = torch.randint(0, 255, (rows, 16), dtype=torch.uint8)
    tiles = e8m0_shuffle(scales)
    assert not torch.equal(tiles, scales)
    assert torch.equal(scales_in_rows(tiles), scales)
    assert e8m0_shuffle(scales[:100, :3]).shape == (256, 8)
