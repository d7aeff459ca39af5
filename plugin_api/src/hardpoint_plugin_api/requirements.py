"""Requirements: data with one method, ``check(context) -> Reason | None``.

The vocabulary is closed per manifest schema; ``parse_requirement`` turns a manifest's table into one of these.
No check imports a plugin or a vendor's library: packages are looked up in their metadata, and a symbol's module is
located with ``find_spec`` on the top-level name alone (a dotted name would import its parents).
"""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import cast

import importlib_metadata
from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as PackageSpec

from hardpoint_plugin_api.cache import NVFP4
from hardpoint_plugin_api.device import DeviceInfo
from hardpoint_plugin_api.distributions import installed_version, locate_module, owner_of
from hardpoint_plugin_api.elements import DEVICE_FP8
from hardpoint_plugin_api.errors import ManifestError, nearest
from hardpoint_plugin_api.families import Family
from hardpoint_plugin_api.quant import check_pattern, matches
from hardpoint_plugin_api.reasons import Reason
from hardpoint_plugin_api.requests import FEATURE_SINCE, Feature, Phase, Request, ScalarValue
from hardpoint_plugin_api.versions import ApiVersion


@dataclass(frozen=True)
class CheckContext:
    """The context of checking a requirement: the request, and the API version that the plugin was built for."""

    request: Request
    plugin_api: ApiVersion


class Requirement(ABC):
    """One condition on the request, the device or the environment."""

    @abstractmethod
    def check(self, context: CheckContext) -> Reason | None:
        """Return the reason why ``context`` does not meet this requirement, or None where it does."""


@dataclass(frozen=True)
class PackageRequirement(Requirement):
    """A distribution is installed, in a version that its specifier admits (PEP 508).

    ``specs`` are alternatives, of which one suffices: one library may be published under a name for each platform.
    """

    specs: tuple[str, ...]

    @property
    def spec(self) -> str:
        """The alternative that is installed in an admitted version; else one that is installed; else the first."""
        reasons = {spec: _package_reason(spec) for spec in self.specs}
        found = next((spec for spec, reason in reasons.items() if reason is None), None)
        other = next((spec for spec, reason in reasons.items() if reason and reason.code == "package-version"), None)
        return found or other or self.specs[0]

    def check(self, context: CheckContext) -> Reason | None:
        return _package_reason(self.spec)


_package_spec = cache(PackageSpec)


def _package_reason(text: str) -> Reason | None:
    """Why the distribution of a PEP 508 text does not serve, None where it does."""
    spec, fix = _package_spec(text), f"pip install '{text}'"
    version = installed_version(spec.name)
    if version is None:
        return Reason("package-missing", f"package {spec.name} is not installed", wanted=text, fix=fix)
    if spec.specifier.contains(version, prereleases=True):
        return None
    message = f"package {spec.name} has an unsuitable version"
    return Reason("package-version", message, wanted=text, supported=version, fix=fix)


@dataclass(frozen=True)
class SymbolRequirement(Requirement):
    """``module:attribute`` of a named distribution.

    Before import only the module's top-level name is located, and refused if it lies outside the files of
    ``distribution``: an import name proves nothing (two unrelated distributions provide ``aiter``). The attribute
    itself is looked at when the winner's target is loaded.
    """

    module: str
    attribute: str
    distribution: str

    def check(self, context: CheckContext) -> Reason | None:
        return self.locate()

    def locate(self) -> Reason | None:
        """Return the reason why the module may not be imported, or None where it is the distribution's own."""
        top = self.module.partition(".")[0]
        try:
            distribution = importlib_metadata.Distribution.from_name(self.distribution)
        except importlib_metadata.PackageNotFoundError:
            owner = owner_of(top, other_than=self.distribution)
            return Reason(
                "package-missing",
                f"package {self.distribution} is not installed"
                + (f"; the module {top} that is here is a namesake, from {owner}" if owner else ""),
                fix=(f"pip uninstall {owner}; " if owner else "") + f"pip install {self.distribution}",
            )
        place = locate_module(distribution, top)
        return place if isinstance(place, Reason) else None


