"""The kernel for latent attention on Hopper as it is compiled; tests/cuda/test_latent_libraries_on_device.py runs it.

No interpreter knows Gluon.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch

from hardpoint.plugin_host import discover
from hardpoint_cuda.hopper_latent import HopperLatentAttention, with_even_heads
from hardpoint_cuda.kernels.latent_hopper import BOX_LAYOUT
from hardpoint_plugin_api import BuildContext, LatentSpec
from tests.kernels.compiling import SHARED_KIB, Job, compile_kernels
from tests.support.attention import PluginConfigOnly

DEEPSEEK = LatentSpec(128, 512, 64, 0.1, "bfloat16", "bfloat16", 64)
KINDS = {"bfloat16": "bf16", "float16": "fp16"}
H100 = discover().devices()["h100"]


def job(spec: LatentSpec, scan: int) -> Job:
    """As the backend would launch it."""
    constants = HopperLatentAttention(cast(BuildContext, PluginConfigOnly({})), spec).hopper_constants[scan]
    kind = KINDS[spec.dtype]
    strides = (f"{name}_{axis}_stride" for name in ("q_latent", "q_rope", "out") for axis in ("token", "head"))
    box = f"tensordesc<{kind}[1, {constants['ROWS']}, 64],{BOX_LAYOUT!r}>"
    signature = {
        **dict.fromkeys(("q_latent", "q_rope", "out"), f"*{kind}"),
        **dict.fromkeys(strides, "i32:16"),
        **dict.fromkeys(("latents", "rope_keys"), box),
        **dict.fromkeys(("block_table", "seq_lens"), "*i32:1"),
        **dict.fromkeys(("block_table_stride", "num_requests"), "i32"),
        "partial": "*fp32",
        "counters": "*i32",
        "score_factor": "fp32",
    }
    return Job("hardpoint_cuda.kernels.latent_hopper:decode_latents_on_hopper", signature, constants, num_stages=1)


@pytest.mark.parametrize(
    ("spec", "scan"),
    [
        pytest.param(DEEPSEEK, 32, id="128-heads"),
        pytest.param(
            replace(DEEPSEEK, num_heads=64, dtype="float16", kv_dtype="float16", block_size=16), 1, id="64-heads"
        ),
    ],
)
def test_compiled_for_hopper(spec: LatentSpec, scan: int) -> None:
    """Sums stay in registers, and blocks come by the tensor memory accelerator, a page's rows in boxes."""
    (compiled,) = compile_kernels([job(spec, scan)])
    assert compiled.spilled <= 24  # bytes of a thread, behind the loop
    assert compiled.shared <= SHARED_KIB["sm_90"] << 10
    boxes_of_a_row = (512 + 64) // 64
    assert compiled.count("cp.async.bulk.tensor") == boxes_of_a_row * (64 // min(64, spec.block_size))
    # Scores of 64 x 64 x 576 before the loop and in it; sums of 64 x 256 x 64, two halves, in the loop and behind it.
    assert compiled.count("wgmma.mma_async") == 2 * 36 + 4 * 4
    assert compiled.count("griddepcontrol.wait") == 1


@pytest.mark.parametrize(("heads", "refused"), [(64, False), (128, False), (16, True), (96, True), (None, False)])
def test_heads_that_fill_no_tile_are_refused(heads: int | None, refused: bool) -> None:
    workload = replace(DEEPSEEK.workload(), num_heads=heads)
    assert [reason.code for reason in HopperLatentAttention.supports(workload, H100)] == ["num-heads"] * refused


def test_a_cache_of_another_dtype_is_refused() -> None:
    workload = replace(DEEPSEEK.workload(), kv_dtype="float16")
    assert [reason.code for reason in HopperLatentAttention.supports(workload, H100)] == ["kv-dtype"]


def test_queries_whose_heads_no_copy_could_take_are_copied() -> None:
    """Rotated parts behind 100 others: heads are 164 elements apart."""
    odd = torch.arange(3 * 64 * 164).view(3, 64, 164)[..., 100:]
    copy, *strides = with_even_heads(odd, *odd.stride()[:2])
    assert strides == [*copy.stride()[:2]] == [64 * 64, 64]
    assert torch.equal(copy, odd)
    even = torch.zeros(64, 3, 512).transpose(0, 1)
    taken, *strides = with_even_heads(even, *even.stride()[:2])
    assert taken is even
    assert strides == [512, 3 * 512]
