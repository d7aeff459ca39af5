"""The tuning file: measured winners per device and workload, which come before declared priorities.

JSON: ``{"schema": 1, "winners": [...]}``. A winner has ``device`` (DeviceInfo.name, matched exactly), ``family``,
``of``, ``workload`` (Workload.key()) and ``name``, the candidate's. It may have ``tokens``, the steps in which it wins,
as in a manifest (``{"min": 9, "max": 64}``; any, where it is left out), ``versions``, those of the distributions with
which it was measured, ``context``, what the platform's ``tuning_context`` said then, and ``measured``: microseconds by
candidate, by a step's number of tokens. Where something else is installed than ``versions`` says, or the context is
another, the measurement proves nothing, and is left aside with a warning.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import importlib_metadata

from hardpoint_plugin_api import (
    FAMILIES,
    ConfigError,
    DeviceInfo,
    Feature,
    ManifestError,
    TokensRequirement,
    Workload,
    parse_requirement,
)

logger = logging.getLogger(__name__)

_KEYS = ("device", "family", "of", "workload", "name")
_OPTIONAL = ("tokens", "versions", "context", "measured")

_ANY = TokensRequirement()

Key = tuple[str, str, str | None, str]
"""Device, family, of, workload."""


@dataclass(frozen=True)
class Verdict:
    """The fastest candidate in some steps. ``measured``: microseconds by candidate, by a step's number of tokens."""

    name: str
    tokens: TokensRequirement = _ANY
    measured: Mapping[int, Mapping[str, float]] = field(default_factory=dict, hash=False)
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    context: Mapping[str, str] = field(default_factory=dict, hash=False)

    def outdated(self) -> frozenset[str]:
        """Packages that it was measured with, and that are not installed in that version."""
        return frozenset(f"{name} {version}" for name, version in self.versions.items() if _installed(name) != version)

    def evidence(self) -> str | None:
        """The time measured where this range begins, beside the next best; None where none was written down."""
        tokens = next((n for n in sorted(self.measured) if self.name in self.measured[n]), None)
        if tokens is None:
            return None
        times = dict(self.measured[tokens])
        own = f"{written_us(times.pop(self.name))} at {written_tokens(tokens)}"
        if not times:
            return own
        other = min(times, key=lambda name: (times[name], name))
        beside = "next best" if times[other] >= self.measured[tokens][self.name] else "though faster is"
        return f"{own}, {beside} {other} {written_us(times[other])}"

    def against(self, loser: str) -> str | None:
        """The same beside one that lost, with the fewest tokens that both were measured with."""
        both = (n for n in sorted(self.measured) if {self.name, loser} <= self.measured[n].keys())
        tokens = next(both, None)
        if tokens is None:
            return None
        own, its = (written_us(self.measured[tokens][name]) for name in (self.name, loser))
        return f"{own} at {written_tokens(tokens)}, this {its}"

    def to_json(self, key: Key) -> dict[str, object]:
        """The file's entry."""
        device, family, of, workload = key
        entry: dict[str, object] = {"device": device, "family": family, "of": of, "workload": workload}
        entry["name"] = self.name
        tokens = {"min": self.tokens.min, "max": self.tokens.max, "phase": self.tokens.phase}
        if self.tokens != _ANY:
            entry["tokens"] = {name: value for name, value in tokens.items() if value is not None}
        if self.versions:
            entry["versions"] = dict(sorted(self.versions.items()))
        if self.context:
            entry["context"] = dict(sorted(self.context.items()))
        if self.measured:
            entry["measured"] = {str(n): dict(self.measured[n]) for n in sorted(self.measured)}
        return entry


def written_us(microseconds: float) -> str:
    """``3.2 us``; no decimals from a hundred on."""
    return f"{microseconds:,.{0 if microseconds >= 100 else 1}f} us"


def written_tokens(tokens: int) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{tokens} token{'' if tokens == 1 else 's'}"


def written_context(context: Mapping[str, str]) -> str:
    """``isa avx2, threads 4``."""
    return ", ".join(f"{name} {value}" for name, value in sorted(context.items()))


