"""The static manifest ``hardpoint.toml``: read and validated without importing any of the plugin's code."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from hardpoint_plugin_api.contributions import Contribution, Form, Preference
from hardpoint_plugin_api.device import DeviceInfo, Fp8Format
from hardpoint_plugin_api.elements import BUILT_IN
from hardpoint_plugin_api.errors import ManifestError, UnknownNameError, nearest
from hardpoint_plugin_api.families import FAMILIES, Family
from hardpoint_plugin_api.inclusion import IncludedFile, contribution_tables, included_files, parsed
from hardpoint_plugin_api.requirements import Requirement, TokensRequirement, parse_requirement
from hardpoint_plugin_api.versions import MANIFEST_SCHEMA, ApiVersion, check_api

MANIFEST_NAME = "hardpoint.toml"
ENTRY_POINT_GROUP = "hardpoint.plugins"

ConfigType = Literal["int", "float", "bool", "str"]
ConfigValue = int | float | bool | str
_CONFIG_TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*\Z")

KEYS: Mapping[str, Mapping[str, str]] = {
    "": {
        "schema": "The manifest schema that the file is written in; required.",
        "api": 'The lowest plugin API that the plugin needs, such as "0.1"; required.',
        "plugin": "Table: the plugin itself; required.",
        "config": "One table [config.KEY] for each setting that the plugin owns.",
        "device": "Array of tables: presets of devices.",
        "defaults": "Table: keys of those contributions in this file that leave them out.",
        "contribution": "Array of tables: what the plugin offers.",
        "include": "Array of tables: files whose contributions the plugin offers as its own.",
        "override": "Array of tables: changes of included contributions.",
        "namesake": "Array of tables: packages that are taken for one that the plugin needs.",
    },
    "plugin": {
        "name": "Lower-case letters, digits and underscores, a letter first: prefix of the plugin's flags (--NAME.KEY) "
        "and section in config files; required.",
        "after": "Names of the plugins that load before this one, where they are installed.",
    },
    "config.KEY": {
        "type": "int, float, bool or str; required.",
        "default": "The value where the user sets none; required.",
        "help": "One sentence for --help.",
    },
    "device": {
        "name": "The name for explain --device NAME; required.",
        "platform": "The platform it is a device of; by default the one that the plugin contributes.",
        "arch": "The architecture family, as requirements match it; required.",
        "memory_gib": "Memory per device in GiB; 0 by default.",
        "torch_type": "The type in torch.device texts; by default the platform's name.",
        "accelerator": "false for a CPU; true by default.",
        "dtypes": "Names of torch dtypes; by default float32, float16, bfloat16.",
        "features": "Device features, as device_feature requirements name them.",
        "fp8_dtype": "The torch dtype of its 8-bit floats.",
        "fp8_max": "The largest magnitude that is rounded to, 448 or 224 (float8_e4m3fnuz); follows from the dtype.",
    },
    "contribution": {
        "family": "The family that it is a contribution to; required.",
        "of": "Which op, layer or architecture it implements; required where the family has such, else not allowed. Of "
        "attention it may be left out, and is causal then.",
        "name": "The name for flags and listings, unique per family and of; required.",
        "target": '"package.module:attribute", imported when the contribution comes first for a workload (a '
        "platform: to look for devices); required.",
        "platforms": "Names of the platforms it is for; none means any.",
        "priority": "The higher wins; core's references have 0, which is the default.",
        "preferred": "List of tables with `priority` and `requires`: the first whose requirements hold gives the "
        "priority there, such as for some numbers of tokens or architectures.",
        "summary": "One line for listings.",
        "requires": "List of requirements, each a table with one key.",
        "replaces": "The name of a contribution, of the same family and of, whose place it takes. Not beside tokens.",
        "form": "Of an op: functional (default), out or factory.",
        "layout": 'The cache or weight layout that it works on; "plain" by default.',
    },
    "defaults": {
        "platforms": "As in a contribution.",
        "priority": "As in a contribution.",
        "requires": "Requirements of each contribution, beside its own.",
    },
    "include": {
        "file": '"hardpoint:path", a TOML file of core, or the path of a file beside the manifest. It may hold '
        "[defaults] and [[contribution]]; required.",
        "platforms": "As in a contribution, for those that leave it out.",
        "priority": "As in a contribution, for those that leave it out.",
        "requires": "Requirements of each included contribution, beside its own.",
    },
    "override": {
        "family": "With `of` and `name`: which included contribution it changes; required.",
        "of": "As in the contribution.",
        "name": "As in the contribution; required.",
        "platforms": "Takes the place of the contribution's.",
        "priority": "Takes the place of the contribution's.",
        "preferred": "Takes the place of the contribution's.",
        "summary": "Takes the place of the contribution's.",
        "requires": "Requirements beside the contribution's own.",
        "remove": "true: the plugin does not offer it; false by default.",
    },
    "namesake": {
        "package": "The package that is not meant; required.",
        "meant": "The one that is, which has the same import name or nearly the same package name; required.",
        "summary": "A description of the other one, such as: an asyncio helper.",
    },
}
"""Every key of each table, with its meaning. Nothing else is accepted."""


@dataclass(frozen=True)
class ConfigKey:
    """One setting that a plugin owns: flag ``--PLUGIN.NAME``, key ``[PLUGIN] NAME`` in a config file."""

    name: str
    type: ConfigType
    default: ConfigValue
    help: str = ""

    def parse(self, value: object, where: str) -> ConfigValue:
        """Return ``value`` (text from a flag, or a TOML value) as this key's type, or raise ValueError."""
        if isinstance(value, str) and self.type != "str":
            return self._from_text(value, where)
        wanted = _CONFIG_TYPES[self.type]
        if wanted is float and type(value) is int:
            value = float(value)
        if type(value) is not wanted:
            raise ValueError(f"{where} is of type {self.type}, got {value!r}")
        assert isinstance(value, int | float | bool | str)
        return value

    def _from_text(self, text: str, where: str) -> ConfigValue:
        if self.type == "bool":
            if text.casefold() not in _BOOLEANS:
                raise ValueError(f"{where} is true or false, got {text!r}")
            return _BOOLEANS[text.casefold()]
        try:
            return int(text) if self.type == "int" else float(text)
        except ValueError:
            raise ValueError(f"{where} is of type {self.type}, got {text!r}") from None


