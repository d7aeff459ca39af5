"""The plugin API as data: every name, signature, manifest key, requirement, family, feature, op and layer.

``describe_api`` reads it off the installed code. ``frozen`` reads what was written down when a version came out (the
files ``api/MAJOR.MINOR.json`` of hardpoint_plugin_api), so that ``api_diff`` can compare the two.

An *entry* is one promise, under a stable path: ``AttentionBackend.forward``, ``hook hardpoint_configure``,
``manifest [contribution] layout``, ``op rms_norm``. Its value is plain data with a ``kind``.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib.resources import files
from typing import Any, Literal, get_args, get_origin

import hardpoint_plugin_api as api
from hardpoint_plugin_api import API_VERSION, FAMILIES, ApiVersion, Feature, HookSpecs, UnknownNameError
from hardpoint_plugin_api.manifest import KEYS
from hardpoint_plugin_api.requests import FEATURE_SINCE
from hardpoint_plugin_api.requirements import VOCABULARY, applies

Entry = Mapping[str, Any]

_GROWING = {"API_VERSION", "MANIFEST_SCHEMA"}
"""Constants whose value is meant to change."""


@dataclass(frozen=True)
class Surface:
    """The API of one version. ``released`` says whether it was given out, and so may not change any more."""

    version: ApiVersion
    released: bool
    entries: Mapping[str, Entry]

    def to_json(self) -> str:
        """The text of a frozen file."""
        head = {"api": str(self.version), "released": self.released}
        return json.dumps({**head, "entries": dict(sorted(self.entries.items()))}, indent=1) + "\n"


def frozen_versions() -> tuple[ApiVersion, ...]:
    """The versions that were written down, oldest first."""
    return tuple(sorted(ApiVersion.parse(f.name.removesuffix(".json")) for f in files(api).joinpath("api").iterdir()))


def frozen(version: ApiVersion) -> Surface:
    """The API as it was written down for ``version``; raises UnknownNameError where it was not."""
    if version not in frozen_versions():
        raise UnknownNameError("frozen API version", str(version), map(str, frozen_versions()))
    data = json.loads(files(api).joinpath("api", f"{version}.json").read_text(encoding="utf-8"))
    return Surface(ApiVersion.parse(data["api"]), data["released"], data["entries"])


def describe_api() -> Surface:
    """The API of the installed packages. Imports torch, for the ops and layers."""
    from hardpoint.layers import PluggableLayer

    entries: dict[str, Entry] = {}
    for name in api.__all__:
        entries |= _named(name, getattr(api, name))
    entries |= _class("hardpoint.layers.PluggableLayer", PluggableLayer)
    entries |= {f"hook {name}": {"kind": "hook", **call_of(inspect.signature(spec))} for name, spec in hooks().items()}
    entries |= {f"feature {f}": {"kind": "feature", "since": str(FEATURE_SINCE[f])} for f in Feature}
    for key in VOCABULARY:
        taken = [family.name for family in FAMILIES.values() if applies(key, family)]
        entries[f"requirement {key}"] = {"kind": "requirement", "families": taken}
    entries |= {
        f"manifest {f'[{table}] ' if table else ''}{key}": {"kind": "key"}
        for table, keys in KEYS.items()
        for key in keys
    }
    for family in FAMILIES.values():
        entries[f"family {family.name}"] = {
            "kind": "family",
            "workload": family.workload.__name__,
            "has_of": family.has_of,
            **({"kinds": {str(kind.of): kind.__name__ for kind in family.kinds}} if family.kinds else {}),
            "flag": family.flag,
            "stability": family.stability,
        }
    return Surface(API_VERSION, released=False, entries={**entries, **dict(_ops()), **dict(_layers())})


def hooks() -> dict[str, Callable[..., object]]:
    """The hook specifications by name."""
    return {name: spec for name, spec in vars(HookSpecs).items() if name.startswith("hardpoint_")}


def _named(name: str, value: object) -> dict[str, Entry]:
    """The entries of one public name: its own, and one for each member of a class."""
    if isinstance(value, type):
        return _class(name, value)
    if get_origin(value) is Literal:
        return {name: {"kind": "alias", "options": sorted(map(repr, get_args(value)))}}
    if get_args(value):
        return {name: {"kind": "alias", "options": sorted(option.__name__ for option in get_args(value))}}
    if inspect.isfunction(value):
        return {name: {"kind": "function", **call_of(inspect.signature(value))}}
    plain = isinstance(value, str | int) and name not in _GROWING
    return {name: {"kind": "constant", **({"value": value} if plain else {})}}


def _class(name: str, cls: type) -> dict[str, Entry]:
    if issubclass(cls, enum.Enum):
        return {name: {"kind": "enum", "members": {m.name: m.value for m in cls}}}
    bases = [base.__name__ for base in cls.__bases__ if hasattr(api, base.__name__)]
    entries: dict[str, Entry] = {name: {"kind": kind_of(cls), **({"bases": bases} if bases else {})}}
    if is_dataclass(cls):
        entries[name] = {**entries[name], **call_of(inspect.signature(cls)), "returns": name}
    for member, value in members_of(cls):
        entries[f"{name}.{member}"] = _member(cls, member, value)
    return entries


def members_of(cls: type) -> list[tuple[str, object]]:
    """The public members that a class adds to its bases, fields of dataclasses left out, by name."""
    kind = kind_of(cls)
    if cls is HookSpecs:  # each hook has an entry of its own
        return []
    named = {**dict.fromkeys(inspect.get_annotations(cls)), **vars(cls)}
    for f in fields(cls) if is_dataclass(cls) else ():
        named.pop(f.name, None)  # None: a base's
    makes = {"__init__"} if kind in ("interface", "exception", "class") and not is_dataclass(cls) else set()
    return sorted((m, value) for m, value in named.items() if m in makes or not m.startswith("_"))


def kind_of(cls: type) -> str:
    """``protocol`` and ``interface`` are what others implement; a protocol needs no base class."""
    if getattr(cls, "_is_protocol", False):
        return "protocol"
    if isinstance(cls, ABCMeta):
        return "interface"
    if issubclass(cls, Exception):
        return "exception"
    return "dataclass" if is_dataclass(cls) else "class"


def _member(cls: type, member: str, value: object) -> Entry:
    abstract = {"abstract": True} if getattr(value, "__isabstractmethod__", False) else {}
    if isinstance(value, property):
        assert value.fget is not None
        return {"kind": "property", "type": _annotation(inspect.signature(value.fget).return_annotation), **abstract}
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    if inspect.isfunction(function):
        return {"kind": "method", **call_of(inspect.signature(function)), **abstract}
    declared = inspect.get_annotations(cls).get(member)
    return {"kind": "attribute", "type": _annotation(declared or type(value))}


def call_of(signature: inspect.Signature) -> dict[str, Any]:
    """A signature as data: ``params``, each as text, and ``returns``.

    ``*`` stands before the parameters that are given by keyword only; ``self`` and ``cls`` are left out.
    """
    params: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in params:
            params.append("*")
        params.append(_parameter(parameter))
    returns = signature.return_annotation
    return {"params": params, "returns": "" if returns is signature.empty else _annotation(returns)}


def _parameter(parameter: inspect.Parameter) -> str:
    stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
    stars = "**" if parameter.kind is parameter.VAR_KEYWORD else stars
    text = stars + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    return text if parameter.default is parameter.empty else f"{text} = {_default(parameter.default)}"


def _annotation(value: object) -> str:
    """As one reads it: torch.Tensor is a Tensor."""
    text = value if isinstance(value, str) else value.__name__ if isinstance(value, type) else str(value)
    return re.sub(r"(?<![\w.])(torch|requests)\.", "", text)


def _default(value: object) -> str:
    if isinstance(value, frozenset):
        return f"frozenset({{{', '.join(map(repr, sorted(value)))}}})" if value else "frozenset()"
    return "..." if repr(value).startswith("<") else repr(value)  # a default factory


def _ops() -> Iterator[tuple[str, Entry]]:
    from hardpoint import ops

    for name in ops.names():
        op = ops.get(name)
        call = call_of(inspect.signature(op.reference))
        aliases = [list(alias) for alias in op.aliases]
        yield f"op {name}", {"kind": "op", **call, "mutates": list(op.mutates), "aliases": aliases}


def _layers() -> Iterator[tuple[str, Entry]]:
    for name, cls in layer_classes().items():
        args = inspect.signature(cls.__init__).parameters.get("args")
        taken = {"args": _annotation(args.annotation)} if args else {}
        yield f"layer {name}", {"kind": "layer", **taken, **call_of(inspect.signature(cls.forward))}


def layer_classes() -> dict[str, Any]:
    """Core's pluggable layers by name: the implementation ``default`` of each, which others stand in for."""
    from hardpoint.plugin_host.discovery import discover
    from hardpoint.plugin_host.record import CORE

    plugins = discover([])
    offers = [o for o in plugins.offers("layer") if o.plugin == CORE and o.contribution.name == "default"]
    return {str(o.contribution.of): plugins.load(o) for o in sorted(offers, key=lambda o: str(o.contribution.of))}
