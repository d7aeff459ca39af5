"""Tables of rotary embedding's cosines and sines, and what a Hugging Face config says about them.

Frequencies are computed in float32 on the host, step by step as Transformers 5 does (``modeling_rope_utils``), so that
the tables are equal to its own on every device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch

from hardpoint_plugin_api import CheckpointError, RopeArgs, nearest
from hardpoint_plugin_api.layers import RopeKind

_PARAMETERS: dict[RopeKind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
    ),
    "longrope": (("factor", "original_max_position_embeddings"), ("attention_factor",)),
}
"""The keys that each kind needs, and the keys that it may have."""

_MAY_BE_ZERO = ("mscale", "mscale_all_dim")
"""Zero leaves these out, as in Transformers."""

_LISTS = ("short_factor", "long_factor")
"""Of longrope: a divisor for each frequency."""

_NUM_POSITIONS = "num_positions"


def rope_table(args: RopeArgs, num_positions: int, device: torch.device) -> torch.Tensor:
    """The cosines and sines of positions 0 .. num_positions - 1: float32 [num_positions, R], R/2 cosines first.

    Both carry the attention factor of kinds that have one. The table of longrope has the long factors where it is
    longer than the original context, and the short ones elsewhere: for all its positions, as keys stay in the cache.
    """
    scaling = dict(args.scaling) | {_NUM_POSITIONS: float(num_positions)}
    frequencies, attention_factor = _KINDS[args.kind](args, scaling)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * attention_factor).to(device)


def rope_args(
    hf_config: Mapping[str, Any],
    head_size: int,
    *,
    interleaved: bool = False,
    layer_type: str | None = None,
    default_theta: float = 10_000.0,
    default_rotary: float = 1.0,
    file: str = "config.json",
) -> RopeArgs:
    """Read a config's rotary embedding: today's ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` before it.

    ``layer_type`` chooses where a config has parameters per type of layer; ``default_theta`` and ``default_rotary``
    (for ``partial_rotary_factor``) are the family's own, for configs that leave them out; ``file`` is where the config
    stands, for messages.
    Raises CheckpointError for an unknown type, and for a parameter that is missing, of the wrong kind or out of range.
    """
    found = _objects(hf_config, ("rope_scaling", "rope_parameters"), file)
    if layer_type is not None and layer_type in found:
        found = _objects(found, (layer_type,), file)
    if any(isinstance(value, Mapping) for value in found.values()):
        raise CheckpointError(
            f"{file}: rope_parameters are per type of layer ({', '.join(found)}), and this model has no such types"
        )
    kind = _kind(found)
    if not isinstance(kind, str) or kind not in _PARAMETERS:
        guess = nearest(str(kind), _PARAMETERS)
        raise CheckpointError(
            f"{file}: unknown rope type {kind!r}{f'; did you mean {guess!r}?' if guess else ''}; "
            f"known: {', '.join(get_args(RopeKind))}"
        )
    read = _Reader(hf_config, found, file)
    partial = read.number("partial_rotary_factor", default_rotary)
    rotary_dim = int(head_size * partial)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
        raise CheckpointError(
            f"{file}: partial_rotary_factor {partial} makes {rotary_dim} of {head_size} elements rotate; "
            "their number must be even, positive and no more than the head's"
        )
    return RopeArgs(
        rotary_dim=rotary_dim,
        theta=read.number("rope_theta", default_theta, above=1.0 if kind == "yarn" else 0.0),  # yarn divides by its log
        kind=kind,
        interleaved=interleaved,
        scaling=read.scaling(kind) + (read.lists(rotary_dim // 2) if kind == "longrope" else ()),
    )


def extended_length(hf_config: Mapping[str, Any], file: str = "config.json") -> int | None:
    """How many positions YaRN reaches, where a config names both its factor and the length that it extends."""
    found = _objects(hf_config, ("rope_scaling", "rope_parameters"), file)
    read, original = _Reader(hf_config, found, file), "original_max_position_embeddings"
    if _kind(found) != "yarn" or found.get("factor") is None or read.find(original) is None:
        return None
    return int(min(read.number("factor") * read.number(original), sys.maxsize))


def _kind(found: Mapping[str, Any]) -> Any:
    kind = next((found[key] for key in ("rope_type", "type") if found.get(key) is not None), "default")
    return "longrope" if kind == "su" else kind  # its name in the first configs of Phi-3


def _objects(config: Mapping[str, Any], keys: tuple[str, ...], file: str) -> Mapping[str, Any]:
    """The first of ``keys`` that holds anything; null counts as missing."""
    for key in keys:
        if not isinstance(config.get(key), Mapping | None):
            raise CheckpointError(f"{file}: {key!r} must be an object or null, got {config[key]!r:.80}")
    return next((config[key] for key in keys if config.get(key)), {})


class _Reader:
    """Looks a parameter up in the rope dictionary first, then in the config around it. Null counts as missing."""

    def __init__(self, config: Mapping[str, Any], found: Mapping[str, Any], file: str) -> None:
        self.config, self.found, self.file = config, found, file

    def number(self, key: str, default: float | None = None, above: float = 0.0) -> float:
        value = self.find(key, default)
        if type(value) in (int, float) and (
            above < value <= sys.float_info.max or (key in _MAY_BE_ZERO and value == 0)
        ):
            return float(value)
        raise CheckpointError(
            f"{self.file}: rope parameter {key!r} must be a finite number above {above:g}, got {value!r}"
        )

    def flag(self, key: str) -> bool:
        value = self.find(key)
        if type(value) is not bool:
            raise CheckpointError(f"{self.file}: rope parameter {key!r} must be true or false, got {value!r}")
        return value

    def find(self, key: str, default: Any = None) -> Any:
        places = (self.found, self.config)
        if key == "original_max_position_embeddings":  # some families hold it outside, and mean that one
            places = places[::-1]
        return next((place[key] for place in places if place.get(key) is not None), default)

    def scaling(self, kind: RopeKind) -> tuple[tuple[str, float], ...]:
        required, optional = _PARAMETERS[kind]
        length = self.config.get("max_position_embeddings")
        values = {}
        for key in required:
            default = length if key == "original_max_position_embeddings" else None
            if kind in ("yarn", "longrope") and key == "factor" and self.found.get(key) is None:
                default = self.number("max_position_embeddings") / self.number(required[1])
            values[key] = self.number(key, default)
        for key in optional:
            if self.found.get(key) is not None:
                values[key] = float(self.flag(key)) if key == "truncate" else self.number(key)
        if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
            raise CheckpointError(
                f"{self.file}: rope parameter 'high_freq_factor' must be above 'low_freq_factor', "
                f"got {values['high_freq_factor']:g} and {values['low_freq_factor']:g}"
            )
        return tuple(values.items())

    def lists(self, count: int) -> tuple[tuple[str, float], ...]:
        """The numbers of longrope's lists, ``count`` in each."""
        values: list[tuple[str, float]] = []
        for key in _LISTS:
            found = self.find(key)
            if not isinstance(found, list) or len(found) != count or not all(_is_positive(x) for x in found):
                raise CheckpointError(
                    f"{self.file}: rope parameter {key!r} must list {count} finite numbers above 0, got {found!r:.80}"
                )
            values += [(f"{key}.{number}", float(x)) for number, x in enumerate(found)]
        return tuple(values)


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max  # type: ignore[operator]  # a number


Scaling = Mapping[str, float]
Frequencies = tuple[torch.Tensor, float]
"""Angle per position, float32 [R/2], and the attention factor."""


def _wave(args: RopeArgs) -> torch.Tensor:
    return args.theta ** (torch.arange(0, args.rotary_dim, 2, dtype=torch.float32) / args.rotary_dim)


def _default(args: RopeArgs, scaling: Scaling) -> Frequencies:
    """Su et al. 2021, arXiv:2104.09864."""
    return 1.0 / _wave(args), 1.0


def _linear(args: RopeArgs, scaling: Scaling) -> Frequencies:
    """Position interpolation: Chen et al. 2023, arXiv:2306.15595."""
    return 1.0 / _wave(args) / scaling["factor"], 1.0


def _llama3(args: RopeArgs, scaling: Scaling) -> Frequencies:
    """Llama 3.1 (arXiv:2407.21783): long waves are stretched, short ones kept, those between interpolated."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    context = scaling["original_max_position_embeddings"]
    plain = 1.0 / _wave(args)
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > context / low, plain / factor, plain)
    smooth = (context / wavelength - low) / (high - low)
    between = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(between, (1 - smooth) * stretched / factor + smooth * stretched, stretched), 1.0


def _yarn(args: RopeArgs, scaling: Scaling) -> Frequencies:
    """YaRN: Peng et al. 2023, arXiv:2309.00071."""
    factor, context = scaling["factor"], scaling["original_max_position_embeddings"]

    def turns_at(rotations: float) -> float:
        """The dimension whose wave turns ``rotations`` times within the original context."""
        return args.rotary_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(args.theta))

    low, high = turns_at(scaling.get("beta_fast") or 32), turns_at(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, args.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(args.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    frequencies = 1.0 / (factor * _wave(args)) * (1 - keep) + 1.0 / _wave(args) * keep
    return frequencies, scaling.get("attention_factor", _yarn_attention_factor(factor, scaling))


def _longrope(args: RopeArgs, scaling: Scaling) -> Frequencies:
    """LongRoPE: Ding et al. 2024, arXiv:2402.13753."""
    factor, context = scaling["factor"], scaling["original_max_position_embeddings"]
    name = "long_factor" if scaling[_NUM_POSITIONS] > context else "short_factor"
    stretch = torch.tensor([scaling[f"{name}.{number}"] for number in range(args.rotary_dim // 2)])
    grown = math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0
    return 1.0 / (stretch * _wave(args)), scaling.get("attention_factor", grown)


def _yarn_attention_factor(factor: float, scaling: Scaling) -> float:
    """The paper's recommendation, 0.1 ln(factor) + 1; or the ratio of two such, with the config's own weights."""

    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if above and below:
        return yarn_growth(factor, above) / yarn_growth(factor, below)
    return yarn_growth(factor, 1.0)


def yarn_growth(factor: float, weight: float) -> float:
    """By how much queries and keys grow where YaRN extends a context ``factor`` times (arXiv:2309.00071, section 3.4).

    ``weight`` is 1 in the paper; DeepSeek's configs have others.
    """
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


_KINDS: dict[RopeKind, Callable[[RopeArgs, Scaling], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