@dataclass(frozen=True)
class Namesake:
    """A package that is easily installed by mistake in place of one that the plugin needs."""

    package: str
    meant: str
    summary: str = ""


@dataclass(frozen=True)
class Manifest:
    """The content of a plugin's ``hardpoint.toml``."""

    name: str
    api: ApiVersion
    after: tuple[str, ...] = ()
    config: tuple[ConfigKey, ...] = ()
    devices: tuple[DeviceInfo, ...] = ()
    contributions: tuple[Contribution, ...] = ()
    namesakes: tuple[Namesake, ...] = ()


def is_name(text: str) -> bool:
    """Return True for a valid name of a plugin, contribution or setting: letters a-z, digits and underscores."""
    return _NAME.match(text) is not None


def read_manifest(path: Path) -> Manifest:
    """Read the manifest at ``path``; raises ManifestError, naming the file and the key, if it is not acceptable."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: cannot be read: {error}") from error
    try:
        return parse_manifest(text, str(path))
    except ManifestError:
        raise
    except (OverflowError, RecursionError, ValueError) as error:  # numbers that are too large, or too deep nesting
        raise ManifestError(f"{path}: cannot be read: {error}") from error


def parse_manifest(text: str, source: str) -> Manifest:
    """Parse a manifest's text; ``source`` names it in errors, and the files that it includes lie beside it.

    Equal files give the same Manifest, which is parsed once.
    """
    data = parsed(text, source)
    schema = data.get("schema")
    if type(schema) is not int or schema < 1:
        raise ManifestError(f"{source}: 'schema' is missing or no positive number; write schema = {MANIFEST_SCHEMA}")
    if schema > MANIFEST_SCHEMA:
        raise ManifestError(
            f"{source}: manifest schema {schema} is newer than this host reads (up to {MANIFEST_SCHEMA}); "
            "pip install --upgrade hardpoint-plugin-api hardpoint-core"
        )
    root = _Table(data, source)
    try:
        api = ApiVersion.parse(root.text("api"))
    except ValueError as error:
        raise ManifestError(f"{source}: {error}") from error
    try:
        return _manifest(text, source, included_files(data, source))
    except ManifestError as error:
        unfit = check_api(api)
        if unfit:  # then what is not understood is no misspelling
            raise ManifestError(f"{source}: {unfit}") from error
        raise


@lru_cache(maxsize=64)
def _manifest(text: str, source: str, files: tuple[IncludedFile, ...]) -> Manifest:
    """Validate what a manifest and the files that it includes say; ``api`` is known to be a version."""
    root = _Table(parsed(text, source), source)
    root.only(*KEYS[""])
    plugin = root.table("plugin")
    plugin.only(*KEYS["plugin"])
    root.table("defaults").only(*KEYS["defaults"])
    for key in ("contribution", "include", "override"):
        for table in root.tables(key):
            table.only(*KEYS[key])
    contributions = tuple(
        _contribution(_Table(data, f"{where}: [[contribution]] {data.get('name', number)!r}"))
        for number, (data, where) in enumerate(contribution_tables(root.data, source, files), 1)
    )
    own_platform = next((c.name for c in contributions if c.family == "platform"), None)
    return Manifest(
        name=plugin.name("name"),
        api=ApiVersion.parse(root.text("api")),
        after=plugin.texts("after"),
        config=tuple(_config_key(key, root.table("config")) for key in root.table("config").data),
        devices=tuple(_device(table, own_platform) for table in root.tables("device")),
        contributions=contributions,
        namesakes=tuple(_namesake(table) for table in root.tables("namesake")),
    )


class _Table:
    """A TOML table with its place in the file, for errors that name both."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def fail(self, message: str) -> ManifestError:
        return ManifestError(f"{self.where}: {message}")

    def only(self, *known: str) -> None:
        for key in self.data:
            if key not in known:
                guess = nearest(key, known)
                hint = (
                    f"did you mean {guess!r}?"
                    if guess
                    else "it is misspelt, or the plugin is newer than this Hardpoint"
                )
                raise self.fail(f"unknown key {key!r}; {hint}")

    def get(self, key: str, kind: type, default: Any) -> Any:
        value = self.data.get(key, default)
        if value is _REQUIRED:
            raise self.fail(f"key {key!r} is missing")
        if value is not default and type(value) is not kind:
            raise self.fail(f"{key!r} must be of type {kind.__name__}, got {value!r}")
        return value

    def text(self, key: str, default: Any = ...) -> str:
        return str(self.get(key, str, _REQUIRED if default is ... else default))

    def name(self, key: str) -> str:
        value = self.text(key)
        if not is_name(value):
            raise self.fail(f"{key} = {value!r} must be lower-case letters, digits and underscores, a letter first")
        return value

    def number(self, key: str, default: int) -> int:
        return int(self.get(key, int, default))

    def size(self, key: str, default: float) -> float:
        value = self.data.get(key, default)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise self.fail(f"{key!r} must be a number of zero or more, got {value!r}")
        return float(value)

    def texts(self, key: str) -> tuple[str, ...]:
        values = self.get(key, list, [])
        if not all(isinstance(v, str) for v in values):
            raise self.fail(f"{key!r} must be a list of texts, got {values!r}")
        return tuple(values)

    def table(self, key: str) -> _Table:
        return _Table(self.get(key, dict, {}), f"{self.where}: [{key}]")

    def tables(self, key: str) -> list[_Table]:
        values = self.get(key, list, [])
        if not all(isinstance(v, dict) for v in values):
            raise self.fail(f"{key!r} must be an array of tables: write [[{key}]]")
        return [_Table(v, f"{self.where}: [[{key}]] {v.get('name', number)!r}") for number, v in enumerate(values, 1)]


