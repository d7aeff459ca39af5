"""Tuning tables: constants of a kernel that change its speed alone, as data.

A table is a TOML file, named after its kernel, of rules in order. The first whose conditions hold says the constants::

    schema = 1

    [[rule]]
    arch = ["acme2"]
    when = { wide = false, max_decodes = 32 }
    use = { min_chunk = 64, tiles = { rows = 32, key_bytes = 16384, num_warps = 4, num_stages = 4 } }
    measured_on = "Acme 2"
    source = "docs/measurements.md"

``arch`` holds patterns of architectures, as in a manifest; left out, the rule is for any. ``when`` holds facts that a
kernel names: what a fact equals, or a number's bounds (``min_``, ``max_``); left out, the rule always holds.
``use`` holds the constants; ``options`` among them are passed on to Triton's compiler for the device, such as
``{ waves_per_eu = 2 }``. ``measured_on`` and ``source``, of a rule or a file, say where they come from, and nothing
reads them.

Rules of the user's folder (--tuning-tables) come first, then those of the platform's plugin, which stand in the folder
``tuning`` beside its manifest, then core's, which stand in the folder ``tuning`` beside this module.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

from hardpoint_plugin_api import BuildContext, ConfigError
from hardpoint_plugin_api.errors import nearest

T = TypeVar("T")

FOLDER = Path(__file__).with_name("tuning")
"""Core's tables."""

Fact = int | bool | str
_MOST_KNOWN = 4096
_TEXTS = ("measured_on", "source")
_KEYS = ("arch", "when", "use", *_TEXTS)


class Options(dict[str, Fact]):
    """Options of a launch that the device's Triton compiler knows, by their names there. They are never changed.

    A launch with one that the compiler does not know raises KeyError, which names it.
    """

    def __hash__(self) -> int:  # type: ignore[override]  # constants that hold them are keys
        return hash(frozenset(self.items()))


NO_OPTIONS = Options()


@dataclass(frozen=True)
class Rule(Generic[T]):
    """Constants, and the conditions under which they are used, by key as in ``when``."""

    arch: tuple[str, ...]
    when: Mapping[str, Fact]
    use: T

    def holds(self, facts: Mapping[str, Fact]) -> bool:
        """Whether every condition holds."""
        return all(_holds(key, wanted, facts) for key, wanted in self.when.items())


class Table(Generic[T]):
    """The rules for one kernel on one device, the first to be asked first."""

    def __init__(self, kernel: str, rules: Sequence[Rule[T]]) -> None:
        self.kernel, self.rules = kernel, tuple(rules)
        self._known: dict[tuple[Fact, ...], T] = {}

    def given(self, **facts: Fact) -> Table[T]:
        """The table for launches that all have these facts: conditions on others stay."""

        def is_about(key: str) -> bool:
            return key.removeprefix("min_").removeprefix("max_") in facts or key in facts

        left = [
            replace(rule, when={key: wanted for key, wanted in rule.when.items() if not is_about(key)})
            for rule in self.rules
            if all(_holds(key, wanted, facts) for key, wanted in rule.when.items() if is_about(key))
        ]
        return Table(self.kernel, left)

    @property
    def uses(self) -> tuple[T, ...]:
        """All constants that may be found, each once: rules behind one without conditions never count."""
        last = next((at for at, rule in enumerate(self.rules, 1) if not rule.when), None)
        return tuple(dict.fromkeys(rule.use for rule in self.rules[:last]))

    def find(self, **facts: Fact) -> T:
        """The constants for a launch with these facts, always given in one order. Raises ConfigError for none."""
        key = tuple(facts.values())
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:  # prompts have many lengths
                self._known.clear()
            found = next((rule for rule in self.rules if rule.holds(facts)), None)
            if found is None:
                raise ConfigError(f"tuning table {self.kernel}: no rule holds for {facts}; let the last always hold")
            self._known[key] = found.use
        return self._known[key]


def table_of(ctx: BuildContext, kernel: str, use: type[T], facts: Mapping[str, type]) -> Table[T]:
    """The table of ``kernel`` for the context's device: constants ``use``, a dataclass, by ``facts`` of these types.

    Raises ConfigError for a file that is not right.
    """
    return table(kernel, use, tuple(facts.items()), ctx.device.arch, tuple(ctx.tuning_folders))


def table(
    kernel: str, use: type[T], facts: tuple[tuple[str, type], ...], arch: str = "", folders: tuple[Path, ...] = ()
) -> Table[T]:
    """The same for an architecture, with ``folders`` before core's."""
    return cast(Table[T], _table(kernel, cast(Any, use), facts, arch, folders))


