"""AITER's fused experts: sorting, both matrix products and the weighted sum in one call.

Axes: T tokens, K experts of a token, E experts, H hidden, I width of an expert.
"""

from __future__ import annotations

import torch

from hardpoint_plugin_api import DeviceInfo, ExpertsCall, ExpertsKernel, ExpertsWorkload, Reason, dequantize
from hardpoint_plugin_api.experts import MATRICES, expert_matrix
from hardpoint_rocm.aiter_library import constant, function, reasons_against

_MULTIPLE = 128
_TILE_ROWS, _TILE_COLUMNS, _PART_BYTES = 16, 32, 16
ACTIVATIONS = {"silu_and_mul": "Silu", "gelu_and_mul": "Gelu"}


class AiterFusedExperts(ExpertsKernel):
    """``fused_moe``: weights of 16 bits, or 8-bit floats with a scale for each row, and rounded activations.

    AITER rounds activations itself, before each product: token by token, by the largest element of the dtype.
    """

    layout = "aiter_tiles"

    @classmethod
    def supports(cls, workload: ExpertsWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse sizes that are no whole tiles, and an AITER that has other functions."""
        found = reasons_against("fused_moe.fused_moe", "ops.shuffle.shuffle_weight")
        return [*not_multiples(workload, _MULTIPLE), *found]

    def prepack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights in AITER's tiles of 16 rows and 32 columns; scales as they are."""
        return {key: in_tiles(value) if key.endswith(".weight") else value for key, value in weights.items()}

    def unpack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        plain = {key: in_rows(value) if key.endswith(".weight") else value for key, value in weights.items()}
        spec = self.workload.spec
        if spec is None or spec[0].is_plain:
            return {name: plain[f"{name}.weight"] for name in MATRICES}
        experts = range(plain["w2.weight"].shape[0])
        return {
            name: torch.stack([dequantize(expert_matrix(plain, name, e), spec[0], self.ctx.dtype) for e in experts])
            for name in MATRICES
        }

    def apply(self, call: ExpertsCall) -> None:
        if not call.ids.shape[0]:
            return
        assert self.workload.activation is not None
        quantized = "w13.weight_scale" in call.w
        call.out.copy_(
            function("fused_moe.fused_moe")(
                hidden_states=call.x,
                w1=shuffled(call.w["w13.weight"]),
                w2=shuffled(call.w["w2.weight"]),
                topk_weight=call.weights,
                topk_ids=call.ids,
                activation=getattr(constant("ActivationType"), ACTIVATIONS[self.workload.activation]),
                quant_type=getattr(constant("QuantType"), "per_Token" if quantized else "No"),
                w1_scale=call.w.get("w13.weight_scale"),
                w2_scale=call.w.get("w2.weight_scale"),
                dtype=self.ctx.dtype,
            )
        )


def not_multiples(workload: ExpertsWorkload, of: int) -> list[Reason]:
    """Reasons against sizes that are no multiples of ``of``."""
    sizes = (("hidden-size", workload.hidden_size), ("intermediate-size", workload.intermediate_size))
    return [
        Reason(code, "AITER's experts take whole tiles", wanted=str(size), supported=f"multiples of {of}")
        for code, size in sizes
        if size and size % of
    ]


def in_tiles(weight: torch.Tensor) -> torch.Tensor:
    """[E, rows, columns] in AITER's tiles of 16 rows and 32 columns; bytes of 4-bit elements count as columns."""
    shuffle = function("ops.shuffle.shuffle_weight")
    tiles: torch.Tensor = shuffle(x=weight.contiguous(), layout=(_TILE_ROWS, _TILE_COLUMNS // 2))
    return tiles


def in_rows(tiles: torch.Tensor) -> torch.Tensor:
    """The inverse of AITER's ``shuffle_weight``, of [E, rows, columns]."""
    _, rows, columns = tiles.shape
    part = _PART_BYTES // tiles.element_size()
    parts = tiles.view(-1, rows // _TILE_ROWS, columns // _TILE_COLUMNS, _TILE_COLUMNS // part, _TILE_ROWS, part)
    return parts.permute(0, 1, 4, 2, 3, 5).reshape(tiles.shape)


def shuffled(weight: torch.Tensor) -> torch.Tensor:
    """``weight``, marked as AITER marks tiles: a tensor that was moved or updated has lost the mark."""
    weight.is_shuffled = True  # type: ignore[attr-defined]
    return weight
