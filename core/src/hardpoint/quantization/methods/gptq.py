"""``quant_method: gptq`` (Frantar et al. 2022, arXiv:2210.17323), as AutoGPTQ and GPTQModel store it.

``qweight`` int32 [in * bits / 32, out], packed along in; ``scales`` [groups, out]; ``qzeros`` int32 [groups, out *
bits / 32], packed along out; ``g_idx`` int32 [in], the group of each column, which ``desc_act`` makes other than
columns in order. In ``checkpoint_format: gptq`` (the first version) zero points are stored less one, the words as a
whole: 0x11111111 is to be added to them (0x01010101 for 8 bits); in ``gptq_v2`` they stand as they are. ``w = (q -
zero) * scale``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import torch

from hardpoint.quantization.methods.packed import elements_of_rows, integer_spec, unpacked
from hardpoint.quantization.methods.settings import Settings
from hardpoint_plugin_api import (
    CheckpointError,
    CheckpointTensors,
    Dim,
    MethodRequest,
    Module,
    QuantizationMethod,
    QuantSpec,
    Scale,
    Scheme,
    StoredTensor,
)

_ONES = {4: 0x11111111, 8: 0x01010101}
_SCALES = ("float16", "bfloat16", "float32")


class Gptq(QuantizationMethod):
    """Reads 4- and 8-bit GPTQ checkpoints. A module without a ``qweight`` is not quantized."""

    def __init__(self, request: MethodRequest) -> None:
        assert request.config is not None
        settings = Settings(request.config, f"{request.where}: quantization_config")
        self._bits: int = settings.one_of("bits", (4, 8))
        self._group = settings.integer("group_size", 128)
        self._symmetric, self._desc_act = settings.flag("sym", True), settings.flag("desc_act", False)
        version = settings.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        self._stored_less = _ONES[self._bits] if version == "gptq" else 0
        self._overrides = _overrides(settings)
        self._tensors, self._dtype = request.tensors, request.dtype

    def scheme(self, module: Module) -> Scheme | None:
        names = self._tensors.names
        if f"{module.name}.qweight" not in names and f"{module.name}.weight" in names:
            return None
        if next((pattern for pattern, changes in self._overrides if changes and re.match(pattern, module.name)), None):
            raise CheckpointError(
                f"{self._tensors.title}: 'dynamic' in quantization_config gives {module.name!r} settings of its own, "
                "which is not supported"
            )
        bits, group = self._bits, self._group
        check_groups(self._tensors, module, group)
        permutation = self._permutation(module)
        scale = Scale(self._scale_dtype(module), (1, group))
        spec = integer_spec(bits, self._symmetric, scale, permuted=permutation is not None)
        per_word = 32 // bits
        stored = [
            StoredTensor(
                "qweight",
                (Dim("in", per_word), Dim("out")),
                ("int32",),
                ("weight",),
                lambda words: {"weight": elements_of_rows(words.t(), bits, self._symmetric)},
            ),
            StoredTensor(
                "scales",
                (Dim("in", group) if group != -1 else Dim(None), Dim("out")),
                _SCALES,
                ("weight_scale",),
                lambda scales: {"weight_scale": scales.t()},
            ),
            self._zero_points(per_word),
        ]
        if f"{module.name}.g_idx" in names:
            stored.append(_groups(permutation is not None, module.in_features if group == -1 else group))
        if f"{module.name}.bias" in names:
            stored.append(_no_bias())
        return Scheme(spec, QuantSpec(self._dtype), tuple(stored), must_agree=permutation)

    def _zero_points(self, per_word: int) -> StoredTensor:
        dims = (Dim("in", self._group) if self._group != -1 else Dim(None), Dim("out", per_word))

        def read(words: torch.Tensor) -> Mapping[str, torch.Tensor]:
            zero_points = unpacked(words + self._stored_less, self._bits)  # int32 wraps, as the words were made
            if not self._symmetric:
                return {"weight_zero_point": zero_points.t()}
            middle = 1 << (self._bits - 1)
            if not bool((zero_points == middle).all()):
                raise CheckpointError(
                    f"zero points are not all {middle}, and the config says that weights are symmetric"
                )
            return {}

        return StoredTensor("qzeros", dims, ("int32",), () if self._symmetric else ("weight_zero_point",), read)

    def _permutation(self, module: Module) -> str | None:
        """A digest of the columns' groups where they are not in order."""
        name = f"{module.name}.g_idx"
        if not self._desc_act or self._group == -1:
            return None
        if name not in self._tensors.names:
            raise CheckpointError(f"{self._tensors.title}: tensor {name!r} is missing, and desc_act is set")
        groups = self._tensors.read(name)
        if torch.equal(groups.long(), torch.arange(module.in_features) // self._group):
            return None
        return hashlib.sha256(groups.numpy().tobytes()).hexdigest()

    def _scale_dtype(self, module: Module) -> str:
        name = f"{module.name}.scales"
        return self._tensors.info(name).dtype if name in self._tensors.names else _SCALES[0]


def check_groups(tensors: CheckpointTensors, module: Module, group: int) -> None:
    """Raise CheckpointError unless groups of ``group`` columns divide the module's."""
    if group != -1 and module.in_features % group:
        raise CheckpointError(
            f"{tensors.title}: groups of {group} (group_size in quantization_config) do not divide the "
            f"{module.in_features} columns of {module.name!r}"
        )


def _groups(permuted: bool, group: int) -> StoredTensor:
    def read(groups: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if permuted:
            return {"weight_group_index": groups.unsqueeze(0)}
        here = groups.long() - groups[:1].long()  # a rank's columns may begin with a later group
        if not torch.equal(here, torch.arange(len(groups), device=groups.device) // group):
            raise CheckpointError("columns are not in the order of their groups, and the config says no 'desc_act'")
        return {}

    return StoredTensor("g_idx", (Dim("in"),), ("int32",), ("weight_group_index",) if permuted else (), read)


def _no_bias() -> StoredTensor:
    """AutoGPTQ writes biases of zeros for layers that have none."""

    def read(bias: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if bool(bias.any()):
            raise CheckpointError("is not zero, and the model's layer has no bias")
        return {}

    return StoredTensor("bias", (Dim("out"),), ("float16", "bfloat16", "float32"), (), read)


def _overrides(settings: Settings) -> list[tuple[str, bool]]:
    """GPTQModel's ``dynamic``: patterns of module names ('+:' or nothing before them: with settings of their own;
    '-:': not quantized), and whether there are such settings."""
    table = settings.table("dynamic")
    keys = table.names if table else []
    return [(key.removeprefix("+:").removeprefix("-:"), not key.startswith("-:")) for key in keys]
