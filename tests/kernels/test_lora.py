"""LoRA adapters in Triton."""

from __future__ import annotations

import pytest
import torch

from hardpoint.kernels import lora
from hardpoint.ops.add_lora import add_lora as op
from tests.kernels.compiling import PAIRS_OF_TARGETS, Job, compile_kernels
from tests.kernels.judged import failures, variants


@pytest.mark.parametrize(("name", "dtype", "device"), variants("add_lora"))
def test_meets_the_error_model(name: str, dtype: torch.dtype, device: str) -> None:
    failed = failures(name, lora.add_lora, dtype, device, without={"add_lora": ("wide", "many_slots")})
    assert not failed, "\n".join(failed)


def drawn(tokens: int, inputs: int, outputs: int, slots: int, rank: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(tokens)
    a, b = torch.randn(slots, rank, inputs), torch.randn(outputs, slots, rank)
    adapters = torch.randint(-1, slots, (tokens,), dtype=torch.int32)
    return torch.randn(tokens, outputs), torch.randn(tokens, inputs), a, b, adapters


@pytest.mark.parametrize("shape", [(33, 700, 130, 3, 5), (5, 96, 40, 2, 72), (17, 9000, 20, 2, 1)])
def test_parts_of_inputs_and_of_ranks(shape: tuple[int, int, int, int, int]) -> None:
    """Several programs for a tile's inputs, ranks above those of one product, and more parts than programs."""
    y, *others = drawn(*shape)
    wanted = y.double()
    op.reference(wanted, *(x.double() if x.is_floating_point() else x for x in others))
    lora.add_lora(y, *others)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-3)


def test_a_row_has_the_same_bits_among_any_others() -> None:
    y, x, a, b, adapters = drawn(37, 600, 48, 4, 8)
    adapters[36] = 2
    alone = y[36:].clone()
    lora.add_lora(y, x, a, b, adapters)
    lora.add_lora(alone, x[36:], a, b, adapters[36:])
    assert torch.equal(y[36:], alone)


def test_parts_of_a_merged_projection_are_written_where_they_lie() -> None:
    y, x, a, b, adapters = drawn(9, 64, 40, 2, 4)
    merged = torch.randn(9, 100)
    before, part = merged.clone(), merged[:, 30:70]
    part.copy_(y)
    lora.add_lora(part, x, a, b, adapters)
    lora.add_lora(y, x, a, b, adapters)
    assert torch.equal(part, y)
    assert torch.equal(merged[:, :30], before[:, :30])
    assert torch.equal(merged[:, 70:], before[:, 70:])


def test_numbers_of_a_slot_have_no_say_in_other_tokens() -> None:
    y, x, a, b, adapters = drawn(20, 64, 40, 3, 4)
    adapters = torch.arange(20, dtype=torch.int32) % 2
    wanted = y.clone()
    lora.add_lora(wanted, x, a, b, adapters)
    a[2], b[:, 2] = torch.inf, torch.nan
    lora.add_lora(y, x, a, b, adapters)
    assert torch.equal(y, wanted)


@pytest.mark.parametrize("targets", PAIRS_OF_TARGETS)
def test_compiles_without_spills(targets: tuple[str, ...]) -> None:
    integers = dict.fromkeys(("K", "N", "R", "x_stride", "y_stride"), "i32:16")
    jobs = []
    for target in targets:
        for ranks in (16, 64):
            tile = {"TOKENS": 16, "RANKS": ranks}
            pointers = {"x_ptr": "*bf16", "a_ptr": "*bf16", "adapters_ptr": "*i32", "middle_ptr": "*fp32"}
            sizes = {name: integers[name] for name in ("K", "R", "x_stride")}
            jobs.append(
                Job(
                    "hardpoint.kernels.lora:shrink_kernel",
                    {**pointers, "T": "i32", **sizes, "S": "i32"},
                    {**tile, "PART": 512, "INPUTS": 128},
                    target,
                )
            )
            pointers = {"y_ptr": "*bf16", "middle_ptr": "*fp32", "b_ptr": "*bf16", "adapters_ptr": "*i32"}
            sizes = {name: integers[name] for name in ("N", "R", "y_stride")}
            jobs.append(
                Job(
                    "hardpoint.kernels.lora:expand_kernel",
                    {**pointers, "T": "i32", **sizes, "S": "i32", "P": "i32"},
                    {**tile, "OUTPUTS": 64, "y_column_stride": 1},
                    target,
                )
            )
    for compiled in compile_kernels(jobs):
        assert compiled.registers <= 168, compiled
        assert compiled.spilled <= 32, compiled  # bounds of the loops
