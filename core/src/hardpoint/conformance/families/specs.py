"""The pairs of specs that a contribution is tried with: made from the patterns that its manifest claims.

A pattern such as ``int8@*:row/int8@*:row+dynamic`` stands for many pairs. Each of its wildcards is replaced by values
of a vocabulary (the elements that can be rounded to, the formats and blocks that checkpoints have), so that each value
stands in one pair at least; a part without wildcards stands for itself, whatever it is. At level exhaustive every two
values stand together.
"""

from __future__ import annotations

import fnmatch
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Subject
from hardpoint.dtypes import dtype_of
from hardpoint.quantization.numerics import ELEMENTS, is_integer, largest
from hardpoint_plugin_api import CheckContext, QuantSpec, Reason, Request, Scale, SpecPattern, Workload
from hardpoint_plugin_api.requirements import SpecRequirement

Pair = tuple[QuantSpec, QuantSpec | None]
"""The specs of weights and of activations; None is the trial's dtype as it is."""

PLAIN = "plain"
_FORMATS = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "float8_e4m3fn")
_BLOCKS = ("row", "all", "1x32", "1x64", "1x128", "1x16", "128x128")
_TOKEN_BLOCKS = ("row", "1x128", "1x32", "1x64", "all")
_FLAGS = ("", "asym", "permuted", "asym+permuted")
_DTYPES = ("float32", "float16", "bfloat16")
_ANY_ACTIVATION = (
    "*float??",
    "int8@float32:row+dynamic",
    "float8_e4m3fn@float32:row+dynamic",
    "float8_e4m3fn@float32:1x128+dynamic",
    "int8@float32:all",
    "float8_e4m3fn@float32:all",
    "float8_e5m2@float32:all+dynamic",
)
_MOST_NORMAL = 3.0
"""What a static scale lets activations reach: a few normal numbers are larger, and saturate."""
_TRIES = 60
"""How often the rest of a pair is drawn anew, until it goes together with a value that no pair has yet."""


def pair_of(pairs: Mapping[str, Pair], name: str, dtype: str) -> tuple[QuantSpec, QuantSpec]:
    """The pair of that name for a trial in ``dtype``; the name ``plain`` is numbers of that dtype as they are."""
    plain = QuantSpec(dtype)
    weight, activation = pairs.get(name, (plain, plain))
    return weight, activation or plain


def static_scales(activation: QuantSpec) -> dict[str, torch.Tensor]:
    """The slots that a checkpoint holds of activations with a static scale: such that normal numbers just fit."""
    if activation.is_plain or not activation.static:
        return {}
    slots = {"input_scale": torch.tensor([_MOST_NORMAL / largest(activation.element)])}
    if activation.zero_point:
        slots["input_scale"] *= 2 if activation.element.startswith("uint") else 1
        middle = largest(activation.element) // 2 if activation.element.startswith("uint") else 3
        slots["input_zero_point"] = torch.tensor([middle], dtype=dtype_of(activation.zero_point_dtype))
    return slots


@dataclass(frozen=True)
class ClaimedSpecs:
    """What there is to try. ``pairs`` are the quantized ones by name; ``refused`` are patterns, or parts of them, of
    which no pair can be tried, with the reason.
    """

    pairs: Mapping[str, Pair]
    plain: bool
    refused: Mapping[str, Reason] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """All, plain first."""
        return [*([PLAIN] if self.plain else []), *self.pairs]


def claimed_specs(subject: Subject, plan: Plan, workload: Callable[..., Workload]) -> ClaimedSpecs:
    """Pairs that cover each pattern of the manifest.

    ``workload`` makes one of a pair (``spec``) and a ``dtype``, of a size that any pair goes with: the contribution's
    own ``supports`` is asked, and a pair that it refuses in every dtype is no pair.
    """
    needs = [r for r in subject.offer.contribution.requires if isinstance(r, SpecRequirement)]
    patterns = [pattern for need in needs for pattern in need.pairs] or ["*"]
    dtypes, rng = subject.dtypes(), random.Random(plan.seed)

    def refusal(pair: Pair) -> Reason | None:
        activation = pair[1]
        reasons = [
            subject.refuses(workload(dtype=dtype, spec=(pair[0], activation or QuantSpec(dtype)))) for dtype in dtypes
        ]
        return None if None in reasons else next(iter(reasons), None)

    pairs: dict[str, Pair] = {}
    refused: dict[str, Reason] = {}
    for pattern in patterns:
        weight, _, activation = pattern.partition("/")
        if "@" not in weight and weight != "*":
            continue  # plain numbers
        found, reasons = _cover(_Choices.of(weight, activation or "*"), refusal, rng, plan)
        pairs |= {written(pair): pair for pair in found}
        refused |= {f"{pattern} {value}".strip(): reason for value, reason in reasons.items()}
    return ClaimedSpecs(pairs, any(_claims_plain(subject, needs, workload, dtype) for dtype in dtypes), refused)


def written(pair: Pair) -> str:
    """A pair's name in a case: the weight's spec, then ``~`` and that of activations unless they stay as they are."""
    weight, activation = pair
    return str(weight) if activation is None else f"{weight}~{activation}"


def _claims_plain(
    subject: Subject, needs: Sequence[SpecRequirement], workload: Callable[..., Workload], dtype: str
) -> bool:
    plain = QuantSpec(dtype)
    context = CheckContext(
        Request(subject.site.platform.info, workload(dtype=dtype, spec=(plain, plain))), subject.offer.api
    )
    return all(need.check(context) is None for need in needs)


