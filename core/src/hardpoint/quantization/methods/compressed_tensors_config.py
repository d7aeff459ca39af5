"""The config groups of ``compressed-tensors``, read with clear errors."""

from __future__ import annotations

from dataclasses import dataclass

from hardpoint.quantization.methods.block_floats import MX_GROUP, NV_GROUP
from hardpoint.quantization.methods.settings import Settings
from hardpoint_plugin_api import CheckpointError, Scale

PACKED = "pack-quantized"
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
BY_ELEMENT = ("int-quantized", "float-quantized", "naive-quantized")
_FORMATS = (PACKED, *BY_ELEMENT, NVFP4, MXFP4, MXFP8)
_GROUPS = {NVFP4: NV_GROUP, MXFP4: MX_GROUP, MXFP8: MX_GROUP}
"""Formats of floats with 8-bit scales, and how many columns share one."""
_FLOAT_BITS = {NVFP4: 4, MXFP4: 4}
_E4M3, _E8M0 = "float8_e4m3fn", "float8_e8m0fnu"


@dataclass(frozen=True)
class Numbers:
    """The weights or the activations of a group. ``scales``: the levels, their formats a weight's where it has none."""

    element: str
    bits: int
    symmetric: bool
    block: tuple[int, int]
    dynamic: bool
    reordered: bool
    scales: tuple[Scale, ...]

    @property
    def is_float(self) -> bool:
        """Whether elements are floats."""
        return self.element.startswith("float")


@dataclass(frozen=True)
class Group:
    """One config group."""

    targets: tuple[str, ...]
    format: str
    weights: Numbers
    inputs: Numbers | None


def read_groups(settings: Settings) -> list[Group]:
    """The groups of a quantization_config. Raises CheckpointError, naming the key, for what is not read."""
    format_, groups = settings.get("format", None), settings.table("config_groups")
    return [_read_group(groups, name, format_) for name in groups.names] if groups else []


def _read_group(groups: Settings, name: str, format_: object) -> Group:
    settings = groups.table(name)
    if settings is None:
        raise groups.wrong(name, "must be an object")
    if settings.get("output_activations", None) is not None:
        raise settings.wrong("output_activations", "are not supported: must be null")
    weights = settings.table("weights")
    if weights is None:
        raise settings.wrong("weights", "must say how weights are quantized")
    own = settings.get("format", None) or format_
    if own not in _FORMATS:
        raise CheckpointError(f"{weights.where}: the format {own!r} is not supported; supported: {', '.join(_FORMATS)}")
    inputs = settings.table("input_activations")
    numbers = None if inputs is None else _read_inputs(inputs)
    return Group(settings.names_of("targets"), str(own), _read_weights(weights, str(own)), numbers)


def _read_weights(settings: Settings, format_: str) -> Numbers:
    if format_ in _GROUPS:
        return _read_block_floats(settings, format_)
    kind = settings.one_of("type", ("int", "float"), "int")
    bits: int = settings.one_of("num_bits", (4, 8) if kind == "int" else (8,), 8)
    strategy = settings.one_of("strategy", ("tensor", "channel", "group", "block"), _guess(settings))
    if settings.one_of("dynamic", (True, False), False):
        raise settings.wrong("dynamic", f"does not go with strategy {strategy!r} of weights")
    actorder = settings.get("actorder", None)
    if actorder not in (None, False, True, "group", "dynamic", "weight", "static"):
        raise settings.wrong("actorder", "must be one of group, weight")
    return Numbers(
        element=_E4M3 if kind == "float" else f"int{bits}",
        bits=bits,
        symmetric=settings.flag("symmetric", True),
        block=_block(settings, strategy),
        dynamic=False,
        reordered=actorder in (True, "group", "dynamic"),
        scales=(),
    )


def _read_block_floats(settings: Settings, format_: str) -> Numbers:
    """Weights in a format that fixes everything: what the config says beyond its name must agree."""
    group, bits = _GROUPS[format_], _FLOAT_BITS.get(format_, 8)
    settings.one_of("type", ("float",))
    settings.one_of("num_bits", (bits,))
    settings.one_of("strategy", ("tensor_group",) if format_ == NVFP4 else ("group",))
    settings.one_of("group_size", (group,))
    settings.one_of("symmetric", (True,), True)
    settings.one_of("dynamic", (False,), False)
    return Numbers(_E4M3 if bits == 8 else "float4_e2m1", bits, True, (1, group), False, False, ())


def _read_inputs(settings: Settings) -> Numbers:
    kind = settings.one_of("type", ("int", "float"), "int")
    bits: int = settings.one_of("num_bits", (4, 8) if kind == "float" else (8,), 8)
    strategy = settings.one_of("strategy", ("tensor", "token", "group", "tensor_group"), _guess(settings))
    dynamic = settings.one_of("dynamic", (True, False, "local"), False)
    if (strategy == "tensor_group") != (dynamic == "local") or (not dynamic and strategy in ("token", "group")):
        raise settings.wrong("dynamic", f"does not go with strategy {strategy!r} of activations")
    block = _block(settings, strategy)
    element = f"int{bits}" if kind == "int" else _E4M3 if bits == 8 else "float4_e2m1"
    if strategy == "tensor_group":
        scales: tuple[Scale, ...] = (Scale(_E4M3, block), Scale("float32", (-1, -1)))
    elif bits == 4 or str(settings.get("scale_dtype", None)).endswith("uint8"):
        settings.one_of("group_size", (MX_GROUP,))
        scales = (Scale(_E8M0, block),)
    else:
        scales = (Scale("float32", block),)
    return Numbers(element, bits, settings.flag("symmetric", True), block, bool(dynamic), False, scales)


def _guess(settings: Settings) -> str:
    """The strategy that a config means that names none."""
    group = settings.get("group_size", None)
    return "tensor" if group is None else "channel" if group == -1 else "group"


def _block(settings: Settings, strategy: str) -> tuple[int, int]:
    if strategy in ("group", "tensor_group"):
        return 1, settings.integer("group_size")
    if strategy == "block":
        block = settings.block("block_structure")
        if block is None:
            raise settings.wrong("block_structure", "must give rows and columns for strategy 'block'")
        return block
    return (-1, -1) if strategy == "tensor" else (1, -1)
