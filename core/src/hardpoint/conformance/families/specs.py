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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Subject
from hardpoint.conformance.trials import Trial
from hardpoint.numerics import calibrate
from hardpoint.plugin_host import PluginSet
from hardpoint.quantization.elements import element, known_elements
from hardpoint_plugin_api import QuantSpec, Reason, Scale, SpecPattern, Workload
from hardpoint_plugin_api.requirements import Requirement, SpecRequirement

Pair = tuple[QuantSpec, QuantSpec | None]
"""The specs of weights and of activations; None is the trial's dtype as it is."""

PLAIN = "plain"
_WHOLE = ("uint8", "int8")
_FORMATS = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "float8_e4m3fn", *_WHOLE)
_BLOCKS = ("row", "all", "1x32", "1x64", "1x128", "1x16", "128x128")
_TOKEN_BLOCKS = ("row", "1x128", "1x32", "1x64", "all")
_E4M3 = "float8_e4m3fn"
_FLAGS = ("", "asym", "permuted", "asym+permuted", "min")
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
"""The largest magnitude that a static scale of activations admits: a few normal numbers are larger, and saturate."""
_TRIES = 60
"""How often the rest of a pair is drawn anew, until it goes together with a value that no pair has yet."""


def pair_of(pairs: Mapping[str, Pair], name: str, dtype: str) -> tuple[QuantSpec, QuantSpec]:
    """The pair of that name for a trial in ``dtype``; the name ``plain`` is numbers of that dtype as they are."""
    plain = QuantSpec(dtype)
    weight, activation = pairs.get(name, (plain, plain))
    return weight, activation or plain


def static_scales(activation: QuantSpec) -> dict[str, torch.Tensor]:
    """The slots that a checkpoint holds of activations: with scales such that most normal numbers just fit."""
    return calibrate(torch.linspace(-_MOST_NORMAL, _MOST_NORMAL, 64)[None], activation)


@dataclass(frozen=True)
class ClaimedSpecs:
    """The pairs of specs to try. ``pairs`` are the quantized ones by name; ``served`` says in which dtypes each is
    claimed, the plain one included. ``refused`` are patterns, or parts of them, of which the contribution serves no
    pair, and ``unknown`` are patterns of elements that nobody offers, each with the reason.
    """

    pairs: Mapping[str, Pair]
    served: Mapping[str, Sequence[str]]
    refused: Mapping[str, Reason] = field(default_factory=dict)
    unknown: Mapping[str, Reason] = field(default_factory=dict)

    def untried(self) -> Iterator[Trial]:
        """A trial for each pattern, or part of one, that cannot be tried, with the reason.

        A spec that the contribution itself refuses was asked for; a spec whose inputs the kit cannot make stays
        unproved.
        """
        for pattern, reason in self.refused.items():
            yield Trial(_case(pattern), unsupported=reason, claims=(f"spec {pattern.partition(' ')[0]}",))
        for pattern, reason in self.unknown.items():
            yield Trial(_case(pattern), unsupported=reason)

    @property
    def dtypes(self) -> list[str]:
        """The dtypes in which any pair is claimed."""
        return list(dict.fromkeys(dtype for dtypes in self.served.values() for dtype in dtypes))

    def is_foreign(self, dtype: str, name: str) -> bool:
        """Whether the pair of that name is not claimed in ``dtype``."""
        return dtype not in self.served[name]


def _case(pattern: str) -> str:
    return f"spec/{pattern.replace('/', '~')}"