@dataclass(frozen=True)
class _Choices:
    """A pattern as factors, each with the values that its wildcards may stand for; ``make`` joins one of each."""

    factors: tuple[tuple[str, ...], ...]
    levels: int

    @classmethod
    def of(cls, weight: str, activation: str) -> _Choices:
        pattern = SpecPattern.parse("*@*:*+*" if weight == "*" else weight)
        factors = [_chosen(pattern.element, sorted(ELEMENTS))]
        for format_, block in pattern.scales:
            factors += [_chosen(format_, _FORMATS), _chosen(block, _BLOCKS)]
        flags = tuple("+".join(sorted(pattern.flags)).split()) or ("",)
        factors.append(_FLAGS if "*" in pattern.flags else flags)
        return cls((*factors, tuple(_activations(activation))), len(pattern.scales))

    def make(self, values: Sequence[str]) -> Pair | None:
        """The pair, None where the values do not go together."""
        element, *scales, flags, activation = values
        levels = "".join(f"@{scales[2 * i]}:{scales[2 * i + 1]}" for i in range(self.levels))
        weight = parsed(f"{element}{levels}" + (f"+{flags}" if flags else ""))
        other = None if "@" not in activation else parsed(activation)
        fits = _makes_sense(weight, of_weight=True) and (other is None or _makes_sense(other, of_weight=False))
        return (weight, other) if fits else None


def _chosen(glob: str, vocabulary: Sequence[str]) -> tuple[str, ...]:
    """What a part of a pattern stands for; itself where it holds no wildcard."""
    if not {"*", "?"} & set(glob):
        return (glob,)
    return tuple(value for value in vocabulary if fnmatch.fnmatchcase(value, glob)) or (glob,)


def _activations(pattern: str) -> Iterator[str]:
    """Written specs of activations; one without scales is the dtype as it is."""
    if pattern == "*":
        yield from _ANY_ACTIVATION
        return
    parts = SpecPattern.parse(pattern)
    if not parts.scales:
        yield pattern
        return
    elements = _chosen(parts.element, sorted(ELEMENTS))
    formats = [_chosen(format_, _FORMATS[:1]) for format_, _ in parts.scales]
    blocks = [_chosen(block, _TOKEN_BLOCKS) for _, block in parts.scales]
    flags = ("dynamic", "", "asym") if "*" in parts.flags else ("+".join(sorted(parts.flags)),)
    longest = max(map(len, (elements, *formats, *blocks, flags)))
    for i in range(longest):
        scales = "".join(f"@{f[i % len(f)]}:{b[i % len(b)]}" for f, b in zip(formats, blocks, strict=True))
        flag = flags[i % len(flags)]
        yield f"{elements[i % len(elements)]}{scales}" + (f"+{flag}" if flag else "")


def parsed(text: str) -> QuantSpec:
    """The spec that is written so, without wildcards."""
    parts = SpecPattern.parse(text)
    known = {"all": (-1, -1), "row": (1, -1)}
    scales = []
    for format_, block in parts.scales:
        rows, _, columns = block.partition("x")
        scales.append(Scale(format_, known.get(block) or (int(rows), int(columns))))
    return QuantSpec(
        parts.element,
        scales=tuple(scales),
        zero_point="asym" in parts.flags,
        static="dynamic" not in parts.flags,
        permuted="permuted" in parts.flags,
    )


def _makes_sense(spec: QuantSpec, *, of_weight: bool) -> bool:
    """Whether there can be such a matrix, and whether core's own rounding can make one."""
    if spec.zero_point and not is_integer(spec.element):
        return False
    if spec.zero_point and spec.scales[0].format not in _DTYPES:
        return False
    if any(scale.format == "float8_e4m3fn" for scale in spec.scales) and len(spec.scales) < 2:
        return False  # it reaches too few magnitudes to stand alone
    if spec.permuted and spec.scales[0].block[1] == -1:
        return False
    if of_weight:
        return spec.static and len(spec.scales) == 1 and not spec.permuted
    return not spec.static or spec.scales[0].block == (-1, -1)


def _cover(
    choices: _Choices, refusal: Callable[[Pair], Reason | None], rng: random.Random, plan: Plan
) -> tuple[list[Pair], dict[str, Reason]]:
    """Pairs in which each value stands (at level exhaustive each two values), and values that none can have."""
    strength = 2 if plan.level == "exhaustive" and len(choices.factors) > 1 else 1
    wanted = [
        dict(zip(numbers, values, strict=True))
        for numbers in itertools.combinations(range(len(choices.factors)), strength)
        for values in itertools.product(*(choices.factors[n] for n in numbers))
    ]
    found: list[Pair] = []
    rows: list[Sequence[str]] = []
    refused: dict[str, Reason] = {}
    for values in wanted:
        if any(all(row[n] == value for n, value in values.items()) for row in rows):
            continue
        reason: Reason | None = None
        for _ in range(_TRIES):
            row = [
                values[n] if n in values else _pick(rng, options, n, rows)
                for n, options in enumerate(choices.factors)
            ]
            pair = choices.make(row)
            if pair is None or len(pair[0].scales) != choices.levels:
                continue
            reason = refusal(pair)
            if reason is None:
                rows.append(row)
                found.append(pair)
                break
        else:
            told = " ".join(value or "no flag" for value in values.values())
            only = all(len(options) == 1 for options in choices.factors)
            if reason is not None:
                refused["" if only else f"({told})"] = reason
    return found, refused


def _pick(rng: random.Random, options: Sequence[str], number: int, rows: Sequence[Sequence[str]]) -> str:
    """One that no pair has yet, now and then, else any."""
    used = {row[number] for row in rows}
    rest = [option for option in options if option not in used]
    return rng.choice(rest if rest and rng.random() < 0.7 else options)
