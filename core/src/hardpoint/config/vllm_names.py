"""Names of vLLM: flags and keywords that mean a setting of another name here, have no effect here, or are refused.

``vllm_names.toml`` is the table. docs/coming_from_vllm.md shows it, and a test compares the two.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from hardpoint_plugin_api import ConfigError, nearest

logger = logging.getLogger(__name__)

Settings = dict[str, Any]


@dataclass(frozen=True)
class VllmName:
    """One name, as a flag, or several with one answer; the other fields are those of vllm_names.toml."""

    flag: str
    setting: str | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    accepted: str | None = None
    only: frozenset[str] | None = None
    refused: str | None = None
    reader: Callable[[object], Settings] | None = None
    switch: bool = False

    @property
    def answer(self) -> str:
        """The answer of Hardpoint to this name, for a page of docs and for errors."""
        if self.setting is not None:
            other = "".join(f"; `{theirs}` is `{ours}`" for theirs, ours in self.values.items())
            return f"the same as --{self.setting.replace('_', '-')}{other}"
        if self.reader is not None:
            return str(self.reader.__doc__).splitlines()[0].rstrip(".")
        if self.accepted is None:
            return f"refused: {self.refused}"
        if self.only is None:
            return f"no effect: {self.accepted}"
        values = ", ".join(f"`{value}`" for value in sorted(self.only))
        return f"{values} has no effect: {self.accepted}. Others are refused: {self.refused}"

    def translate(self, value: object, written: str) -> Settings:
        """The settings that ``value`` means here. A name without effect is logged.

        Raises ConfigError, which begins with ``written``: how the user wrote the name.
        """
        if self.setting is not None:
            return {self.setting: self.values.get(value, value) if isinstance(value, str) else value}
        if self.reader is not None:
            try:
                return self.reader(value)
            except ValueError as error:
                raise ConfigError(f"{written} is vLLM's name, and {value!r} is refused: {error}") from None
        if self.accepted is not None and (self.only is None or str(value).lower() in self.only):
            logger.warning("%s has no effect: %s", written, self.accepted)
            return {}
        raise ConfigError(f"{written} is vLLM's name: {self.refused}")


def speculative_config(value: object) -> Settings:
    """supported keys: `method` ngram, `num_speculative_tokens`, `prompt_lookup_min` and `prompt_lookup_max`."""
    given = _mapping(value)
    method = given.pop("method", None)
    if method != "ngram":
        raise ValueError(f"the method must be ngram, got {method!r}")
    known = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
    return {"speculative_method": "ngram", **_known(given, known)}


def compilation_config(value: object) -> Settings:
    """supported keys: `custom_ops`, and `cudagraph_mode` NONE (as --enforce-eager), FULL, PIECEWISE or both."""
    if isinstance(value, int) or (isinstance(value, str) and value.isdigit()):
        return optimization_level(value)
    given = _mapping(value)
    settings: Settings = {}
    mode = str(given.pop("cudagraph_mode", "FULL_AND_PIECEWISE")).upper()
    if mode not in ("NONE", "FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"):
        raise ValueError(f"unknown cudagraph_mode {mode!r}")
    if mode == "NONE":
        settings["enforce_eager"] = True
    for level in ("level", "mode"):
        if level in given:
            settings |= optimization_level(given.pop(level))
    return settings | _known(given, ("custom_ops",))


def optimization_level(value: object) -> Settings:
    """supported: 0 is --enforce-eager; 1 to 3 are accepted, there are no other levels."""
    if str(value).upper() == "NONE" or str(value) == "0":
        return {"enforce_eager": True}
    if str(value) not in ("1", "2", "3"):
        raise ValueError("it must be a level from 0 to 3")
    return {}


_READERS = {reader.__name__: reader for reader in (speculative_config, compilation_config, optimization_level)}


def _mapping(value: object) -> Settings:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise ValueError("it must be an object")
    return dict(value)


def _known(given: Settings, known: Collection[str]) -> Settings:
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"{', '.join(unknown)} has no counterpart; known: {', '.join(known)}")
    return given


@cache
def vllm_names() -> Mapping[str, VllmName]:
    """The table, by flag; short flags, too."""
    names: dict[str, VllmName] = {}
    rows = tomllib.loads(files("hardpoint.config").joinpath("vllm_names.toml").read_text(encoding="utf-8"))
    for flag, row in rows.items():
        only = row.get("only")
        name = VllmName(
            flag,
            row.get("is"),
            row.get("values", {}),
            row.get("accept"),
            None if only is None else frozenset(only),
            row.get("refuse"),
            _READERS[row["read"]] if "read" in row else None,
            row.get("switch", False),
        )
        names |= dict.fromkeys((flag, *row.get("also", ()), *([row["short"]] if "short" in row else [])), name)
    return names


def translate_settings(settings: Mapping[str, Any], own: Collection[str]) -> Settings:
    """``settings`` by our names. Keys that are neither in ``own`` nor vLLM's stay, for their own error.

    None for a name of vLLM's is its default, and left out. Raises ConfigError with a line for each that is refused,
    and for one that contradicts a setting of ours.
    """
    translated: Settings = {key: value for key, value in settings.items() if key in own}
    refused = []
    for key, value in settings.items():
        if key in own:
            continue
        name = vllm_names().get(f"--{key.replace('_', '-')}")
        if name is None:
            translated[key] = value
        elif value is not None:
            try:
                meant = name.translate(value, key)
            except ConfigError as error:
                refused.append(str(error))
                continue
            for setting, wanted in meant.items():
                if translated.setdefault(setting, wanted) != wanted:
                    refused.append(f"{key} = {value!r} and {setting} = {translated[setting]!r} contradict; keep one")
    if refused:
        raise ConfigError("\n".join(refused))
    return translated


@dataclass(frozen=True)
class FlagNames:
    """The flags of a command: their names, and those among them that take a value."""

    own: frozenset[str]
    with_value: frozenset[str]


def translate_flags(args: Sequence[str], names: FlagNames) -> list[str]:
    """``args`` with our flags in place of vLLM's, also where underscores stand for hyphens.

    Raises ConfigError with a line for each flag that is unknown, or is vLLM's and refused.
    """
    translated: list[str] = []
    errors: list[str] = []
    rest = iter(args)
    for each in rest:
        if each == "--":
            return [*translated, each, *rest]
        written, equals, value = _split(each)
        flag = _spelling(written, names)
        name, negated = _find(written)
        if flag in names.own:
            translated.append(flag + equals + value)
            if flag in names.with_value and not equals:
                translated += itertools.islice(rest, 1)
        elif name is not None:
            if name.switch:
                given: object = value if equals else not negated
            else:
                given = value if equals else next(rest, "")
            try:
                for setting, wanted in name.translate(given, written).items():
                    translated += _as_flags(setting, wanted)
            except ConfigError as error:
                errors.append(str(error))
        elif written.startswith("--"):
            guess = nearest(written, names.own)
            errors.append(f"No such option: {written}" + (f" (did you mean {guess}?)" if guess else ""))
        else:
            translated.append(each)
    if errors:
        raise ConfigError("\n".join(errors))
    return translated


def _split(each: str) -> tuple[str, str, str]:
    """A flag, its equals sign and its value; a short flag's number may stand right behind it (-O3)."""
    joined = re.fullmatch(r"(-O|-tp|-pp|-dp)(\d+)", each)
    return (joined[1], "=", joined[2]) if joined else each.partition("=")


def _spelling(written: str, names: FlagNames) -> str:
    """Our spelling of a flag that was written with underscores."""
    if not written.startswith("--") or written in names.own:
        return written
    hyphens = written.replace("_", "-")
    return hyphens if hyphens in names.own else written


def _find(written: str) -> tuple[VllmName | None, bool]:
    """The name of vLLM's that was written, and whether it was negated (``--no-``)."""
    hyphens = written.replace("_", "-") if written.startswith("--") else written
    table = vllm_names()
    if hyphens in table:
        return table[hyphens], False
    return table.get(hyphens.replace("--no-", "--", 1)), True


def _as_flags(setting: str, value: object) -> Iterator[str]:
    flag = f"--{setting.replace('_', '-')}"
    if isinstance(value, bool):
        yield flag if value else f"--no-{flag[2:]}"
    else:
        yield f"{flag}={','.join(map(str, value)) if isinstance(value, list | tuple) else value}"