@dataclass(frozen=True)
class TuningFile:
    """Verdicts by (device name, family, of, workload key)."""

    winners: Mapping[Key, tuple[Verdict, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, flag: str = "--tuning-file") -> TuningFile:
        """Read ``path``, which the user gave by ``flag``.

        Raises ConfigError, naming the flag, the file and the entry, if it is not a tuning file.
        """
        where = f"{flag} {path}"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else f"it is not JSON: {error}"
            raise ConfigError(f"{where}: the tuning file cannot be read: {why}; hardpoint tune writes one") from error
        if not isinstance(data, dict) or data.get("schema") != 1 or not isinstance(data.get("winners"), list):
            raise ConfigError(f'{where}: no tuning file: expected {{"schema": 1, "winners": [...]}}')
        winners: dict[Key, list[Verdict]] = {}
        for number, entry in enumerate(data["winners"], 1):
            key, verdict = _parse(entry, f"{where}: entry {number}")
            winners.setdefault(key, []).append(verdict)
        return cls({key: tuple(verdicts) for key, verdicts in winners.items()})

    def write(self, path: Path) -> None:
        """Write all of it to ``path``. Raises ConfigError."""
        entries = [verdict.to_json(key) for key, verdicts in self.winners.items() for verdict in verdicts]
        try:
            path.write_text(json.dumps({"schema": 1, "winners": entries}, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"tuning file {path}: cannot be written: {error.strerror}") from error

    def for_engine(self, device: DeviceInfo, path: str, context: Mapping[str, str] | None = None) -> TuningFile:
        """The measurements on ``device``, in ``context``, with the versions that are installed.

        ``context`` is the platform's; None, of an absent device, takes what was written last. Warnings say what is
        left aside, and what does not say its context.
        """
        own = {key: verdicts for key, verdicts in self.winners.items() if key[0] == device.name}
        if self.winners and not own:
            others = ", ".join(sorted({key[0] for key in self.winners}))
            logger.warning("tuning file %s holds nothing of this device, %s, but of: %s", path, device.name, others)
        stale, foreign = set[str](), set[str]()
        kept: dict[Key, tuple[Verdict, ...]] = {}
        for key, verdicts in own.items():
            outdated = {verdict: found for verdict in verdicts if (found := verdict.outdated())}
            stale.update(*outdated.values())
            fresh = [verdict for verdict in verdicts if verdict not in outdated]
            wanted = fresh[-1].context if fresh and context is None else context
            if here := tuple(v for v in fresh if not v.context or v.context == wanted):
                kept[key] = here
            else:
                foreign |= {written_context(verdict.context) for verdict in fresh}
        chosen = TuningFile(kept)
        chosen._warn(path, context, stale, foreign)
        return chosen

    def _warn(self, path: str, context: Mapping[str, str] | None, stale: set[str], foreign: set[str]) -> None:
        """Of versions and contexts that were left aside, and of what is kept and says no context."""
        again = "hardpoint tune measures again"
        aside = "tuning file %s: what was measured with %s is left aside, since %s; %s"
        if stale:
            logger.warning(aside, path, ", ".join(sorted(stale)), "something else is installed now", again)
        here = written_context(context or {})
        if foreign:
            logger.warning(
                aside, path, " or ".join(sorted(foreign)), f"this engine has {here or 'no such thing'}", again
            )
        if here and any(v.measured and not v.context for verdicts in self.winners.values() for v in verdicts):
            logger.warning("tuning file %s does not say whether it was measured with %s; %s", path, here, again)

    def verdicts(self, device: DeviceInfo, workload: Workload) -> tuple[Verdict, ...]:
        """The measurements of ``workload`` on ``device``.

        Where a request must be served alike in steps of every size, a verdict on some of them is none.
        """
        found = self.winners.get((device.name, workload.family, workload.of, workload.key()), ())
        if Feature.BATCH_INVARIANT not in workload.features:
            return found
        return tuple(verdict for verdict in found if verdict.tokens == _ANY)


def _installed(distribution: str) -> str | None:
    try:
        return importlib_metadata.version(distribution)
    except importlib_metadata.PackageNotFoundError:
        return None


def _parse(entry: object, where: str) -> tuple[Key, Verdict]:
    """Raises ConfigError."""
    if not isinstance(entry, dict) or set(entry) - set(_OPTIONAL) != set(_KEYS):
        raise ConfigError(f"{where} must have exactly the keys {', '.join(_KEYS)}, and may have {', '.join(_OPTIONAL)}")
    texts = {key: entry[key] for key in _KEYS}
    if not all(isinstance(value, str) or (key == "of" and value is None) for key, value in texts.items()):
        raise ConfigError(f"{where} must hold texts ('of' may be null): {texts}")
    device, family, of, workload, name = texts.values()
    if family not in FAMILIES:
        raise ConfigError(f"{where}: unknown family {family!r}")
    of, tokens = of or FAMILIES[family].default_of, _ANY
    if "tokens" in entry:
        try:
            tokens = cast(TokensRequirement, parse_requirement({"tokens": entry["tokens"]}, FAMILIES[family], where))
        except ManifestError as error:
            raise ConfigError(str(error)) from error
    versions, context, measured = (entry.get(key, {}) for key in ("versions", "context", "measured"))
    for key, table in (("versions", versions), ("context", context)):
        if not _is_table(table, str):
            raise ConfigError(f"{where}: {key} must be texts by name, got {table!r}")
    if "" in versions:
        raise ConfigError(f"{where}: versions must be texts by the name of a package, got {versions!r:.200}")
    if not isinstance(measured, dict) or not all(
        _MEASURED_TOKENS.fullmatch(n) and _is_table(times, int | float) and all(map(_is_time, times.values()))
        for n, times in measured.items()
    ):
        raise ConfigError(f"{where}: measured must be microseconds by candidate, by tokens, got {measured!r:.200}")
    by_tokens = {int(n): {c: float(t) for c, t in times.items()} for n, times in measured.items()}
    return (device, family, of, workload), Verdict(name, tokens, by_tokens, versions, context)


_MEASURED_TOKENS = re.compile(r"[1-9]\d{0,11}", re.ASCII)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _is_table(value: object, kind: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, kind) for item in value.values())


def versions_of(distributions: Iterable[str]) -> dict[str, str]:
    """The versions installed of some distributions; what is not installed is left out."""
    return {name: version for name in distributions if (version := _installed(name)) is not None}
