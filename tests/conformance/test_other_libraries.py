"""Kernels of other people, known to be right, raise no alarm in a hundred seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hardpoint.conformance.site import Site, op_of
from hardpoint.ops.judge import judge
from hardpoint.plugin_host import discover

pytestmark = pytest.mark.accelerator
Tensor = torch.Tensor
SEEDS = 100


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    y: Tensor = rms_norm_forward(x.contiguous(), weight, eps, 0.0, "llama", None)[0]
    return y.view(x.shape)


def act_and_mul(x: Tensor, *, activation: str) -> Tensor:
    from liger_kernel.ops.swiglu import swiglu_forward

    gate, up = (half.contiguous() for half in x.chunk(2, -1))
    y: Tensor = swiglu_forward(gate, up)[-1]
    return y.view(up.shape)


def rotary_embedding(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.rope import rope_forward

    cos, sin = (torch.cat([half, half], -1) for half in cos_sin[positions].chunk(2, -1))
    turned = rope_forward(q.transpose(0, 1)[None].clone(), k.transpose(0, 1)[None].clone(), cos, sin)
    return turned[0][0].transpose(0, 1), turned[1][0].transpose(0, 1)


@pytest.mark.parametrize(
    ("name", "kernel", "chosen"),
    [
        ("rms_norm", rms_norm, lambda case: case.args[0].numel() > 0),
        ("act_and_mul", act_and_mul, lambda case: case.args[0].numel() > 0 and case.kwargs["activation"] == "silu"),
        (
            "rotary_embedding",
            rotary_embedding,
            lambda case: (
                case.args[0].numel() > 0
                and not case.kwargs["interleaved"]
                and case.args[0].shape[-1] == case.args[3].shape[-1]
            ),
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_liger(name: str, kernel: Callable[..., Any], chosen: Callable[[Any], bool], dtype: torch.dtype) -> None:
    pytest.importorskip("liger_kernel")
    site = Site.open(discover(), "cuda")
    op, tried = op_of(site.plugins, name), 0
    for seed in range(SEEDS):
        for case in op.cases(torch.Generator().manual_seed(seed), dtype, site.device):
            if chosen(case):
                found = judge(op, kernel, case, dtype=dtype)
                assert found.passed, f"seed {seed}: {found}"
                tried += 1
    assert tried >= SEEDS


def test_torch_and_its_attention() -> None:
    """scaled_dot_product_attention sums in float32, whichever of its kernels runs."""
    from torch.nn.functional import scaled_dot_product_attention

    from hardpoint.conformance.families.steps import worst
    from hardpoint.ops.error_model import ErrorModel, compare

    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 4, 300 + 40 * (seed % 40), 64, generator=generator).bfloat16() for _ in range(3))
        got = scaled_dot_product_attention(q.cuda(), k.cuda(), v.cuda())
        truth = scaled_dot_product_attention(q.double(), k.double(), v.double())
        own = worst(truth, [scaled_dot_product_attention(q.float(), k.float(), v.float()).bfloat16()])
        found = compare("out", got, own, truth, ErrorModel(finest=2.0**-20), torch.device("cuda", 0))
        assert not found.faults, f"seed {seed}: {found.faults}"