OF_PACKAGES = (PackageRequirement, SymbolRequirement)
"""Requirements on what is installed, whatever the request."""


@dataclass(frozen=True)
class ArchRequirement(Requirement):
    """The device's architecture matches one of the globs. There is no ``>=``: sm_120 is no superset of sm_100."""

    globs: tuple[str, ...]

    def check(self, context: CheckContext) -> Reason | None:
        arch = context.request.device.arch
        if any(fnmatch.fnmatchcase(arch, glob) for glob in self.globs):
            return None
        return Reason("arch", "device architecture not supported", wanted=arch, supported=", ".join(self.globs))


@dataclass(frozen=True)
class DeviceFeatureRequirement(Requirement):
    """The device has every named feature."""

    names: tuple[str, ...]

    def check(self, context: CheckContext) -> Reason | None:
        device = context.request.device
        missing = sorted(set(self.names) - device.features)
        if not missing:
            return None
        mendable = dict(device.absent_features)
        if all(name in mendable for name in missing):
            return mendable[missing[0]]
        return Reason(
            "device-feature",
            f"the device lacks {', '.join(missing)}",
            wanted=", ".join(self.names),
            supported=", ".join(sorted(device.features)) or None,
        )


@dataclass(frozen=True)
class OneOfRequirement(Requirement):
    """A field of the workload, where the request sets it, is one of the values.

    The cache dtype ``fp8`` is the device's 8-bit float; a device without one has no such cache.
    """

    key: str
    values: tuple[str | int, ...]

    def check(self, context: CheckContext) -> Reason | None:
        value = getattr(context.request.workload, self.key, None)
        plain = value if isinstance(value, int) else str(value)
        values = self.on(context.request.device)
        if value is None or plain in values:
            return None
        code = self.key.replace("_", "-")
        supported = ", ".join(str(v) for v in values)
        return Reason(code, f"{self.key} not supported", wanted=str(value), supported=supported)

    def on(self, device: DeviceInfo) -> tuple[str | int, ...]:
        """Return the values as they are on ``device``."""
        if self.key != "kv_dtype" or DEVICE_FP8 not in self.values or device.fp8 is None:
            return self.values
        return tuple(device.fp8.dtype if value == DEVICE_FP8 else value for value in self.values)


@dataclass(frozen=True)
class SpecRequirement(Requirement):
    """The quantization specs are one of the pairs, written ``weight/activation`` as ``quant.py`` says, with wildcards.

    Where experts' w2 has specs of its own, they are one of the pairs, too: any two pairs may meet.
    The element ``fp8`` is the device's 8-bit float; no spec matches it where the device has none.
    """

    pairs: tuple[str, ...]

    def check(self, context: CheckContext) -> Reason | None:
        workload, pairs = context.request.workload, self.on(context.request.device)
        for spec in (getattr(workload, "spec", None), getattr(workload, "w2_spec", None)):
            specs = spec if isinstance(spec, tuple) else (spec,)
            if spec is not None and not any(matches(pair, specs) for pair in pairs):
                wanted = "/".join(map(str, specs))
                return Reason("spec", "quantization specs not supported", wanted=wanted, supported=", ".join(pairs))
        return None

    def on(self, device: DeviceInfo) -> tuple[str, ...]:
        """Return the pairs as they are on ``device``."""
        if device.fp8 is None:
            return self.pairs
        element = device.fp8.dtype
        return tuple(_ELEMENT_FP8.sub(element, pair) for pair in self.pairs)


