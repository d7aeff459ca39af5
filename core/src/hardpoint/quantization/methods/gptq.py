"""``quant_method: gptq`` (Frantar et al. 2022, arXiv:2210.17323), as AutoGPTQ and GPTQModel store it.

``qweight`` int32 [in * bits / 32, out], packed along in, the first in the lowest bits, those of 3 bits across words;
``scales`` [groups, out]; ``qzeros`` int32 [groups, out * bits / 32], packed along out; ``g_idx`` int32 [in], the group
of each column, which ``desc_act`` makes other than columns in order. In ``checkpoint_format: gptq`` (the first version)
zero points are stored less one; in ``gptq_v2`` they stand as they are. ``w = (q - zero) * scale``. ``dynamic`` gives
modules settings of their own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from hardpoint.numerics import pack_nibbles
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

_BITS = (2, 3, 4, 8)
_SCALES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class _Numbers:
    """How a module is stored."""

    bits: int
    group: int
    symmetric: bool
    desc_act: bool

    @classmethod
    def read(cls, settings: Settings, others: _Numbers | None = None) -> _Numbers:
        """From a config, or from settings of a module's own beside those of all ``others``."""
        if others is None:
            return cls(
                settings.one_of("bits", _BITS),
                settings.integer("group_size", 128),
                settings.flag("sym", True),
                settings.flag("desc_act", False),
            )
        return cls(
            settings.one_of("bits", _BITS, others.bits),
            settings.integer("group_size", others.group),
            settings.flag("sym", others.symmetric),
            settings.flag("desc_act", others.desc_act),
        )

    @property
    def is_narrow(self) -> bool:
        """Whether elements take a nibble each from here on, as unsigned ones with zero points."""
        return self.bits < 4

    def words(self, axis: Literal["out", "in"]) -> Dim:
        """The axis along which elements are packed: of 3 bits, 32 in three words."""
        return Dim(axis, 32, 3) if self.bits == 3 else Dim(axis, 32 // self.bits)


class Gptq(QuantizationMethod):
    """Reads GPTQ checkpoints of 2, 3, 4 and 8 bits. A module without a ``qweight`` is not quantized."""

    def __init__(self, request: MethodRequest) -> None:
        assert request.config is not None
        settings = Settings(request.config, f"{request.where}: quantization_config")
        self._numbers = _Numbers.read(settings)
        key = "format" if settings.get("checkpoint_format", None) is None else "checkpoint_format"  # GPTQModel has both
        self._is_less = settings.one_of(key, ("gptq", "gptq_v2"), "gptq") == "gptq"
        self._overrides = _overrides(settings, self._numbers)
        self._tensors, self._dtype = request.tensors, request.dtype

    def scheme(self, module: Module) -> Scheme | None:
        names = self._tensors.names
        if f"{module.name}.qweight" not in names and f"{module.name}.weight" in names:
            return None
        own = (numbers for pattern, numbers in self._overrides if re.match(pattern, module.name))
        numbers = next(own, self._numbers)
        if numbers is None:
            return None
        bits, group = numbers.bits, numbers.group
        check_groups(self._tensors, module, group)
        permutation = self._permutation(module, numbers)
        scale = Scale(self._scale_dtype(module), (1, group))
        signed = numbers.symmetric and not numbers.is_narrow
        spec = integer_spec(4 if numbers.is_narrow else bits, signed, scale, permuted=permutation is not None)

        def elements(words: torch.Tensor) -> Mapping[str, torch.Tensor]:
            if numbers.is_narrow:
                return {"weight": pack_nibbles(unpacked(words.t(), bits))}
            return {"weight": elements_of_rows(words.t(), bits, signed)}

        stored = [
            StoredTensor("qweight", (numbers.words("in"), Dim("out")), ("int32",), ("weight",), elements),
            StoredTensor(
                "scales",
                (Dim("in", group) if group != -1 else Dim(None), Dim("out")),
                _SCALES,
                ("weight_scale",),
                lambda scales: {"weight_scale": scales.t()},
            ),
            self._zero_points(numbers),
        ]
        if f"{module.name}.g_idx" in names:
            stored.append(_groups(permutation is not None, module.in_features if group == -1 else group))
        if f"{module.name}.bias" in names:
            stored.append(_no_bias())
        return Scheme(spec, QuantSpec(self._dtype), tuple(stored), must_agree=permutation)

    def _zero_points(self, numbers: _Numbers) -> StoredTensor:
        dims = (Dim("in", numbers.group) if numbers.group != -1 else Dim(None), numbers.words("out"))
        middle, mask = 1 << (numbers.bits - 1), (1 << numbers.bits) - 1
        is_read = not numbers.symmetric or numbers.is_narrow

        def read(words: torch.Tensor) -> Mapping[str, torch.Tensor]:
            zero_points = (unpacked(words, numbers.bits) + self._is_less) & mask
            if numbers.symmetric and not bool((zero_points == middle).all()):
                raise CheckpointError(
                    f"zero points are not all {middle}, and the config says that weights are symmetric"
                )
            return {"weight_zero_point": zero_points.t()} if is_read else {}

        return StoredTensor("qzeros", dims, ("int32",), ("weight_zero_point",) if is_read else (), read)

    def _permutation(self, module: Module, numbers: _Numbers) -> str | None:
        """A digest of the columns' groups where they are not in order."""
        name = f"{module.name}.g_idx"
        if not numbers.desc_act or numbers.group == -1:
            return None
        if name not in self._tensors.names:
            raise CheckpointError(f"{self._tensors.title}: tensor {name!r} is missing, and desc_act is set")
        groups = self._tensors.read(name)
        check_group_index(self._tensors.title, name, groups, module.in_features // numbers.group)
        if torch.equal(groups.long(), torch.arange(module.in_features) // numbers.group):
            return None
        return hashlib.sha256(groups.numpy().tobytes()).hexdigest()

    def _scale_dtype(self, module: Module) -> str:
        name = f"{module.name}.scales"
        return self._tensors.info(name).dtype if name in self._tensors.names else _SCALES[0]


def check_group_index(title: str, name: str, groups: torch.Tensor, count: int) -> None:
    """Raise CheckpointError unless each column's group, in the tensor ``name``, is one of ``count``."""
    if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < count:
        raise CheckpointError(
            f"{title}: tensor {name!r} has groups from {int(groups.min())} to {int(groups.max())}, and the module has "
            f"those from 0 to {count - 1}; quantize the model again"
        )


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


def _overrides(settings: Settings, others: _Numbers) -> list[tuple[str, _Numbers | None]]:
    """GPTQModel's ``dynamic``: patterns of module names, of which the first that matches counts. '+:' or nothing before
    them: settings of their own, None for '-:', not quantized."""
    table = settings.table("dynamic")
    found: list[tuple[str, _Numbers | None]] = []
    for key in table.names if table else ():
        if key.startswith("-:"):
            found.append((settings.pattern("dynamic", key.removeprefix("-:")), None))
        elif table is not None and (own := table.table(key)) is not None:
            found.append((settings.pattern("dynamic", key.removeprefix("+:")), _Numbers.read(own, others)))
    return found
