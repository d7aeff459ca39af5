"""``quant_method: gguf``: the blocks of GGUF files, see checkpoint/gguf/blocks.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from hardpoint.checkpoint.gguf.blocks import SPECS
from hardpoint.checkpoint.gguf.types import BLOCKS
from hardpoint.dtypes import dtype_of
from hardpoint_plugin_api import Dim, MethodRequest, Module, QuantizationMethod, QuantSpec, Scheme, StoredTensor


class Gguf(QuantizationMethod):
    """Reads every type of ``BLOCKS``. A module whose weight is plain is not quantized. Activations stay as they are."""

    def __init__(self, request: MethodRequest) -> None:
        self._tensors, self.dtype = request.tensors, request.dtype

    def scheme(self, module: Module) -> Scheme | None:
        name = next((name for name in BLOCKS if f"{module.name}.{name}" in self._tensors.names), None)
        if name is None:
            return None
        spec, kind = SPECS[name].spec, BLOCKS[name]
        dims = (Dim("out"), Dim("in", kind.columns), Dim(None, kind.size))
        fills = tuple(SPECS[name].slots(torch.zeros(1, 1, kind.size, dtype=torch.uint8)))
        stored = StoredTensor(name, dims, ("uint8",), fills, SPECS[name].slots)
        return Scheme(spec, QuantSpec(self.dtype), (stored,))

    def embedding(self, module: Module, *, tied: bool) -> Scheme | None:
        return self.scheme(module) if tied else self.numbers(module)

    def numbers(self, module: Module) -> Scheme | None:
        scheme = self.scheme(module)
        if scheme is None:
            return None
        (stored,), kind = scheme.stored, SPECS[scheme.stored[0].name]

        def numbers(blocks: torch.Tensor) -> Mapping[str, torch.Tensor]:
            return {"weight": kind.numbers(blocks, dtype_of(self.dtype))}

        return replace(Scheme.plain(self.dtype), stored=(replace(stored, fills=("weight",), read=numbers),))
