"""Certificates: what a run of the kit found, as JSON, bound to the plugin's content and to the device's architecture.

A certificate is a list of cases with their errors and limits, not a signature: it is worth as much as whoever ran it.
Its compact form has counts, reasons and nearest errors for each check in place of the cases; both say the same of every
contribution.
Where a plugin contributes what stands in core, such as a portable kernel, core's package that it stands in is part of
that content: tiles that were tuned later and written there, too, were not tried. It counts for a contribution if it was
made by these rules or later ones, for the contribution's installed sources (``content.py``), for the installed
distributions that the contribution requires, for a device of the same architecture and with the same settings, if all
shards are there, and if it proves the contribution (``proof.py``).

Where they are looked for: in ``certificates/`` in the plugin's own package, where an author ships them (such a file is
no part of the content that it speaks of, or none could name its hash), and in ``hardpoint-certificates/`` in the
working directory, beside the lock file. An installed plugin is trusted with a process's memory, so its author's
certificates are trusted too. Users who want certificates of their own name a folder with ``--certificates``: then that
folder alone counts.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from importlib_metadata import PackageNotFoundError, version
from pydantic import ValidationError

from hardpoint.conformance.content import SHIPPED_FOLDER, Content, Sources, content_of
from hardpoint.conformance.plan import LEVELS, Level
from hardpoint.conformance.proof import Asked, Key, Proof, Tally, join, prove, tally
from hardpoint.plugin_host.wrapped import Installed, Wrapped, required_by
from hardpoint_plugin_api import API_VERSION, ConfigError, ConfigKey, ConfigValue, DeviceInfo, PluginLoadError, Reason

if TYPE_CHECKING:
    from hardpoint.config import EngineConfig
    from hardpoint.conformance.trials import Result
    from hardpoint.plugin_host import Offer, PluginSet
    from hardpoint.plugin_host.record import PluginRecord

logger = logging.getLogger(__name__)

SCHEMA = 1
KIT_VERSION = 11
"""Raised when a check comes to ask for more than before, or a rule to refuse results that it took: a certificate by a
stricter rule holds by a wider one."""

OPERATOR_FOLDER = "hardpoint-certificates"
"""In the working directory: certificates of the operator's own."""

_LIBRARIES = ("torch", "triton", "numpy", "transformers", "covertable", "hardpoint-core", "hardpoint-plugin-api")