@dataclass(frozen=True)
class ScalarRequirement(Requirement):
    """A ``static`` keyword argument of the op must have one of ``values``.

    The layer that binds the op gives the values of static arguments. Where it leaves this argument out, a later call
    could have any value, so the contribution is rejected. Numbers do not match booleans: 1 is not true.
    """

    name: str
    values: tuple[ScalarValue, ...]

    def check(self, context: CheckContext) -> Reason | None:
        workload = context.request.workload
        told = dict(getattr(workload, "scalars", ()))
        supported = ", ".join(map(str, self.values))
        if self.name not in told:
            message = f"the value of {self.name} is not known when the op is bound"
            fix = None
            if hasattr(workload, self.name):
                message = f"{self.name} is a field of the op's workload, and none of its static arguments"
                fix = f"in the plugin's manifest, write {{ {self.name} = ... }} in place of {{ scalar = ... }}"
            return Reason("scalar", message, ", ".join(told) or None, f"{self.name} = {supported}", fix)
        value = told[self.name]
        if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.values):
            return None
        return Reason("scalar", f"{self.name} not supported", wanted=str(value), supported=supported)


@dataclass(frozen=True)
class HeadMultipleRequirement(Requirement):
    """The head size is a multiple of ``multiple``. Core can meet this by padding: see the generated ``+padN`` rows."""

    multiple: int

    def check(self, context: CheckContext) -> Reason | None:
        head_size = getattr(context.request.workload, "head_size", None)
        if head_size is None or head_size % self.multiple == 0:
            return None
        return Reason(
            "head-multiple",
            "head size is not a multiple of what the kernel needs",
            wanted=str(head_size),
            supported=f"multiples of {self.multiple}",
        )


@dataclass(frozen=True)
class FeatureRequirement(Requirement):
    """The contribution claims these workload features; any other that is in use rejects it.

    A contribution without this requirement claims none.
    """

    names: tuple[str, ...]

    def check(self, context: CheckContext) -> Reason | None:
        missing = sorted(context.request.workload.features - set(self.names))
        if not missing:
            return None
        newer = [f for f in missing if FEATURE_SINCE[Feature(f)] > context.plugin_api]
        if newer:
            return Reason(
                "predates-feature",
                f"the plugin was written before {', '.join(newer)} existed",
                wanted=", ".join(f"{f} (API {FEATURE_SINCE[Feature(f)]})" for f in newer),
                supported=f"API {context.plugin_api}",
                fix="upgrade the plugin",
            )
        return Reason(
            "feature",
            f"{', '.join(missing)} not supported",
            wanted=", ".join(sorted(context.request.workload.features)),
            supported=", ".join(self.names) or None,
        )


@dataclass(frozen=True)
class TokensRequirement(Requirement):
    """The range of scheduled tokens per step, and the phase, that the contribution is for.

    The selector builds a plan with a winner per range and phase. It rejects by itself only what is not for all steps
    where a request must be served alike in all of them.
    """

    min: int = 1
    max: int | None = None
    phase: Phase | None = None

    def check(self, context: CheckContext) -> Reason | None:
        if self == TokensRequirement() or Feature.BATCH_INVARIANT not in context.request.workload.features:
            return None
        return Reason(
            "tokens",
            f"it is for some steps only, and {Feature.BATCH_INVARIANT} asks for one implementation in all",
            wanted="steps of any size and phase",
            supported=f"{self.min} to {self.max or 'any number of'} tokens" + (f", {self.phase}" if self.phase else ""),
        )


def applies(key: str, family: Family, of: str | None = None) -> bool:
    """Say whether a contribution to ``family``, of ``of`` where that is given, may have the requirement ``key``."""
    if key == "tokens":
        return family.stepwise != "no"
    return key not in _WORKLOAD_KEYS or family.takes(
        {"head_multiple": "head_size", "feature": "features", "scalar": "scalars"}.get(key, key), of
    )


