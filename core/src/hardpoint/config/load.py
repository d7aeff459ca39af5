"""Join a config file and flags."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hardpoint.config.engine_config import SETTINGS, EngineConfig, PluginKeys
from hardpoint.config.errors import LISTED_BY, flag_of, setting_of
from hardpoint.config.types import check_use, parse_use
from hardpoint.config.vllm_names import translate_settings
from hardpoint_plugin_api import FAMILIES, ConfigError, UnknownNameError


def load_config(
    file: Path | None,
    flags: Mapping[str, Any],
    plugin_keys: PluginKeys,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> EngineConfig:
    """Join a TOML file and flags to a config; flags override the file (``use`` entry by entry, and
    ``--use attention=NAME`` the file's ``attention_backend`` too).

    ``flags`` has a field's name or ``"plugin.key"`` for each flag given, None for one that was not. ``defaults`` are
    the command's own, below the file. Raises ConfigError, naming key, value, source and what is valid.
    """
    of_file: dict[str, Any] = {}
    of_flags: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    by_our_names = translate_settings(_read(file), {*SETTINGS, *plugin_keys}) if file else {}
    for key, value in by_our_names.items():
        if key in SETTINGS:
            of_file[key], origins[key] = value, f"{file}: {key}"
        elif isinstance(value, dict) and key in plugin_keys:
            sections[key] = dict(value)
            origins |= {f"{key}.{name}": f"{file}: [{key}] {name}" for name in value}
        else:
            if isinstance(value, dict):
                raise UnknownNameError(f"section in {file}:", key, {*plugin_keys, "use"})
            raise UnknownNameError(f"key in {file}:", key, SETTINGS, listed_by=LISTED_BY)
    _parse_use(of_file, f"{file}: use", f"{file}: use.", origins)
    for key, value in flags.items():
        plugin, dot, name = key.partition(".")
        if value is None:
            continue
        origins[key] = flag_of(key)
        if dot and plugin not in plugin_keys:
            raise UnknownNameError(f"plugin in {flag_of(key)}:", plugin, plugin_keys)
        if dot:
            sections.setdefault(plugin, {})[name] = value
        elif key in SETTINGS:
            of_flags[key] = value
        else:
            raise UnknownNameError("flag", flag_of(key), map(flag_of, SETTINGS))
    _parse_use(of_flags, "--use", "--use ", origins)
    settings = {**defaults, **_joined(of_file, of_flags)}
    if sections:
        settings["plugin_config"] = sections
    return EngineConfig._build(settings, origins)._with_sections(plugin_keys, origins)


def _parse_use(settings: dict[str, Any], where: str, prefix: str, origins: dict[str, str]) -> None:
    """Bring one source's ``use`` to choices by slot, and note where each stands; what is no table is refused later."""
    if "use" not in settings:
        return
    given = settings["use"]
    if isinstance(given, tuple):  # flags, each of which an error names by itself
        for text in given:
            _choices(text, f"{where} = {text!r}")
        where = f"{where} = {' '.join(given)!r}"
    else:
        where = f"{where} = {given!r}"
    use = _choices(given, where)
    settings["use"] = use
    if isinstance(use, dict):
        origins |= {f"use.{slot}": f"{prefix}{slot}" for slot in use}


def _choices(given: object, where: str) -> object:
    """The choices of ``given``, by slot. Raises ConfigError, which begins with ``where``."""
    try:
        use = parse_use(given)
        if isinstance(use, dict) and all(isinstance(name, str) for name in use.values()):
            check_use(use)
    except ValueError as error:
        raise ConfigError(f"{where} is invalid: {error}") from None
    return use


def _joined(of_file: dict[str, Any], of_flags: dict[str, Any]) -> dict[str, Any]:
    """Both sources' settings, the flags' first: a family chosen by a flag is chosen, in whichever way the file has it
    (``attention_backend`` or ``use.attention``)."""
    settings = {**of_file, **of_flags}
    uses = [source.get("use", {}) for source in (of_file, of_flags)]
    if not all(isinstance(use, dict) for use in uses):
        return settings
    below, above = uses
    for family in FAMILIES.values():
        if family.name in above and family.flag and setting_of(family.flag) not in of_flags:
            settings.pop(setting_of(family.flag), None)
        if family.flag and setting_of(family.flag) in of_flags:
            below = {slot: name for slot, name in below.items() if slot != family.name}
    return {**settings, "use": {**below, **above}} if "use" in settings else settings


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not UTF-8: {error}"
        raise ConfigError(f"--config {file}: the config file cannot be read: {why}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {file}: the config file is not valid TOML: {error}") from error