_REQUIRED: Any = object()


def _config_key(key: str, parent: _Table) -> ConfigKey:
    table = parent.table(key)
    table.only(*KEYS["config.KEY"])
    kind = table.text("type")
    if not is_name(key):
        raise parent.fail(f"key {key!r} must be lower-case letters, digits and underscores, a letter first")
    if kind not in get_args(ConfigType):
        raise table.fail(f"type {kind!r} is not one of {', '.join(get_args(ConfigType))}")
    if "default" not in table.data:
        raise table.fail("key 'default' is missing")
    parsed = ConfigKey(key, kind, 0, table.text("help", ""))  # type: ignore[arg-type]  # narrowed by the check above
    try:
        default = parsed.parse(table.data["default"], "default")
    except ValueError as error:
        raise table.fail(str(error)) from error
    return ConfigKey(key, parsed.type, default, parsed.help)


def _device(table: _Table, own_platform: str | None) -> DeviceInfo:
    """A preset: what ``explain --device NAME`` answers for when the hardware is absent.

    ``platform`` may be left out where the plugin itself contributes one.
    """
    table.only(*KEYS["device"])
    fp8 = None
    if "fp8_dtype" in table.data:
        fp8 = _fp8(table)
    platform = table.text("platform", own_platform or ...)
    return DeviceInfo(
        platform=platform,
        name=table.text("name"),
        torch_type=table.text("torch_type", platform),
        arch=table.text("arch"),
        memory_bytes=int(table.size("memory_gib", 0.0) * 2**30),
        accelerator=table.get("accelerator", bool, True),
        dtypes=frozenset(table.texts("dtypes") or ("float32", "float16", "bfloat16")),
        features=frozenset(table.texts("features")),
        fp8=fp8,
        present=False,
    )