def claimed_specs(subject: Subject, plan: Plan, workloads: Sequence[Callable[..., Workload]]) -> ClaimedSpecs:
    """Pairs that cover each pattern of the manifest.

    Each of ``workloads`` makes one of a pair (``spec``) and a ``dtype``, in another size: the contribution's own
    ``supports`` is asked, and a pair that it refuses in every dtype and size is no pair.
    """
    patterns = _patterns(subject, subject.offer.contribution.requirements)
    dtypes, rng = subject.dtypes(), random.Random(plan.seed)

    def refused_in(pair: Pair, dtype: str) -> Reason | None:
        spec = pair[0], pair[1] or QuantSpec(dtype)
        reasons = [subject.refuses(workload(dtype=dtype, spec=spec)) for workload in workloads]
        return None if None in reasons else reasons[0]

    def refusal(pair: Pair) -> Reason | None:
        reasons = [refused_in(pair, dtype) for dtype in dtypes]
        return None if None in reasons else next(iter(reasons), None)

    pairs: dict[str, Pair] = {}
    refused: dict[str, Reason] = {}
    unknown: dict[str, Reason] = {}
    for pattern in patterns:
        weight, _, activation = pattern.partition("/")
        if "@" not in weight and weight != "*":  # plain numbers
            named = [dtype for dtype in dtypes if fnmatch.fnmatchcase(dtype, weight)]
            plain_reasons = [refused_in((QuantSpec(dtype), None), dtype) for dtype in named]
            if plain_reasons and all(plain_reasons):
                refused[pattern] = cast(Reason, plain_reasons[0])
            continue
        if foreign := _foreign_element(subject.site.plugins, weight, activation):
            unknown[pattern] = Reason("element", "no plugin offers such an element", wanted=foreign)
            continue
        choices = _Choices.of(weight, activation or "*", subject.site.plugins)
        found, reasons = _cover(choices, refusal, rng, plan)
        pairs |= {written(pair): pair for pair in found}
        refused |= {f"{pattern} {value}".strip(): reason for value, reason in reasons.items()}
    plain = [dtype for dtype in dtypes if refused_in((QuantSpec(dtype), None), dtype) is None]
    served = {PLAIN: plain} if plain else {}
    for name, pair in pairs.items():
        served[name] = [dtype for dtype in dtypes if refused_in(pair, dtype) is None]
    return ClaimedSpecs(pairs, served, refused, unknown)


def claimed_input_specs(subject: Subject) -> list[QuantSpec]:
    """The specs of activations that cover each pattern of the manifest which names one: the claims of an op."""
    plugins = subject.site.plugins
    known = known_elements(plugins)
    claimed = _patterns(subject, subject.offer.contribution.requires)
    patterns = [p for p in claimed if "@" in p and not _foreign_element(plugins, p)]
    texts = dict.fromkeys(text for pattern in patterns for text in _activations(pattern, known))
    specs = [parsed(text, plugins) for text in texts]
    return [spec for spec in specs if _makes_sense(spec, of_weight=False)]


def _patterns(subject: Subject, requires: Iterable[Requirement]) -> list[str]:
    """The patterns of specs among requirements, as they are on the subject's device."""
    needs = [r for r in requires if isinstance(r, SpecRequirement)]
    return [pair for need in needs for pair in need.on(subject.site.platform.info)]


def _foreign_element(plugins: PluginSet, *sides: str) -> str | None:
    """An element of a pattern's two sides that has a name and is not known."""
    known = known_elements(plugins)
    named = [SpecPattern.parse(side).element for side in sides if "@" in side]
    return next((name for name in named if not {"*", "?"} & set(name) and name not in known), None)


def written(pair: Pair) -> str:
    """A pair's name in a case: the weight's spec, then ``~`` and that of activations unless they stay as they are."""
    weight, activation = pair
    return str(weight) if activation is None else f"{weight}~{activation}"


@dataclass(frozen=True)
class _Choices:
    """A pattern as factors, each with the values that its wildcards may stand for; ``make`` joins one of each."""

    factors: tuple[tuple[str, ...], ...]
    levels: int
    plugins: PluginSet

    @classmethod
    def of(cls, weight: str, activation: str, plugins: PluginSet) -> _Choices:
        """The factors of a pattern's two sides; elements are those that plugins offer."""
        pattern = SpecPattern.parse("*@*:*+*" if weight == "*" else weight)
        elements = known_elements(plugins)
        factors = [_chosen(pattern.element, elements)]
        for format_, block in pattern.scales:
            factors += [_chosen(format_, _FORMATS), _chosen(block, _BLOCKS)]
        flags = tuple("+".join(sorted(pattern.flags)).split()) or ("",)
        factors.append(_FLAGS if "*" in pattern.flags else flags)
        return cls((*factors, tuple(_activations(activation, elements))), len(pattern.scales), plugins)

    def make(self, values: Sequence[str]) -> Pair | None:
        """The pair, None where the values do not go together."""
        name, *scales, flags, activation = values
        levels = "".join(f"@{scales[2 * i]}:{scales[2 * i + 1]}" for i in range(self.levels))
        weight = parsed(f"{name}{levels}" + (f"+{flags}" if flags else ""), self.plugins)
        other = None if "@" not in activation else parsed(activation, self.plugins)
        fits = _makes_sense(weight, of_weight=True) and (other is None or _makes_sense(other, of_weight=False))
        return (weight, other) if fits else None


