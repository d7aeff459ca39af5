"""Acme's quantization: weights in 8-bit integers with a scale for every 32 columns, and a matmul for them.

Axes: N rows (out), K columns (in), G groups of 32 columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from hardpoint_plugin_api import (
    BuildContext,
    CheckpointError,
    ConfigError,
    DeviceInfo,
    Dim,
    LinearCall,
    LinearKernel,
    LinearWorkload,
    MethodRequest,
    Module,
    QuantizationMethod,
    QuantSpec,
    Reason,
    Scale,
    Scheme,
    StoredTensor,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

GROUP = 32
SPEC = QuantSpec("int8", scales=(Scale("float32", (1, GROUP)),))
_PLAIN = ("float32", "float16", "bfloat16")


def rounded(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """weight [N, K] -> the slots of an int8 weight with a scale [N, G] for each ``group`` of columns."""
    blocks = weight.float().unflatten(-1, (-1, group))
    scale = (blocks.abs().amax(-1) / 127).clamp(min=1e-12)
    return {"weight": (blocks / scale[..., None]).round().to(torch.int8).flatten(-2), "weight_scale": scale}


class AcmeGroups(QuantizationMethod):
    """``quant_method: acme_groups``: int8 ``codes`` [N, K] and float32 ``steps`` [N, G] beside no weight."""

    def __init__(self, request: MethodRequest) -> None:
        assert request.config is not None
        if request.config.get("group_size") != GROUP:
            raise CheckpointError(f"{request.where}: quantization_config: 'group_size' must be {GROUP}")
        self._tensors, self._plain = request.tensors, QuantSpec(request.dtype)

    def scheme(self, module: Module) -> Scheme | None:
        if f"{module.name}.codes" not in self._tensors.names:
            return None
        codes = StoredTensor("codes", (Dim("out"), Dim("in")), ("int8",), ("weight",), lambda x: {"weight": x})
        steps = StoredTensor(
            "steps", (Dim("out"), Dim("in", GROUP)), ("float32",), ("weight_scale",), lambda x: {"weight_scale": x}
        )
        return Scheme(SPEC, self._plain, (codes, steps))


class AcmeGroupsOnline(QuantizationMethod):
    """The same made of plain weights while they load; no options."""

    online = True

    def __init__(self, request: MethodRequest) -> None:
        if request.options:
            raise ConfigError(f"--quantization-options {','.join(request.options)}: acme_groups has none")
        self._plain = QuantSpec(request.dtype)

    def scheme(self, module: Module) -> Scheme | None:
        if module.kind != "linear" or module.in_features % GROUP:
            return None
        fills = ("weight", "weight_scale")
        source = StoredTensor("weight", (Dim("out"), Dim("in")), _PLAIN, fills, lambda x: rounded(x, GROUP))
        return Scheme(SPEC, self._plain, (source,))


class AcmeInt8Online(AcmeGroupsOnline):
    """In place of core's ``int8``: weights alone, a scale for each row."""

    def scheme(self, module: Module) -> Scheme | None:
        if module.kind != "linear":
            return None
        fills, columns = ("weight", "weight_scale"), module.in_features
        spec = QuantSpec("int8", scales=(Scale("float32", (1, -1)),))
        source = StoredTensor("weight", (Dim("out"), Dim("in")), _PLAIN, fills, lambda x: rounded(x, columns))
        return Scheme(spec, self._plain, (source,))


class AcmeGroupsLinear(LinearKernel):
    """For Acme's groups alone, in a layout of its own: codes [K, N] and scales [G, N]."""

    layout = "acme_columns"

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse a last group that is smaller than the others."""
        columns = workload.in_features or 0
        if columns % GROUP == 0:
            return []
        return [
            Reason("groups", "columns must be whole groups", wanted=str(columns), supported=f"multiples of {GROUP}")
        ]

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        self._dtype = ctx.dtype

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """[N, K] -> [K, N]."""
        return {"codes": weights["weight"].t().contiguous(), "steps": weights["weight_scale"].t().contiguous()}

    def unpack(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """[N, K] in numbers."""
        return self._numbers(weights).t()

    def rows(self, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` of the weight, [T, K]."""
        return self._numbers({name: value[:, ids] for name, value in weights.items()}).t()

    def apply(self, call: LinearCall) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        x, weights, bias = call.x, call.weights, call.bias
        return linear(x, self.unpack(weights), bias)

    def _numbers(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        codes, steps = weights["codes"], weights["steps"]
        numbers = codes.float().unflatten(0, (-1, GROUP)) * steps[:, None]
        dense: torch.Tensor = numbers.flatten(0, 1).to(self._dtype)
        return dense
