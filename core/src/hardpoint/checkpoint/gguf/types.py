"""The types of GGUF's tensors: ``ggml_type`` of https://github.com/ggml-org/ggml (``include/ggml.h``).

A quantized row is cut into blocks, each of ``columns`` numbers in ``size`` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GgufType:
    """One type. ``dtype``: the torch dtype of plain numbers, None for blocks."""

    name: str
    columns: int
    size: int
    dtype: str | None = None


TYPES: dict[int, GgufType] = {
    0: GgufType("F32", 1, 4, "float32"),
    1: GgufType("F16", 1, 2, "float16"),
    2: GgufType("Q4_0", 32, 18),
    3: GgufType("Q4_1", 32, 20),
    6: GgufType("Q5_0", 32, 22),
    7: GgufType("Q5_1", 32, 24),
    8: GgufType("Q8_0", 32, 34),
    10: GgufType("Q2_K", 256, 84),
    11: GgufType("Q3_K", 256, 110),
    12: GgufType("Q4_K", 256, 144),
    13: GgufType("Q5_K", 256, 176),
    14: GgufType("Q6_K", 256, 210),
    20: GgufType("IQ4_NL", 32, 18),
    23: GgufType("IQ4_XS", 256, 136),
    28: GgufType("F64", 1, 8, "float64"),
    30: GgufType("BF16", 1, 2, "bfloat16"),
    39: GgufType("MXFP4", 32, 17),
}
"""By the number that files hold."""

UNREAD = {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M"} | {
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
"""Types that are known by name and not read."""

BLOCKS = {kind.name: kind for kind in TYPES.values() if kind.dtype is None}
"""The quantized types by name."""