def _chosen(glob: str, vocabulary: Sequence[str]) -> tuple[str, ...]:
    """The values that a part of a pattern stands for; itself where it holds no wildcard."""
    if not {"*", "?"} & set(glob):
        return (glob,)
    return tuple(value for value in vocabulary if fnmatch.fnmatchcase(value, glob)) or (glob,)


def _activations(pattern: str, known: Sequence[str]) -> Iterator[str]:
    """Written specs of activations; one without scales is the dtype as it is."""
    if pattern == "*":
        yield from _ANY_ACTIVATION
        return
    parts = SpecPattern.parse(pattern)
    if not parts.scales:
        yield pattern
        return
    elements = _chosen(parts.element, known)
    formats = [_chosen(format_, _FORMATS[:1]) for format_, _ in parts.scales]
    blocks = [_chosen(block, _TOKEN_BLOCKS) for _, block in parts.scales]
    flags = ("dynamic", "", "asym") if "*" in parts.flags else ("+".join(sorted(parts.flags)),)
    longest = max(map(len, (elements, *formats, *blocks, flags)))
    for i in range(longest):
        scales = "".join(f"@{f[i % len(f)]}:{b[i % len(b)]}" for f, b in zip(formats, blocks, strict=True))
        flag = flags[i % len(flags)]
        yield f"{elements[i % len(elements)]}{scales}" + (f"+{flag}" if flag else "")


def parsed(text: str, plugins: PluginSet) -> QuantSpec:
    """The spec that is written so, without wildcards. Raises UnknownNameError for an element that nobody offers."""
    parts = SpecPattern.parse(text)
    known = {"all": (-1, -1), "row": (1, -1)}
    scales = []
    for format_, block in parts.scales:
        rows, _, columns = block.partition("x")
        scales.append(Scale(format_, known.get(block) or (int(rows), int(columns))))
    return QuantSpec.of(
        element(parts.element, plugins),
        scales,
        zero_point="asym" in parts.flags,
        static="dynamic" not in parts.flags,
        permuted="permuted" in parts.flags,
        minimum="min" in parts.flags,
    )


def _makes_sense(spec: QuantSpec, *, of_weight: bool) -> bool:
    """Whether there can be such a matrix."""
    if spec.zero_point and not (spec.number_format.takes_zero_point and spec.scales[0].format in _DTYPES):
        return False
    if any(scale.format == _E4M3 for scale in spec.scales) and (len(spec.scales) < 2 or spec.scales[1].format == _E4M3):
        return False  # it reaches too few magnitudes to stand alone
    formats = [scale.format for scale in spec.scales]
    if set(formats) & {*_WHOLE} and [format_ in _DTYPES for format_ in formats] != [False, True]:
        return False  # whole numbers say how many of an outer scale there are
    if spec.minimum and (spec.number_format.values[0] < 0 or set(formats) - {"uint8", *_DTYPES}):
        return False  # codes count from the least number on, which is as many of an outer one
    if len(spec.scales) > 1 and not _is_part(spec.scales[0].block, spec.scales[1].block):
        return False
    if spec.permuted and [scale.block[1] == -1 for scale in spec.scales] != [False, *[True] * (len(spec.scales) - 1)]:
        return False  # one index says to which group of one level a column belongs
    if of_weight:
        return spec.static
    return not spec.static or spec.scales[0].block == (-1, -1)


def _is_part(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    """Whether blocks of the first level lie within those of the second, and are smaller."""
    return inner != outer and all(o == -1 or (i != -1 and o % i == 0) for i, o in zip(inner, outer, strict=True))


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
                values[n] if n in values else _pick(rng, options, n, rows) for n, options in enumerate(choices.factors)
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