def parse_requirement(table: Mapping[str, object], family: Family, where: str, of: str | None = None) -> Requirement:
    """Turn one table of a manifest's ``requires`` into a requirement.

    Raises ManifestError, which names ``where``, for an unknown key (then the plugin is newer than this host, or the
    key is misspelt), for a key that the workloads of ``family`` (and ``of``) have no field for, and for a value of the
    wrong type.
    """
    rest = dict(table)
    distribution = rest.pop("from", None)
    if len(rest) != 1:
        raise ManifestError(f"{where}: a requirement has exactly one key, got {sorted(table)}")
    key, value = next(iter(rest.items()))
    parse = _PARSERS.get(key)
    if parse is None:
        guess = nearest(key, _PARSERS)
        raise ManifestError(
            f"{where}: unknown requirement {key!r}{f' (did you mean {guess!r}?)' if guess else ''}; "
            "if it is no misspelling, the plugin is newer than this Hardpoint: pip install --upgrade hardpoint-core"
        )
    if key != "tokens" and not applies(key, family, of):
        kind = f" of {of!r}" if family.kinds and of else ""
        raise ManifestError(f"{where}: requirement {key!r} does not apply to family {family.name!r}{kind}")
    if (distribution is not None) != (key == "symbol"):
        raise ManifestError(
            f"{where}: 'symbol' needs 'from', the distribution it must come from, and nothing else has it"
        )
    if not applies(key, family):
        raise ManifestError(
            f"{where}: requirement 'tokens' does not apply to {family.name!r}: it serves every step alike"
        )
    if key == "tokens" and family.stepwise == "size" and isinstance(value, dict) and "phase" in value:
        raise ManifestError(f"{where}: only attention tells phases apart; {family.name!r} knows a step's size alone")
    try:
        return parse({"symbol": value, "from": distribution} if key == "symbol" else value)
    except (TypeError, ValueError, InvalidRequirement) as error:
        raise ManifestError(f"{where}: requirement {key!r}: {error}") from error


def _texts(value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not items or not all(isinstance(i, str) for i in items):
        raise ValueError(f"expected a text or a list of texts, got {value!r}")
    return tuple(items)


def _numbers(value: object) -> tuple[int, ...]:
    items = [value] if isinstance(value, int) else value
    if not isinstance(items, list) or not items or not all(type(i) is int for i in items):
        raise ValueError(f"expected a whole number or a list of them, got {value!r}")
    return tuple(items)


def _package(value: object) -> Requirement:
    texts = _texts(value)
    for text in texts:
        _package_spec(text)
    return PackageRequirement(texts)


def _symbol(value: object) -> Requirement:
    table = cast(dict[str, object], value)
    (text,) = _texts(table["symbol"])
    (distribution,) = _texts(table["from"])
    module, colon, attribute = text.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"expected 'module:attribute', got {text!r}")
    return SymbolRequirement(module, attribute, distribution)


def _spec(value: object) -> Requirement:
    pairs = _texts(value)
    for pair in pairs:
        check_pattern(pair)
    return SpecRequirement(pairs)


def _head_multiple(value: object) -> Requirement:
    (number,) = _numbers(value)
    if number < 1:
        raise ValueError(f"expected a positive number, got {number}")
    return HeadMultipleRequirement(number)


def _features(value: object) -> Requirement:
    known = [feature.value for feature in Feature]
    return FeatureRequirement(() if value == [] else _known("feature", _texts(value), known))


def _dtypes(value: object) -> tuple[str, ...]:
    return _known("dtype", _texts(value), _DTYPES)


def _known(what: str, names: tuple[str, ...], known: Collection[str]) -> tuple[str, ...]:
    """``names``; raises ValueError for one that is not among ``known``."""
    for name in names:
        if name not in known:
            guess = nearest(name, known)
            hint = f"did you mean {guess!r}?" if guess else f"known are {', '.join(sorted(known))}"
            raise ValueError(f"unknown {what} {name!r} ({hint})")
    return names


def _tokens(value: object) -> Requirement:
    if not isinstance(value, dict) or not value or set(value) - {"min", "max", "phase"}:
        raise ValueError(f"expected a table of min, max, phase; got {value!r}")
    low, high, phase = value.get("min", 1), value.get("max"), value.get("phase")
    if type(low) is not int or low < 1 or (high is not None and (type(high) is not int or high < low)):
        raise ValueError(f"expected 1 <= min <= max, got {value!r}")
    if phase not in (None, "prefill", "decode"):
        raise ValueError(f"phase is 'prefill' or 'decode', got {phase!r}")
    return TokensRequirement(low, high, phase)