@dataclass(frozen=True)
class Certificate:
    """The findings of one run, or of several merged shards of it.

    ``plugin`` holds name, distribution, version, content_hash, packages, api and editable; ``device`` platform, name,
    arch, isa and driver; ``libraries`` versions. ``shards`` are the numbers that were run, of ``num_shards``.
    ``case_list`` is the digest of all cases of all shards; ``scope`` says which contributions were asked for, and
    ``asked`` what there was to prove of them. ``wrapped`` are the distributions that they require, as they were
    installed. ``sources`` are those of each contribution, and ``files`` the SHA-256 of the files that count for any of
    them, by name.

    ``results`` are empty in the compact form, which has ``tallied`` alone; else ``tallied`` is empty.
    """

    plugin: Mapping[str, Any]
    device: Mapping[str, Any]
    level: Level
    seed: int
    results: tuple[Result, ...]
    created: str
    case_list: str
    scope: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    shards: tuple[int, ...] = (1,)
    num_shards: int = 1
    api_version: str = str(API_VERSION)
    kit_version: int = KIT_VERSION
    libraries: Mapping[str, str] = field(default_factory=dict)
    asked: tuple[Asked, ...] = ()
    wrapped: Mapping[str, Wrapped] = field(default_factory=dict)
    tallied: tuple[Tally, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[Sources, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether all shards are there, and no case was picked out by hand."""
        numbers = tuple(range(1, self.num_shards + 1))
        return self.num_shards >= 1 and self.shards == numbers and self.scope.get("case", "*") == "*"

    @cached_property
    def tallies(self) -> tuple[Tally, ...]:
        """The tallies of each check of each contribution."""
        return tally(self.results) or self.tallied

    @cached_property
    def proofs(self) -> tuple[Proof, ...]:
        """The verdict on each contribution that was asked for, in the manifest's order."""
        asked = {one.key: one for one in self.asked}
        asked |= {one.key: Asked(one.key) for one in self.tallies if one.key not in asked}
        return tuple(prove(one, [t for t in self.tallies if t.key == one.key]) for one in asked.values())

    @property
    def outcomes(self) -> Counter[str]:
        """How many checks came to which outcome."""
        return sum((one.outcomes for one in self.tallies), Counter())

    def proof_of(self, family: str, of: str | None, name: str) -> Proof | None:
        """The verdict on one contribution; None where it was not asked for, or the run is not complete."""
        own = (proof for proof in self.proofs if proof.key == (family, of, name))
        return next(own, None) if self.is_complete else None

    def proves(self, family: str, of: str | None, name: str) -> bool:
        """Whether it shows one contribution to be right."""
        proof = self.proof_of(family, of, name)
        return proof is not None and proof.verdict == "proved"

    def difference(self, key: Key, content: Content) -> str | None:
        """How the sources with which a contribution was tried differ from those in the installed ``content``; None
        where they do not."""
        if self.plugin["content_hash"] == content.hash:
            return None
        if new := set(content.packages) - set(self.plugin.get("packages", content.packages)):
            return f"the plugin's package {min(new)} is new"
        own = next((one for one in self.sources if one.key == key), None)
        return "a file of the plugin has changed" if own is None else content.difference(own, self.files)

    def compact(self) -> Certificate:
        """The same without its cases: small enough to be shipped in a plugin's package."""
        return replace(self, results=(), tallied=self.tallies)

    def to_json(self) -> dict[str, Any]:
        """This certificate as plain data: with ``results``, or in the compact form with ``checks``."""
        if self.results or not self.tallied:
            found = {"results": [r.to_json() for r in self.results]}
        else:
            found = {"checks": [t.to_json() for t in self.tallied]}
        return {
            "schema": SCHEMA,
            "kit_version": self.kit_version,
            "created": self.created,
            "plugin": dict(self.plugin),
            "api_version": self.api_version,
            "device": dict(self.device),
            "libraries": dict(self.libraries),
            "settings": dict(self.settings),
            "level": self.level,
            "seed": self.seed,
            "scope": dict(self.scope),
            "shards": list(self.shards),
            "num_shards": self.num_shards,
            "complete": self.is_complete,
            "case_list": self.case_list,
            "summary": dict(sorted(self.outcomes.items())),
            "wrapped": {name: wrapped.to_json() for name, wrapped in self.wrapped.items()},
            "files": dict(self.files),
            "sources": [one.to_json() for one in self.sources],
            "asked": [one.to_json() for one in self.asked],
            "proofs": [proof.to_json() for proof in self.proofs],
            **found,
        }

    def write(self, path: Path) -> None:
        """Write it to a file, whose folder is made. Raises ConfigError."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the certificate {path}: {error.strerror}") from error


def read_certificate(path: Path) -> Certificate:
    """Read a certificate; raises ConfigError, naming the file and the field, if it is none."""
    from hardpoint.conformance.certificate_file import CertificateFile
    from hardpoint.conformance.trials import Result

    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
        CertificateFile.model_validate_json(text)
        return Certificate(
            plugin=data["plugin"],
            device=data["device"],
            level=data["level"],
            seed=data["seed"],
            results=tuple(map(Result.from_json, data.get("results", ()))),
            created=data["created"],
            case_list=data["case_list"],
            scope=data["scope"],
            settings=data["settings"],
            shards=tuple(data["shards"]),
            num_shards=data["num_shards"],
            api_version=data["api_version"],
            kit_version=data["kit_version"],
            libraries=data["libraries"],
            asked=tuple(map(Asked.from_json, data.get("asked", ()))),
            wrapped={name: Wrapped.from_json(name, entry) for name, entry in data.get("wrapped", {}).items()},
            tallied=tuple(map(Tally.from_json, data.get("checks", ()))),
            files=data.get("files", {}),
            sources=tuple(map(Sources.from_json, data.get("sources", ()))),
        )
    except OSError as error:
        raise ConfigError(f"certificate {path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ConfigError(f"certificate {path}: is no certificate: {where}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"certificate {path}: is no certificate: {error}") from error


_OF_A_RUN = (
    *("plugin", "device", "libraries", "wrapped", "api_version", "kit_version", "asked"),
    *("level", "seed", "scope", "settings", "num_shards", "case_list"),
)
"""Fields that all shards of one run share."""


def merge(certificates: Sequence[Certificate]) -> Certificate:
    """Join the shards of one run; the whole is compact if a shard is.

    Raises ConfigError where they are of unlike runs, or one shard comes twice.
    """
    first = certificates[0]
    for other in certificates[1:]:
        for what in _OF_A_RUN:
            ours, theirs = getattr(first, what), getattr(other, what)
            if ours != theirs:
                raise ConfigError(
                    f"these certificates are of unlike runs: {what} is {ours!r} in one, {theirs!r} in another"
                )
    numbers = [n for c in certificates for n in c.shards]
    twice = [n for n, count in Counter(numbers).items() if count > 1]
    if twice:
        raise ConfigError(f"shard {twice[0]} of {first.num_shards} is among them {Counter(numbers)[twice[0]]} times")
    ordered = sorted(certificates, key=lambda c: c.shards)
    whole = replace(
        first,
        shards=tuple(sorted(numbers)),
        created=max(c.created for c in certificates),
        files={name: digest for c in certificates for name, digest in c.files.items()},
        sources=_joined([c.sources for c in certificates]),
    )
    if any(c.tallied for c in certificates):
        return replace(whole, results=(), tallied=join([c.tallies for c in ordered]))
    return replace(whole, results=tuple(result for c in ordered for result in c.results))


def _joined(shards: Sequence[Sequence[Sources]]) -> tuple[Sources, ...]:
    """The sources of the contributions of which every shard knows them."""
    known: dict[Key, list[Sources]] = {}
    for one in (one for shard in shards for one in shard):
        known.setdefault(one.key, []).append(one)
    loaded = {key: reduce(or_, (one.loaded for one in found)) for key, found in known.items()}
    return tuple(replace(known[key][0], loaded=all_) for key, all_ in loaded.items() if len(known[key]) == len(shards))


def describe_plugin(record: PluginRecord, content: Content) -> dict[str, Any]:
    """The plugin's entry in a certificate."""
    assert record.manifest is not None
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "content_hash": content.hash,
        "packages": list(content.packages),
        "api": str(record.manifest.api),
        "editable": record.editable,
    }


def library_versions(record: PluginRecord) -> dict[str, str]:
    """Versions of what results may depend on: torch and the like, and the packages that the manifest requires."""
    found = {}
    for name in sorted({*_LIBRARIES, record.distribution, *required_by(record.contributions)}):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def now() -> str:
    """The date of a certificate made now: UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Standing:
    """The certified state of one contribution on one device. ``level`` None: nothing; ``is_core``: nothing is needed.

    ``unproved`` is what a certificate that would count says of it instead ("not proved", "failed"), and ``why`` its
    reasons. ``stale`` says which file or distribution is not as it was when a certificate was made.
    """

    level: Level | None = None
    date: str = ""
    is_core: bool = False
    unproved: str = ""
    why: str = ""
    stale: str = ""

    def __str__(self) -> str:
        if self.is_core:
            return "reference"
        if self.level:
            return f"{self.level}, {self.date[:10]}"
        return self.unproved or "no"


class Certificates:
    """The certificates that count for an engine with the installed plugins. Files are read when first asked about."""

    def __init__(self, plugins: PluginSet, config: EngineConfig) -> None:
        """``config`` is the engine's, with the plugins' own settings.

        Where it names a folder, certificates are looked for there alone; raises ConfigError if there is no such folder.
        """
        folder = config.certificates
        self._plugins, self._folder = plugins, Path(folder).expanduser() if folder is not None else None
        if self._folder is not None and not self._folder.is_dir():
            raise ConfigError(f"--certificates {folder}: there is no such folder")
        self._settings = config.plugin_config
        self._wrapped = Installed()
        self._by_plugin: dict[str, list[Certificate]] = {}
        self._contents: dict[str, Content] = {}

    def standing(self, offer: Offer, device: DeviceInfo) -> Standing:
        """The best level that a certificate for the installed content, this architecture and these settings shows."""
        record = self._plugins.record(offer.plugin)
        if record.is_core:
            return Standing(is_core=True)
        c, best = offer.contribution, Standing()
        for certificate in self._of(record):
            known = certificate.device
            if any(known.get(key) != getattr(device, key) for key in ("platform", "arch", "isa")):
                continue
            proof = certificate.proof_of(c.family, c.of, c.name)
            if proof is None or proof.verdict == "not here" or not self._has_settings(certificate, offer, device):
                continue
            if difference := certificate.difference(proof.key, self._contents[record.name]):
                best = best if best.level else replace(best, stale=f"made with other sources: {difference}")
                continue
            if difference := self._other_library(offer, certificate):
                text = f"made with another library than is installed: {difference}"
                best = best if best.level else replace(best, stale=text)
                continue
            if proof.verdict != "proved":
                best = best if best.level else replace(best, unproved=proof.verdict, why="; ".join(proof.why))
                continue
            found = Standing(certificate.level, certificate.created)
            if best.level is None or (LEVELS.index(certificate.level), found.date) > (
                LEVELS.index(best.level),
                best.date,
            ):
                best = found
        return best

    def _other_library(self, offer: Offer, certificate: Certificate) -> str | None:
        """Which library that the contribution requires is not the one that the certificate was made with."""
        try:
            return self._wrapped.difference(required_by([offer.contribution]), certificate.wrapped)
        except PluginLoadError as error:  # what cannot be read cannot be certified
            return str(error)

    def refusal(self, offer: Offer, device: DeviceInfo, least: Level = "full") -> Reason | None:
        """Why ``--require-certified`` refuses a contribution; None where it is certified, or core's own."""
        standing = self.standing(offer, device)
        if standing.is_core or (standing.level and LEVELS.index(standing.level) >= LEVELS.index(least)):
            return None
        c = offer.contribution
        settings = "".join(
            f" --setting {shlex.quote(f'{offer.plugin}.{key.name}={self._setting(offer.plugin, key)}')}"
            for key in self._plugins.config_keys()[offer.plugin].values()
            if self._setting(offer.plugin, key) != key.default
        )
        what = (
            f"no certificate by this kit's rules (version {KIT_VERSION}) shows it right in its installed version on "
            f"{_kind(device)}, with this engine's settings"
        )
        if standing.level:
            rules = f"by this kit's rules (version {KIT_VERSION})"
            what = f"its certificate {rules} on {_kind(device)} is of level {standing.level}"
        elif standing.unproved:
            what = ": ".join(filter(None, [f"it was tried on {_kind(device)}, and {standing.unproved}", standing.why]))
        elif standing.stale:
            what = f"its certificate was {standing.stale}"
        return Reason(
            "not-proved" if not standing.level and standing.unproved else "not-certified",
            what,
            wanted=f"level {least} or better",
            supported=str(standing.level or "none"),
            fix=f"hardpoint conform {offer.plugin} --family {c.family} --name {c.name} --level {least}{settings} "
            f"--json {OPERATOR_FOLDER}/{offer.plugin}-{c.family}-{c.name}.json",
        )

    def _of_platform(self, device: DeviceInfo) -> set[str]:
        """The plugin that contributes the device's platform."""
        return {o.plugin for o in self._plugins.offers("platform") if o.contribution.name == device.platform}

    def _setting(self, plugin: str, key: ConfigKey) -> ConfigValue:
        return self._settings.get(plugin, {}).get(key.name, key.default)

    def _has_settings(self, certificate: Certificate, offer: Offer, device: DeviceInfo) -> bool:
        """Whether it was made with the engine's settings: all of the contribution's plugin, defaults included, and
        those of the platform's plugin that the run was given."""
        platforms = self._of_platform(device)
        for plugin in {offer.plugin} | platforms:
            keys, given = self._plugins.config_keys()[plugin], certificate.settings.get(plugin, {})
            try:
                made = {name: keys[name].parse(value, name) for name, value in given.items()}
            except (KeyError, ValueError):  # of a version of the plugin that had other keys
                return False
            decisive = made if plugin in platforms else keys
            if any(made.get(name, keys[name].default) != self._setting(plugin, keys[name]) for name in decisive):
                return False
        return True

    def _of(self, record: PluginRecord) -> list[Certificate]:
        """A plugin's certificates by this kit's rules; with any, its installed content is among ``_contents``."""
        if record.name not in self._by_plugin:
            found = self._all(self._paths(record))
            own = [c for c in found if c.plugin["name"] == record.name and c.kit_version >= KIT_VERSION]
            try:
                if own:
                    self._contents[record.name] = content_of(record)
            except PluginLoadError:
                own = []  # without a hash, nothing tells which files they speak of
            self._by_plugin[record.name] = own
        return self._by_plugin[record.name]

    def _paths(self, record: PluginRecord) -> Iterator[Path]:
        folders = [self._folder] if self._folder is not None else [Path(OPERATOR_FOLDER)]
        if self._folder is None and record.folder is not None:
            folders.append(record.folder / SHIPPED_FOLDER)
        return (path for folder in folders for path in sorted(folder.glob("*.json")))

    def _all(self, paths: Iterable[Path]) -> Iterator[Certificate]:
        for path in paths:
            if path not in self._files:
                self._files[path] = _read_or_warn(path)
            if (found := self._files[path]) is not None:
                yield found

    @cached_property
    def _files(self) -> dict[Path, Certificate | None]:
        return {}


def _read_or_warn(path: Path) -> Certificate | None:
    """The certificate in a file; where there is none, a warning says so, and nothing is certified by it."""
    try:
        return read_certificate(path)
    except ConfigError as error:
        logger.warning("%s; nothing is certified by this file: move it, or make the certificate anew", error)
        return None


def _kind(device: DeviceInfo) -> str:
    """The device, as far as kernels depend on it."""
    return device.arch if device.isa is None else f"{device.arch} with {device.isa}"
