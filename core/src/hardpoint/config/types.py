"""The types of single settings: how text from a flag or a value from a file becomes one, and what is refused.

Every function raises ValueError with the reason alone; the key, the value and its source are added in ``config``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from hardpoint_plugin_api import FAMILIES, UnknownNameError

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
KVDtype = Literal[
    "auto", "float32", "float16", "bfloat16", "fp8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "int8", "nvfp4"
]

ExecutorKind = Literal["inproc", "mp", "ray", "torchrun"]
OnFailure = Literal["fail", "restart"]

_DTYPE_ALIASES = {"float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16"}
_CACHE_DTYPE_ALIASES = {"fp8_e4m3": "fp8", "fp8_e5m2": "float8_e5m2"}
_LOAD_FORMATS = {"dummy": "random", "safetensors": "auto", "hf": "auto"}
"""vLLM's names."""
_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate("KMGT", 1)
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_OP_SWITCH = re.compile(r"[+-][A-Za-z_]\w*")


def _dtype(value: object) -> object:
    return _DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value


def _load_format(value: object) -> object:
    return _LOAD_FORMATS.get(value, value) if isinstance(value, str) else value


def _cache_dtype(value: object) -> object:
    return _dtype(_CACHE_DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value)


def _number(value: object) -> object:
    if isinstance(value, bool):  # True is an int to Python, and never what was meant
        raise ValueError("must be a whole number")
    return value


def _share(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number from 0 to 1")
    return value


def parse_bytes(value: object) -> object:
    """``"4GiB"`` -> 4294967296; numbers and text of digits alone are bytes already."""
    if not isinstance(value, str):
        return _number(value)
    match = _SIZE.fullmatch(value.strip())
    unit = match[2] if match else ""
    if not match or (unit and unit not in _UNITS):
        raise ValueError(f"must be a number of bytes, or a number and a unit ({', '.join(_UNITS)}), such as 4GiB")
    return int(Decimal(match[1]) * _UNITS[unit]) if unit else match[1]


def parse_names(value: object) -> object:
    """``"all,-rms_norm"`` -> ``("all", "-rms_norm")``; the empty text is no name."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def check_custom_ops(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``names``: ``all`` or ``none`` at most once, ``+op`` and ``-op`` for single ops. Raises ValueError."""
    bases = {name for name in names if name in ("all", "none")}
    if len(bases) == 2:
        raise ValueError("takes one of 'all' and 'none', not both")
    for name in set(names) - bases:
        if not _OP_SWITCH.fullmatch(name):
            raise ValueError(f"takes 'all' or 'none', '+name' and '-name'; {name!r} is none of these")
        if name[0] == "+" and f"-{name[1:]}" in names:
            raise ValueError(f"holds both {name!r} and '-{name[1:]}'; keep one")
    return names


def parse_use(value: object) -> object:
    """Bring choices to ``{"op.rms_norm": "name"}``: from flags' ``FAMILY[.OF]=NAME``, which may be joined
    by commas, or from nested TOML tables."""
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, Mapping):
        flat: dict[object, object] = {}
        for key, item in value.items():
            flat |= {f"{key}.{of}": name for of, name in item.items()} if isinstance(item, Mapping) else {key: item}
        return flat
    if not isinstance(value, list | tuple):
        return value
    choices: dict[object, object] = {}
    for text in [part.strip() for texts in value for part in str(texts).split(",")]:
        slot, equals, name = text.partition("=")
        if not (equals and slot and name):
            raise ValueError(f"takes FAMILY=NAME or FAMILY.OF=NAME, such as op.rms_norm=reference; got {text!r}")
        if choices.get(slot, name) != name:
            raise ValueError(f"chooses both {choices[slot]!r} and {name!r} for {slot}; keep one")
        choices[slot] = name
    return choices


def check_use(choices: dict[str, str]) -> dict[str, str]:
    """Every key names a family, and which op, layer or architecture in it where the family has several."""
    for slot in choices:
        name, dot, of = slot.partition(".")
        if name not in FAMILIES:
            hint = f"Where it is an op, write op.{slot}." if not dot else ""
            raise ValueError(str(UnknownNameError("family", name, FAMILIES, hint)))
        if FAMILIES[name].has_of and not of and not FAMILIES[name].kinds:
            raise ValueError(f"family {name!r} has several members: name one, as in {name}.NAME")
        kinds = [str(kind.of) for kind in FAMILIES[name].kinds]
        if of and kinds and of not in kinds:
            raise ValueError(str(UnknownNameError(name, of, kinds)))
        if dot and not FAMILIES[name].has_of:
            raise ValueError(f"family {name!r} has no members: write {name!r}, not {slot!r}")
    return choices


def check_options(options: tuple[str, ...]) -> tuple[str, ...]:
    """Every option is KEY=VALUE, each key given once."""
    keys = [option.partition("=")[0] for option in options]
    for option, key in zip(options, keys, strict=True):
        if "=" not in option or not key or keys.count(key) > 1:
            raise ValueError(f"takes KEY=VALUE,KEY=VALUE, each key once; got {option!r}")
    return options


def check_lora_modules(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Every adapter is NAME=PATH, each name given once."""
    names = [module.partition("=")[0] for module in modules]
    for module, name in zip(modules, names, strict=True):
        if not name or not module.partition("=")[2] or names.count(name) > 1:
            raise ValueError(f"takes NAME=PATH,NAME=PATH, each name once; got {module!r}")
    return modules


def check_deny(denied: tuple[str, ...]) -> tuple[str, ...]:
    """Every entry is FAMILY=NAME or FAMILY.OF=NAME; several may be of one family."""
    for entry in denied:
        check_use({str(slot): str(name) for slot, name in dict(parse_use(entry)).items()})  # type: ignore[call-overload]
    return denied


AnyDtype = Annotated[Dtype, BeforeValidator(_dtype)]
FileFormat = Literal["auto", "hf", "mistral"]
LoadFormat = Annotated[
    Literal["auto", "random", "mistral", "fastsafetensors", "runai_streamer"], BeforeValidator(_load_format)
]
CacheDtype = Annotated[KVDtype, BeforeValidator(_cache_dtype)]
Count = Annotated[int, BeforeValidator(_number), Field(ge=1)]
PageSize = Annotated[Count, Field(le=2**16)]
NumSeqs = Annotated[Count, Field(le=2**16)]
NumTokens = Annotated[Count, Field(le=2**22)]
Index = Annotated[int, BeforeValidator(_number), Field(ge=0)]
Port = Annotated[int, BeforeValidator(_number), Field(ge=1, le=65535)]
Seed = Annotated[int, BeforeValidator(_number), Field(ge=0, lt=2**63)]
Share = Annotated[float, BeforeValidator(_share), Field(ge=0, le=1)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Parser = Annotated[Text | None, BeforeValidator(lambda value: None if value == "auto" else value)]
ModelImpl = Annotated[Text | None, BeforeValidator(lambda value: None if value in ("auto", "vllm") else value)]
Counts = Annotated[tuple[Count, ...], BeforeValidator(parse_names)]
Names = Annotated[tuple[Text, ...], BeforeValidator(parse_names)]
CustomOps = Annotated[Names, AfterValidator(check_custom_ops)]
Deny = Annotated[Names, AfterValidator(check_deny)]
Options = Annotated[Names, AfterValidator(check_options)]
LoraModules = Annotated[Names, AfterValidator(check_lora_modules)]
Use = Annotated[dict[Text, Text], BeforeValidator(parse_use), AfterValidator(check_use)]
