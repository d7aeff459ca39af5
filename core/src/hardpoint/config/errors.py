"""From pydantic's findings to one clear error: the key, its value, where it stands, and what is valid."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hardpoint_plugin_api import ConfigError, UnknownNameError

LISTED_BY = "'hardpoint generate --help' (--block-size stands for block_size)"
"""The place that lists all settings, as an error names it."""
_REASONS = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a text",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list of texts",
    "dict_type": "must be a table",
    "greater_than_equal": "must be {ge} or more",
    "less_than_equal": "must be {le} or less",
    "less_than": "must be below {lt}",
}


def flag_of(key: str) -> str:
    """``"block_size"`` -> ``"--block-size"``; a plugin's ``"acme.key"`` -> ``"--acme.key"``."""
    return f"--{key}" if "." in key else f"--{key.replace('_', '-')}"


def setting_of(flag: str) -> str:
    """``"--block-size"`` -> ``"block_size"``."""
    return flag[2:].replace("-", "_")


def written(key: str, value: object, origins: Mapping[str, str]) -> str:
    """A setting as the user wrote it: ``--use attention=paged``, ``hp.toml: use.attention = 'paged'``."""
    where = origins.get(key, key)
    if where.startswith("--") and isinstance(value, bool):
        return where if value else f"--no-{where[2:]}"
    if isinstance(value, tuple):  # of names, which users write with commas between them
        value = ",".join(map(str, value))
    return f"{where}={value}" if where.startswith("--") else f"{where} = {value!r}"


def invalid_setting(error: ValidationError, origins: Mapping[str, str]) -> ConfigError:
    """Turn ``error`` into a ConfigError with a line for each invalid setting.

    ``origins`` says for a key where its value stands, as the user wrote it; without an entry it is a Python keyword.
    """
    found: dict[str, ConfigError] = {}
    for details in error.errors(include_url=False):
        key = str(details["loc"][0])
        if key == "plugin_config" and len(details["loc"]) > 2:
            key = f"{details['loc'][1]}.{details['loc'][2]}"
            found[key] = _invalid(key, details["input"], "must be a text, a number, or true or false", origins)
        else:
            found.setdefault(key, _one(details, origins))
    return next(iter(found.values())) if len(found) == 1 else ConfigError("\n".join(map(str, found.values())))


def _one(details: ErrorDetails, origins: Mapping[str, str]) -> ConfigError:
    key, origins = _path(details, origins)
    value, context = details["input"], details.get("ctx", {})
    if details["type"] == "literal_error" and isinstance(value, str):
        names = re.findall(r"'([^']*)'", str(context["expected"]))
        return UnknownNameError(f"value of {origins.get(key, key)}:", value, names)
    if details["type"] == "value_error":
        return _invalid(key, value, str(context["error"]), origins)
    return _invalid(key, value, _REASONS.get(details["type"], details["msg"]).format(**context), origins)


def _path(details: ErrorDetails, origins: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
    """The key path of a finding, as in ``use.op`` or ``plugins[0]``, and the origins with that path among them."""
    key, *inner = (part for part in details["loc"] if part != "[key]")
    rest = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inner)
    return f"{key}{rest}", {f"{key}{rest}": f"{origins.get(str(key), key)}{rest}", **origins}


def _invalid(key: str, value: object, reason: str, origins: Mapping[str, str]) -> ConfigError:
    return ConfigError(f"{origins.get(key, key)} = {value!r} is invalid: {reason}")