def _fp8(table: _Table) -> Fp8Format:
    dtype = table.text("fp8_dtype")
    try:
        return Fp8Format(dtype, table.size("fp8_max", BUILT_IN[dtype].limit if dtype in BUILT_IN else 0.0))
    except (UnknownNameError, ValueError) as error:
        raise table.fail(f"'fp8_dtype' {dtype!r}: {error}") from error


def _namesake(table: _Table) -> Namesake:
    table.only(*KEYS["namesake"])
    return Namesake(table.text("package"), table.text("meant"), table.text("summary", ""))


def _contribution(table: _Table) -> Contribution:
    table.only(*KEYS["contribution"])
    try:
        family = FAMILIES[table.text("family")]
    except KeyError:
        raise table.fail(str(UnknownNameError("family", table.text("family"), FAMILIES))) from None
    of = table.text("of") if "of" in table.data else family.default_of
    if family.kinds and of not in (known := [kind.of for kind in family.kinds]):
        raise table.fail(str(UnknownNameError(f"'of' for family {family.name!r}", str(of), map(str, known))))
    if family.has_of != (of is not None):
        raise table.fail(
            f"family {family.name!r} "
            + ("needs 'of': which one it implements" if family.has_of else "has no 'of'; remove the key")
        )
    if family.name == "element" and "replaces" in table.data:
        raise table.fail("'replaces': an element's name says what stored numbers mean; give yours another one")
    target = table.text("target")
    if not _TARGET.match(target):
        raise table.fail(f"target {target!r} must be of the form 'package.module:attribute'")
    form = table.text("form", "functional")
    if form not in get_args(Form):
        raise table.fail(f"form {form!r} is not one of {', '.join(get_args(Form))}")
    requires = _requirements(table, family, of)
    if "replaces" in table.data and any(isinstance(each, TokensRequirement) for each in requires):
        raise table.fail(
            "'replaces' takes another's place in steps of every size, and 'tokens' leaves some out; "
            "leave out 'replaces', and give a higher priority"
        )
    return Contribution(
        family=family.name,
        name=table.name("name"),
        target=target,
        of=of,
        platforms=table.texts("platforms"),
        priority=table.number("priority", 0),
        summary=table.text("summary", ""),
        requires=requires,
        replaces=table.text("replaces") if "replaces" in table.data else None,
        form=form,  # type: ignore[arg-type]  # narrowed by the check above
        layout=table.text("layout", "plain"),
        preferred=tuple(_preference(each, family, of) for each in table.tables("preferred")),
    )


def _requirements(table: _Table, family: Family, of: str | None) -> tuple[Requirement, ...]:
    requires = table.get("requires", list, [])
    if not all(isinstance(r, dict) for r in requires):
        raise table.fail("'requires' must be a list of tables such as { package = \"acme-kernels>=2\" }")
    requirements = tuple(parse_requirement(r, family, table.where, of) for r in requires)
    if sum(isinstance(r, TokensRequirement) for r in requirements) > 1:
        raise table.fail("'requires' holds 'tokens' more than once; it is for one range")
    return requirements


def _preference(table: _Table, family: Family, of: str | None) -> Preference:
    table.only("priority", "requires")
    if "priority" not in table.data:
        raise table.fail("key 'priority' is missing")
    if not table.data.get("requires"):
        raise table.fail("key 'requires' is missing: a preference without it is the contribution's 'priority'")
    return Preference(table.number("priority", 0), _requirements(table, family, of))
