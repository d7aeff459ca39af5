"""``quant_method: compressed-tensors``: several schemes in one checkpoint, each for its targets.

A config group names ``targets`` (a module's name, ``re:`` and a pattern, or a class), and the numbers of weights and
input activations; ``ignore`` names modules in the same ways. The tensors of a module depend on the group's format:

* ``pack-quantized`` (4- and 8-bit integers): ``weight_packed`` int32 [out, in * bits / 32], q + 2^(bits - 1), the
  first in the lowest bits; ``weight_scale``; ``weight_shape`` [2]; asymmetric: ``weight_zero_point``, packed likewise
  along out; ``actorder`` group: ``weight_g_idx`` int32 [in].
* ``int-quantized``, ``float-quantized``, ``naive-quantized``: ``weight`` int8 (also of 4 bits) or float8_e4m3fn
  [out, in], ``weight_scale``, asymmetric: ``weight_zero_point`` int8; ``input_scale`` and ``input_zero_point`` where
  activations are static.
* ``nvfp4-pack-quantized``: ``weight_packed`` uint8 [out, in / 2], two elements e2m1 a byte, the first in the low bits;
  ``weight_scale`` float8_e4m3fn [out, in / 16]; ``weight_global_scale`` float32 [1], which divides; activations of 4
  bits: ``input_global_scale`` likewise.
* ``mxfp4-pack-quantized``: the same with ``weight_scale`` uint8 [out, in / 32], exponents with 127 added, alone.
* ``mxfp8-quantized``: ``weight`` float8_e4m3fn [out, in] with such scales.

(Read in the library's version 0.20; ``actorder`` group in 0.10, which still wrote it.)

``weight_scale`` is [1] per tensor, [out, 1] per channel, [out, in / group] per group, one for each tile per block.
"""

from __future__ import annotations

import re

from hardpoint.quantization.methods.compressed_tensors_config import Group, read_groups
from hardpoint.quantization.methods.compressed_tensors_modules import ModuleReader
from hardpoint.quantization.methods.fp8 import cache_element, stored_cache_scales
from hardpoint.quantization.methods.settings import Settings
from hardpoint_plugin_api import CacheScales, MethodRequest, Module, QuantizationMethod, QuantSpec, Scheme

_CLASS = "Linear"
_BY_CLASS = 2


class CompressedTensors(QuantizationMethod):
    """Reads compressed-tensors checkpoints of integers of 4 and 8 bits, and of floats of 8 and 4."""

    def __init__(self, request: MethodRequest) -> None:
        assert request.config is not None
        settings = Settings(request.config, f"{request.where}: quantization_config")
        # Tools of 2024 wrote "frozen" beside weights that they had compressed; headers tell where they had not.
        settings.one_of("quantization_status", ("compressed", "frozen"), "compressed")
        sparsity = settings.table("sparsity_config")
        if sparsity is not None and sparsity.names:
            sparsity.one_of("format", ("dense",), "dense")
        transforms = settings.table("transform_config")
        if transforms is not None and transforms.get("config_groups", None):
            raise transforms.wrong("config_groups", "must be empty: rotations of weights are not supported")
        self._groups = {target: group for group in read_groups(settings) for target in group.targets}
        self._cache_element = cache_element(settings)
        self._ignore = settings.names_of("ignore")
        self._tensors, self._dtype = request.tensors, request.dtype

    def scheme(self, module: Module) -> Scheme | None:
        group = self._group_of(module)
        if group is None:
            return None
        reader = ModuleReader(self._tensors, module, group)
        weight, stored, agree = reader.weights()
        if group.inputs is None:
            return Scheme(weight, QuantSpec(self._dtype), stored, agree)
        activation, more, value = reader.inputs(group.inputs)
        return Scheme(weight, activation, stored + more, (agree, value))

    def cache_scales(self, attention: str) -> CacheScales | None:
        return stored_cache_scales(self._tensors, attention, self._cache_element)

    def _group_of(self, module: Module) -> Group | None:
        """The group with the most specific target: a name, then the first pattern by alphabet, then the class.

        Of groups with the same target the last counts. Both as in ``apply_quantization_config`` of the library.
        """
        if any(_match(module, target) is not None for target in self._ignore):
            return None
        ranks = {target: rank for target in self._groups if (rank := _match(module, target)) is not None}
        if not ranks:
            return None
        found = min(ranks, key=lambda target: (ranks[target], target))
        return None if ranks[found] == _BY_CLASS and self._is_plain_router(module) else self._groups[found]

    def _is_plain_router(self, module: Module) -> bool:
        """A router that nobody quantized: Transformers 5 has no Linear there, so llmcompressor does not ignore it."""
        if module.kind != "router" or f"{module.name}.weight" not in self._tensors.names:
            return False
        return self._tensors.names.isdisjoint(f"{module.name}.{name}" for name in ("weight_scale", "weight_packed"))


def _match(module: Module, target: str) -> int | None:
    """How specific ``target`` is where it means ``module`` (0 is most); None where it does not."""
    if target.startswith("re:"):
        return 1 if re.match(target.removeprefix("re:"), module.name) else None
    if target == module.name:
        return 0
    return _BY_CLASS if target == _CLASS else None
