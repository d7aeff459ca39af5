"""``quant_method: awq`` (Lin et al. 2023, arXiv:2306.00978), as AutoAWQ stores it.

Version ``gemm``: ``qweight`` int32 [in, out / 8] and ``qzeros`` int32 [groups, out / 8], packed along out: the nibbles
of a word, lowest first, are columns 0, 2, 4, 6, 1, 3, 5, 7 of eight. ``scales`` [groups, out]. ``w = (q - zero) *
scale``.

Version ``gemv``: ``qweight`` int32 [out, in / 8], nibbles in order; ``qzeros`` int32 [out, words] and ``scales``
[out, 8 * words] of the groups, in as many words as whole steps of the library's kernel take, zeros behind the last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from hardpoint.numerics import pack_nibbles
from hardpoint.quantization.methods.gptq import check_groups
from hardpoint.quantization.methods.packed import integer_spec, unpacked
from hardpoint.quantization.methods.settings import Settings
from hardpoint_plugin_api import (
    Dim,
    MethodRequest,
    Module,
    QuantizationMethod,
    QuantSpec,
    Scale,
    Scheme,
    StoredTensor,
)

_SCALES = ("float16", "bfloat16", "float32")
_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of its word holds each of eight neighbours."""


class Awq(QuantizationMethod):
    """Reads 4-bit AWQ checkpoints. A module without a ``qweight`` is not quantized."""

    def __init__(self, request: MethodRequest) -> None:
        assert request.config is not None
        settings = Settings(request.config, f"{request.where}: quantization_config")
        settings.one_of("w_bit" if "w_bit" in settings.names else "bits", (4,))
        self._version = settings.one_of("version", ("gemm", "GEMM", "gemv", "GEMV"), "gemm").lower()
        settings.one_of("zero_point", (True,), True)
        key = "q_group_size" if "q_group_size" in settings.names else "group_size"
        self._group = settings.integer(key, 128)
        self._tensors, self._dtype = request.tensors, request.dtype

    def scheme(self, module: Module) -> Scheme | None:
        names = self._tensors.names
        if f"{module.name}.qweight" not in names and f"{module.name}.weight" in names:
            return None
        check_groups(self._tensors, module, self._group)
        groups, per_word = Dim("in", self._group) if self._group != -1 else Dim(None), Dim("out", 8)
        scales = f"{module.name}.scales"
        dtype = self._tensors.info(scales).dtype if scales in names else "float16"
        spec = integer_spec(4, False, Scale(dtype, (1, self._group)))
        if self._version == "gemv":
            return Scheme(spec, QuantSpec(self._dtype), self._by_rows(module))
        stored = (
            StoredTensor(
                "qweight",
                (Dim("in"), per_word),
                ("int32",),
                ("weight",),
                lambda words: {"weight": pack_nibbles(_in_order(words).t())},
            ),
            StoredTensor(
                "qzeros",
                (groups, per_word),
                ("int32",),
                ("weight_zero_point",),
                lambda words: {"weight_zero_point": _in_order(words).t()},
            ),
            StoredTensor("scales", (groups, Dim("out")), _SCALES, ("weight_scale",), _scales),
        )
        return Scheme(spec, QuantSpec(self._dtype), stored)

    def _by_rows(self, module: Module) -> tuple[StoredTensor, ...]:
        """The tensors of version gemv."""
        size = module.in_features if self._group == -1 else self._group
        count = module.in_features // size
        together = {64: 2, 32: 4}.get(size, 1)
        words = math.ceil(count / (8 * together)) * together
        return (
            StoredTensor(
                "qweight",
                (Dim("out"), Dim("in", 8)),
                ("int32",),
                ("weight",),
                lambda stored: {"weight": stored.contiguous().view(torch.uint8)},
            ),
            StoredTensor(
                "qzeros",
                (Dim("out"), Dim(None, words)),
                ("int32",),
                ("weight_zero_point",),
                lambda stored: {"weight_zero_point": unpacked(stored, 4)[:, :count]},
            ),
            StoredTensor(
                "scales",
                (Dim("out"), Dim(None, 8 * words)),
                _SCALES,
                ("weight_scale",),
                lambda stored: {"weight_scale": stored[:, :count]},
            ),
        )


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, out / 8] -> uint8 [n, out], a nibble each."""
    eights = unpacked(words, 4).unflatten(-1, (-1, 8))
    in_order: torch.Tensor = eights[..., torch.tensor(_PLACE, device=words.device)].flatten(-2)
    return in_order


def _scales(stored: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {"weight_scale": stored.t()}
