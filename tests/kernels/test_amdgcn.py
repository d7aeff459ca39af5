"""AMD's assembly is read, and the waves that fit a SIMD are counted."""

from __future__ import annotations

import pytest

from tests.kernels.amdgcn import Assembly, waves

TEXT = """
kernel:
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], 0
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
	v_wmma_f32_16x16x16_fp8_fp8 v[0:7], v[8:9], v[10:11], v[0:7]
	; v_mfma_f32_32x32x8_bf16 in a comment
	v_fma_f32 v0, v1, v2, v3
	.amdhsa_private_segment_fixed_size 12
amdhsa.kernels:
  - .agpr_count:     4
    .private_segment_fixed_size: 12
    .vgpr_count:     132
    .vgpr_spill_count: 2
"""


def test_assembly_is_read() -> None:
    found = Assembly.of(TEXT)
    assert (found.registers, found.scratch) == (132, 12)
    assert found.matrix == {"f32_16x16x16_bf16": 2, "f32_16x16x16_fp8_fp8": 1}


@pytest.mark.parametrize(
    ("arch", "registers", "num_warps", "shared", "expected"),
    [
        ("gfx942", 128, 4, 0, 4),
        ("gfx942", 129, 4, 0, 3),  # 136 are given out
        ("gfx942", 20, 4, 0, 8),
        ("gfx942", 128, 4, 64 << 10, 1),
        ("gfx950", 128, 4, 64 << 10, 2),
        ("gfx942", 128, 4, 16 << 10, 4),
        ("gfx942", 150, 8, 0, 2),  # a second program would take a fourth wave of each SIMD
        ("gfx90a", 512, 4, 0, 1),
        ("gfx942", 128, 2, 64 << 10, 0.5),
        ("gfx1201", 256, 4, 0, 5),
        ("gfx1201", 96, 4, 0, 16),
        ("gfx1201", 97, 4, 64 << 10, 2),
    ],
)  # fmt: skip
def test_waves_of_a_simd(arch: str, registers: int, num_warps: int, shared: int, expected: float) -> None:
    assert waves(arch, registers, num_warps, shared) == expected
