"""``quant_method: compressed-tensors``: several schemes in one checkpoint, each for its targets.

A config group names ``targets`` (a module's name, ``re:`` and a pattern, or a class), and the numbers of weights and
input activations; ``ignore`` names modules in the same ways. What is stored for a module depends on the group's
format:

* ``pack-quantized`` (4- and 8-bit integers): ``weight_packed`` int32 [out, in * bits / 32], q + 2^(bits - 1), the
  first in the lowest bits; ``weight_scale``; ``weight_shape`` [2]; asymmetric: ``weight_zero_point``, packed likewise
  along out; ``actorder`` group: ``weight_g_idx`` int32 [in].
* ``int-quantized``, ``float-quantized``, ``naive-quantized``: ``weight`` int8 or float8_e4m3fn [out, in],
  ``weight_scale``, asymmetric: ``weight_zero_point`` int8; ``input_scale`` and ``input_zero_point`` where activations
  are static.

(Read in the library's version 0.20; ``actorder`` group in 0.10, which still wrote it.)

``weight_scale`` is [1] per tensor, [out, 1] per channel, [out, in / group] per group, one for each tile per block.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch

from hardpoint.quantization.methods.fp8 import (
    column,
    copied,
    single,
    single_value,
    stored_cache_scales,
    stored_under,
)
from hardpoint.quantization.methods.gptq import check_groups
from hardpoint.quantization.methods.packed import elements_of_rows, integer_spec, unpacked
from hardpoint.quantization.methods.settings import Settings
from hardpoint_plugin_api import (
    CacheScales,
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

_PACKED = "pack-quantized"
_BY_ELEMENT = ("int-quantized", "float-quantized", "naive-quantized")
_CLASS = "Linear"
_BY_CLASS = 2
_SCALES = ("bfloat16", "float16", "float32")
_OUT, _IN, _ONE = Dim("out"), Dim("in"), Dim(None)


@dataclass(frozen=True)
class _Numbers:
    """The weights or the activations of a group. ``block`` is that of the scales."""

    element: str
    bits: int
    symmetric: bool
    block: tuple[int, int]
    dynamic: bool
    reordered: bool

    @property
    def is_float(self) -> bool:
        """Whether elements are 8-bit floats."""
        return self.element.startswith("float")


@dataclass(frozen=True)
class _Group:
    """One config group."""

    targets: tuple[str, ...]
    format: str
    weights: _Numbers
    inputs: _Numbers | None


class CompressedTensors(QuantizationMethod):
    """Reads compressed-tensors checkpoints of integers and 8-bit floats."""

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
        format_ = settings.get("format", None)
        groups = settings.table("config_groups")
        self._groups = [_read_group(groups, name, format_) for name in groups.names] if groups else []
        self._ignore = settings.texts("ignore")
        self._tensors, self._dtype = request.tensors, request.dtype

    def scheme(self, module: Module) -> Scheme | None:
        group = self._group_of(module)
        if group is None:
            return None
        reader = _ModuleReader(self._tensors, module, group)
        weight, stored, agree = reader.packed() if group.format == _PACKED else reader.by_element()
        if group.inputs is None:
            return Scheme(weight, QuantSpec(self._dtype), stored, agree)
        activation, more, value = reader.inputs(group.inputs)
        return Scheme(weight, activation, stored + more, (agree, value))

    def cache_scales(self, attention: str) -> CacheScales | None:
        return stored_cache_scales(self._tensors, attention)

    def _group_of(self, module: Module) -> _Group | None:
        """The group with the most specific target: a name, then a pattern, then the class."""
        if any(_match(module, target) is not None for target in self._ignore):
            return None
        found = [
            (rank, group) for group in self._groups for t in group.targets if (rank := _match(module, t)) is not None
        ]
        if not found:
            return None
        rank, group = min(found, key=lambda pair: pair[0])
        return None if rank == _BY_CLASS and self._is_plain_router(module) else group

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


def _read_group(groups: Settings, name: str, format_: object) -> _Group:
    settings = groups.table(name)
    if settings is None:
        raise groups.wrong(name, "must be an object")
    if settings.get("output_activations", None) is not None:
        raise settings.wrong("output_activations", "are not supported: must be null")
    weights = settings.table("weights")
    if weights is None:
        raise settings.wrong("weights", "must say how weights are quantized")
    inputs = settings.table("input_activations")
    own = settings.get("format", None) or format_
    if own not in (_PACKED, *_BY_ELEMENT):
        raise CheckpointError(
            f"{weights.where}: the format {own!r} is not supported; supported: {', '.join((_PACKED, *_BY_ELEMENT))}"
        )
    numbers = None if inputs is None else _read_numbers(inputs, False)
    return _Group(settings.texts("targets"), str(own), _read_numbers(weights, True), numbers)


def _read_numbers(settings: Settings, weights: bool) -> _Numbers:
    kind = settings.one_of("type", ("int", "float"), "int")
    bits: int = settings.one_of("num_bits", (4, 8) if weights and kind == "int" else (8,), 8)
    group = settings.get("group_size", None)
    guess = "tensor" if group is None else "channel" if group == -1 else "group"
    dynamic = settings.one_of("dynamic", (True, False), False)
    strategies = ("tensor", "channel", "group", "block") if weights else ("tensor", "token", "group")
    strategy = settings.one_of("strategy", strategies, guess)
    if dynamic if weights else not dynamic and strategy in ("token", "group"):
        what = "weights" if weights else "activations"
        raise settings.wrong("dynamic", f"does not go with strategy {strategy!r} of {what}")
    block = {"tensor": (-1, -1), "channel": (1, -1), "token": (1, -1)}.get(strategy)
    if strategy == "group":
        block = (1, settings.integer("group_size"))
    elif strategy == "block":
        block = settings.block("block_structure")
        if block is None:
            raise settings.wrong("block_structure", "must give rows and columns for strategy 'block'")
    assert block is not None
    actorder = settings.get("actorder", None)
    if actorder not in (None, False, True, "group", "dynamic", "weight", "static"):
        raise settings.wrong("actorder", "must be one of group, weight")
    return _Numbers(
        element="float8_e4m3fn" if kind == "float" else f"int{bits}",
        bits=bits,
        symmetric=settings.flag("symmetric", True),
        block=block,
        dynamic=bool(dynamic),
        reordered=actorder in (True, "group", "dynamic"),
    )


@dataclass(frozen=True)
class _ModuleReader:
    """The checkpoint's tensors of one module of a group."""

    tensors: CheckpointTensors
    module: Module
    group: _Group

    def packed(self) -> tuple[QuantSpec, tuple[StoredTensor, ...], Hashable]:
        """The spec, the tensors, and what merged modules must agree in, of pack-quantized weights."""
        weights = self.group.weights
        bits, symmetric = weights.bits, weights.symmetric
        permutation = self._permutation() if weights.reordered else None
        scale, stored_scale = self._weight_scale()
        per_word = 32 // bits
        stored = [
            StoredTensor(
                "weight_packed",
                (_OUT, Dim("in", per_word)),
                ("int32",),
                ("weight",),
                lambda words: {"weight": elements_of_rows(words, bits, symmetric)[:, : self._bytes(bits)]},
            ),
            stored_scale,
            self._weight_shape(),
        ]
        if not symmetric:
            stored.append(self._packed_zero_points(scale, bits))
        if permutation is not None:
            stored.append(
                StoredTensor(
                    "weight_g_idx",
                    (_IN,),
                    ("int32", "int64"),
                    ("weight_group_index",),
                    lambda groups: {"weight_group_index": groups.unsqueeze(0)},
                )
            )
        spec = integer_spec(bits, symmetric, scale, permuted=permutation is not None)
        return spec, tuple(stored), permutation

    def by_element(self) -> tuple[QuantSpec, tuple[StoredTensor, ...], Hashable]:
        """The same of weights that are stored one by one."""
        weights = self.group.weights
        if weights.bits == 4:
            raise CheckpointError(f"{self.tensors.title}: 4-bit weights are read from format {_PACKED!r} only")
        scale, stored_scale = self._weight_scale()
        if weights.symmetric:
            stored = (copied("weight", (_OUT, _IN), weights.element, "weight"), stored_scale)
            return QuantSpec(weights.element, scales=(scale,)), stored, None
        if weights.is_float:
            raise CheckpointError(f"{self.tensors.title}: 8-bit floats with zero points are not supported")
        unsigned = StoredTensor("weight", (_OUT, _IN), ("int8",), ("weight",), lambda q: {"weight": _unsigned(q)})
        zero_point = StoredTensor(
            "weight_zero_point",
            stored_scale.dims,
            ("int8",),
            ("weight_zero_point",),
            lambda z: {"weight_zero_point": column(_unsigned(z))},
        )
        return integer_spec(8, False, scale), (unsigned, stored_scale, zero_point), None

    def inputs(self, numbers: _Numbers) -> tuple[QuantSpec, tuple[StoredTensor, ...], Hashable]:
        """The same of activations."""
        zero_point = not numbers.symmetric
        spec = QuantSpec(
            numbers.element,
            scales=(Scale("float32", numbers.block),),
            zero_point=zero_point,
            static=not numbers.dynamic,
        )
        if numbers.dynamic:
            return spec, (), None
        names = ["input_scale", *(["input_zero_point"] if zero_point else [])]
        for name in names:
            stored_under(self.tensors, self.module, (name,), "activations are static")
        values = tuple(single_value(self.tensors, f"{self.module.name}.{name}") for name in names)
        return spec, tuple(single(self.tensors, self.module, name, name) for name in names), values

    @property
    def _size(self) -> tuple[int, int]:
        return self.module.out_features, self.module.in_features

    def _bytes(self, bits: int) -> int:
        return -(-self.module.in_features * bits // 8)

    def _weight_scale(self) -> tuple[Scale, StoredTensor]:
        block, (_, columns) = self.group.weights.block, self._size
        if block[0] == 1:
            check_groups(self.tensors, self.module, block[1])
        if self.group.format == _PACKED and columns * self.group.weights.bits % 8:
            raise CheckpointError(f"{self.tensors.title}: {self.module.name!r} has an odd number of 4-bit columns")
        name = f"{self.module.name}.weight_scale"
        info = self.tensors.info(name) if name in self.tensors.names else None
        scale = Scale(info.dtype if info else _SCALES[0], block)
        n, k = block
        dims: tuple[Dim, ...] = (_ONE if n == -1 else Dim("out", n), _ONE if k == -1 else Dim("in", k))
        if block == (-1, -1):
            dims = (_ONE,) * (len(info.shape) if info else 1)
        elif info and len(info.shape) == 1 and block == (1, -1):
            dims = (_OUT,)
        return scale, StoredTensor(
            "weight_scale", dims, _SCALES, ("weight_scale",), lambda x: {"weight_scale": column(x)}
        )

    def _weight_shape(self) -> StoredTensor:
        def read(shape: torch.Tensor) -> Mapping[str, torch.Tensor]:
            if tuple(shape.tolist()) != self._size:
                raise CheckpointError(f"is {shape.tolist()}, the model expects {list(self._size)}")
            return {}

        return StoredTensor("weight_shape", (Dim(None, 2),), ("int64", "int32"), (), read)

    def _packed_zero_points(self, scale: Scale, bits: int) -> StoredTensor:
        rows = self.module.out_features
        groups = Dim("in", scale.block[1]) if scale.block[1] != -1 else _ONE

        def read(words: torch.Tensor) -> Mapping[str, torch.Tensor]:
            return {"weight_zero_point": unpacked(words.t(), bits)[:, :rows].t()}

        dims = (Dim("out", 32 // bits), groups)
        return StoredTensor("weight_zero_point", dims, ("int32",), ("weight_zero_point",), read)

    def _permutation(self) -> str | None:
        """A digest of the columns' groups where they are not in order."""
        name = f"{self.module.name}.{stored_under(self.tensors, self.module, ('weight_g_idx',), 'actorder is set')}"
        groups = self.tensors.read(name).int()
        size = self.group.weights.block[1]
        if torch.equal(groups.long(), torch.arange(self.module.in_features) // size):
            return None
        return hashlib.sha256(groups.numpy().tobytes()).hexdigest()


def _unsigned(q: torch.Tensor) -> torch.Tensor:
    """int8 -> uint8, 128 more."""
    return q.contiguous().view(torch.uint8) ^ 0x80