def _scalar(value: object) -> Requirement:
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(
            f"expected a table of one argument of the op, such as {{ interleaved = false }}; got {value!r}"
        )
    name, wanted = next(iter(value.items()))
    items = wanted if isinstance(wanted, list) else [wanted]
    if not items or not all(isinstance(item, bool | int | float | str) for item in items):
        raise ValueError(f"expected a truth value, number or text for {name!r}, or a list of them; got {wanted!r}")
    return ScalarRequirement(str(name), tuple(items))


def _one_of(key: str, read: Callable[[object], tuple[str | int, ...]]) -> Callable[[object], Requirement]:
    return lambda value: OneOfRequirement(key, read(value))


_ELEMENT_FP8 = re.compile(rf"(?<![^/]){DEVICE_FP8}(?=@)")

_DTYPES = frozenset(
    {"float64", "float32", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64"}
    | {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"}
)
"""Names of torch's dtypes that activations and caches may have."""

_WORKLOAD_KEYS = frozenset(
    {"dtype", "kv_dtype", "head_size", "head_multiple", "block_size", "feature", "spec", "layout", "activation"}
    | {"routing", "parallel", "format", "scalar", "latent_size", "rope_size"}
)

_PARSERS: dict[str, Callable[[object], Requirement]] = {
    "package": _package,
    "symbol": _symbol,
    "arch": lambda value: ArchRequirement(_texts(value)),
    "device_feature": lambda value: DeviceFeatureRequirement(_texts(value)),
    "feature": _features,
    "spec": _spec,
    "head_multiple": _head_multiple,
    "tokens": _tokens,
    "scalar": _scalar,
    **{key: _one_of(key, _texts) for key in ("layout", "activation", "routing", "parallel", "format")},
    "dtype": _one_of("dtype", _dtypes),
    "kv_dtype": _one_of("kv_dtype", lambda value: _known("dtype", _texts(value), _DTYPES | {DEVICE_FP8, NVFP4})),
    **{key: _one_of(key, _numbers) for key in ("head_size", "latent_size", "rope_size", "block_size")},
}

VOCABULARY: Mapping[str, str] = {
    "package": 'The distribution is installed, in a version that the text admits (PEP 508): "acme-kernels>=2". Of a '
    "list one suffices. Certificates and the lock file keep its version and hash.",
    "symbol": '"module:attribute" of the distribution that `from` names, which must be what an import would find. '
    "Certificates and the lock file keep the distribution's version and hash.",
    "arch": "The device's architecture matches one of these globs. There is no >=: sm_120 is no superset of sm_100.",
    "device_feature": "The device has all of these features.",
    "dtype": "The activations' dtype is one of these.",
    "kv_dtype": "The cache's dtype is one of these; fp8 is the device's 8-bit float, nvfp4 has groups of 4-bit floats.",
    "head_size": "The head size is one of these.",
    "head_multiple": "The head size is a multiple of this number; core can meet it by padding (NAME+padN).",
    "latent_size": "The latent size of latent attention is one of these.",
    "rope_size": "The size of latent attention's rotated key is one of these.",
    "block_size": "The tokens per page of the cache are one of these.",
    "feature": "The workload features claimed; another one that is in use rejects the contribution.",
    "spec": "The quantization specs are one of these pairs, weight/activation, which may be globs; the element fp8 is "
    "the device's 8-bit float. A linear or experts "
    "kernel without it serves plain weights and activations alone.",
    "layout": "The layout of the cache or weight that it works on is one of these.",
    "activation": "The activation function is one of these.",
    "routing": "The router's method is one of these.",
    "parallel": "The parallel layout is one of these: none, tp, ep, tp+ep, pp.",
    "format": "Activations come in one of these formats, standard or batched; without this, in standard.",
    "scalar": "A keyword argument of the op, one of its static ones, has one of these values: { eps = [1e-5, 1e-6] }.",
    "tokens": 'Steps of { min, max } tokens, for attention of one { phase }: "prefill" or "decode".',
}
"""Every requirement there is, with its meaning: closed per manifest schema. Only symbol takes a second key, from."""
