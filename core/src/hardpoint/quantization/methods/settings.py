"""Keys of a ``quantization_config``, and the user's options, read with clear errors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from hardpoint_plugin_api import CheckpointError, ConfigError, UnknownNameError

_REQUIRED: Any = object()


class Settings:
    """One object of a config; ``where`` names it in messages: the file, and the path of keys that leads to it."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values, self.where = values, where

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of ``key``; null counts as missing."""
        value = self._values.get(key)
        if value is None:
            value = default
        if value is _REQUIRED:
            raise CheckpointError(f"{self.where}: {key!r} is missing")
        return value

    def one_of(self, key: str, valid: Collection[object], default: Any = _REQUIRED) -> Any:
        """A value that is one of ``valid``, of the same type."""
        value = self.get(key, default)
        if not any(value == other and type(value) is type(other) for other in valid):
            raise self.wrong(key, f"must be one of {', '.join(map(str, valid))}")
        return value

    def integer(self, key: str, default: Any = _REQUIRED) -> int:
        """A positive whole number, or -1 for 'all'."""
        value = self.get(key, default)
        if type(value) is not int or (value < 1 and value != -1):
            raise self.wrong(key, "must be a positive whole number, or -1 for all")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "must be true or false")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts; none where the key is missing."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "must be a list of texts")
        return tuple(value)

    def names_of(self, key: str) -> tuple[str, ...]:
        """A list of names and of patterns behind ``re:``; raises CheckpointError for one that is no pattern."""
        found = self.texts(key)
        for text in found:
            if text.startswith("re:"):
                self.pattern(key, text.removeprefix("re:"))
        return found

    def pattern(self, key: str, text: str) -> str:
        """``text``, which stands in ``key``. Raises CheckpointError where it is no regular expression."""
        try:
            re.compile(text)
        except re.error as error:
            raise self.wrong(key, f"holds {text!r}, which is no regular expression ({error})") from None
        return text

    def block(self, key: str) -> tuple[int, int] | None:
        """Rows and columns of a block; None where the key is missing."""
        value = self.get(key, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
            raise self.wrong(key, "must be a list of two positive whole numbers")
        return value[0], value[1]

    def table(self, key: str) -> Settings | None:
        """An object within this one; None where the key is missing."""
        value = self.get(key, None)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, "must be an object")
        return Settings(value, f"{self.where}: {key}")

    @property
    def names(self) -> tuple[str, ...]:
        """The keys that are there."""
        return tuple(self._values)

    def wrong(self, key: str, rule: str) -> CheckpointError:
        """The error for a value that breaks ``rule``."""
        return CheckpointError(f"{self.where}: {key!r} {rule}, got {self._values.get(key)!r:.80}")


class Options:
    """The options of --quantization-options. ``known`` maps each key to its valid values, the default first.

    An empty list of values means a positive whole number. Raises UnknownNameError and ConfigError.
    """

    def __init__(self, given: Mapping[str, str], known: Mapping[str, tuple[str, ...]]) -> None:
        for key, value in given.items():
            if key not in known:
                raise UnknownNameError("quantization option", key, known)
            if known[key] and value not in known[key]:
                raise ConfigError(f"--quantization-options {key}={value}: must be one of {', '.join(known[key])}")
            if not known[key] and not (value.isascii() and value.isdigit() and int(value)):
                raise ConfigError(f"--quantization-options {key}={value}: must be a positive whole number")
        self._values = {key: values[0] for key, values in known.items() if values} | dict(given)

    def text(self, key: str) -> str:
        """The value of ``key``."""
        return self._values[key]

    def number(self, key: str, default: int) -> int:
        """The value of ``key`` as a number."""
        return int(self._values.get(key, default))
