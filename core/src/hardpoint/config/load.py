"""Join a config file and flags."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hardpoint.config.engine_config import SETTINGS, EngineConfig, PluginKeys
from hardpoint.config.errors import flag_of
from hardpoint.config.types import parse_use
from hardpoint_plugin_api import ConfigError, UnknownNameError


def load_config(
    file: Path | None,
    flags: Mapping[str, Any],
    plugin_keys: PluginKeys,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> EngineConfig:
    """Join a TOML file and flags to a config; flags override the file (``use`` entry by entry).

    ``flags`` has a field's name or ``"plugin.key"`` for each flag given, None for one that was not. ``defaults`` are
    the command's own, below the file. Raises ConfigError, naming key, value, source and what is valid.
    """
    settings: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    for key, value in _read(file).items() if file else ():
        if key in SETTINGS:
            settings[key], origins[key] = value, f"{file}: {key}"
        elif isinstance(value, dict) and key in plugin_keys:
            sections[key] = dict(value)
            origins |= {f"{key}.{name}": f"{file}: [{key}] {name}" for name in value}
        else:
            raise UnknownNameError(
                f"{'section' if isinstance(value, dict) else 'key'} in {file}:",
                key,
                {*plugin_keys, "use"} if isinstance(value, dict) else SETTINGS,
            )
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
            settings[key] = _joined(settings[key], value) if key == "use" and key in settings else value
        else:
            raise UnknownNameError("flag", flag_of(key), map(flag_of, SETTINGS))
    if sections:
        settings["plugin_config"] = sections
    return EngineConfig._build({**defaults, **settings}, origins)._with_sections(plugin_keys, origins)


def _joined(of_file: object, of_flags: object) -> object:
    """Choices of the file and of flags, the flags' entries first; what is not of that form is left to be refused."""
    try:
        old, new = parse_use(of_file), parse_use(of_flags)
    except ValueError as error:
        raise ConfigError(f"--use = {of_flags!r} is invalid: {error}") from None
    return {**old, **new} if isinstance(old, dict) and isinstance(new, dict) else old


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {file} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {file} is not valid TOML: {error}") from error
