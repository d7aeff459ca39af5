"""Registers, scratch memory and matrix instructions in AMD's assembly of a kernel, and the waves that fit a SIMD.

Fields of the metadata: LLVM, "User Guide for AMDGPU Backend", code object V3 and later. Sizes of register files and of
LDS, and the granules that registers are given out by: AMD's ISA guides of CDNA2, CDNA3, CDNA4, RDNA3 and RDNA4, and
LLVM's lib/Target/AMDGPU/Utils/AMDGPUBaseInfo.cpp (getTotalNumVGPRs, getVGPRAllocGranule, getMaxWavesPerEU).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_FIELDS = re.compile(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)")
_MATRIX = re.compile(r"^\s+v_(?:mfma|smfmac|wmma|swmmac)_(\w+)", re.MULTILINE)
_SIMDS = 4
"""Of a compute unit of CDNA, and of a work-group processor of RDNA: what shares LDS."""


@dataclass(frozen=True)
class Family:
    """A SIMD: the registers of a lane, the granule that they are given out by, and the most waves.

    Four SIMDs share ``lds_kib`` KiB of LDS.
    """

    registers: int
    granule: int
    waves: int
    lds_kib: int


FAMILIES = {
    "gfx90a": Family(512, 8, 8, 64),
    "gfx942": Family(512, 8, 8, 64),
    "gfx950": Family(512, 8, 8, 160),
    "gfx1100": Family(1536, 24, 16, 128),
    "gfx1201": Family(1536, 24, 16, 128),
}


@dataclass(frozen=True)
class Assembly:
    """``registers`` of a thread, accumulation registers among them, its bytes of scratch memory, matrix instructions.

    ``matrix`` counts them by what they multiply, such as ``f32_16x16x16_bf16``.
    """

    registers: int
    scratch: int
    matrix: dict[str, int]

    @classmethod
    def of(cls, text: str) -> Assembly:
        """Read the assembly of a module with one kernel."""
        fields = {name: int(number) for name, number in _FIELDS.findall(text)}
        return cls(fields["vgpr_count"], fields["private_segment_fixed_size"], dict(Counter(_MATRIX.findall(text))))


def waves(arch: str, registers: int, num_warps: int, shared: int) -> float:
    """The waves of a SIMD that whole programs of ``num_warps`` waves and ``shared`` bytes of LDS fill; below 1 where
    they leave SIMDs empty."""
    family = FAMILIES[arch]
    given_out = max(family.granule, -(-registers // family.granule) * family.granule)
    programs = _SIMDS * min(family.waves, family.registers // given_out) // num_warps
    if shared:
        programs = min(programs, (family.lds_kib << 10) // shared)
    return max(1, programs) * num_warps / _SIMDS