@lru_cache
def _table(kernel: str, use: Any, facts: tuple[tuple[str, type], ...], arch: str, folders: tuple[Path, ...]) -> Any:
    """As above. Files are read once."""
    paths = [folder / f"{kernel}.toml" for folder in (*folders, FOLDER)]
    rules = [rule for path in paths if path.is_file() for rule in read(path, use, dict(facts))]
    here = [rule for rule in rules if not rule.arch or any(fnmatchcase(arch, pattern) for pattern in rule.arch)]
    return Table(kernel, here)


def read(path: Path, use: type[T], facts: Mapping[str, type]) -> list[Rule[T]]:
    """The rules of a file. Raises ConfigError, which names the rule and the key."""
    where = f"tuning table {path}" + ("" if path.parent == FOLDER else " (of --tuning-tables, or a plugin's own)")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error
    _only(data, ("schema", "rule", *_TEXTS), where)
    for key in _TEXTS:
        _checked(data.get(key, ""), str, f"{where}: {key}")
    if data.get("schema") != 1:
        raise ConfigError(f"{where}: schema is {data.get('schema')!r}, and 1 is read")
    rules = data.get("rule", [])
    if not isinstance(rules, list) or not rules:
        raise ConfigError(f"{where}: it holds no rules: write [[rule]]")
    return [_rule(rule, use, facts, f"{where}: [[rule]] {number}") for number, rule in enumerate(rules, 1)]


def _rule(data: object, use: type[T], facts: Mapping[str, type], where: str) -> Rule[T]:
    rule = _object(data, where)
    _only(rule, _KEYS, where)
    arch = rule.get("arch", [])
    if not isinstance(arch, list) or not all(isinstance(pattern, str) for pattern in arch):
        raise ConfigError(f"{where}: arch must be a list of texts, got {arch!r}")
    for key in _TEXTS:
        _checked(rule.get(key, ""), str, f"{where}: {key}")
    kinds = {
        key: kind
        for name, kind in facts.items()
        for key in ((name, f"min_{name}", f"max_{name}") if kind is int else (name,))
    }
    when = _object(rule.get("when", {}), f"{where}: when")
    _only(when, kinds, f"{where}: when")
    conditions = {key: cast(Fact, _checked(value, kinds[key], f"{where}: when {key}")) for key, value in when.items()}
    if "use" not in rule:
        raise ConfigError(f"{where}: key 'use' is missing")
    return Rule(tuple(arch), conditions, checked(rule["use"], use, f"{where}: use"))


def checked(value: object, kind: type[T], where: str) -> T:
    """``value`` as parsed from JSON or TOML, as a dataclass: with its fields only, of their types, none missing."""
    return cast(T, _checked(value, kind, where))


def _checked(value: object, kind: Any, where: str) -> object:
    if is_dataclass(kind):
        data, hints = _object(value, where), get_type_hints(kind)
        _only(data, hints, where)
        missing = [f.name for f in fields(kind) if f.name not in data and f.default is MISSING]
        if missing:
            raise ConfigError(f"{where}: key {missing[0]!r} is missing")
        made = cast(type, kind)
        return made(**{key: _checked(each, hints[key], f"{where}.{key}") for key, each in data.items()})
    if kind is Options:
        return Options({key: _fact(each, f"{where}.{key}") for key, each in _object(value, where).items()})
    if get_origin(kind) is tuple:
        if not isinstance(value, list) or not value:
            raise ConfigError(f"{where} must be a list of one or more, got {value!r}")
        return tuple(_checked(each, get_args(kind)[0], f"{where}[{at}]") for at, each in enumerate(value))
    if type(value) is not kind:
        raise ConfigError(f"{where} must be of type {kind.__name__}, got {value!r}")
    if kind is int and cast(int, value) < 0:
        raise ConfigError(f"{where} must not be negative, got {value}")
    return value


def _fact(value: object, where: str) -> Fact:
    if not isinstance(value, Fact):
        raise ConfigError(f"{where} must be a number, true, false or a text, got {value!r}")
    return value


def _object(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be a table, got {value!r}")
    return value


def _only(data: Mapping[str, object], known: Mapping[str, object] | Sequence[str], where: str) -> None:
    for key in data:
        if key not in known:
            guess = nearest(key, known)
            hint = f"did you mean {guess!r}?" if guess else f"known are: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def _holds(key: str, wanted: Fact, facts: Mapping[str, Fact]) -> bool:
    bound, _, name = key.partition("_")
    if key not in facts and name in facts:
        number = facts[name]
        assert not isinstance(number, str)
        assert not isinstance(wanted, str)
        return number >= wanted if bound == "min" else number <= wanted
    return facts[key] == wanted
