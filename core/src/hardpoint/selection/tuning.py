"""The tuning file: measured winners per device and workload, which come before declared priorities.

JSON: ``{"schema": 1, "winners": [{"device": ..., "family": ..., "of": ..., "workload": ..., "name": ...}]}``, where
``device`` is DeviceInfo.name (matched exactly) and ``workload`` is Workload.key().
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from hardpoint_plugin_api import ConfigError, DeviceInfo, Workload

_KEYS = ("device", "family", "of", "workload", "name")


@dataclass(frozen=True)
class TuningFile:
    """Winners by (device name, family, of, workload key)."""

    winners: dict[tuple[str, str, str | None, str], str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> TuningFile:
        """Read ``path``; raises ConfigError, naming the file and the entry, if it is not a tuning file."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"tuning file {path}: cannot be read: {error}") from error
        if not isinstance(data, dict) or data.get("schema") != 1 or not isinstance(data.get("winners"), list):
            raise ConfigError(f'tuning file {path}: expected {{"schema": 1, "winners": [...]}}')
        winners = {}
        for number, entry in enumerate(data["winners"], 1):
            if not isinstance(entry, dict) or set(entry) != set(_KEYS):
                raise ConfigError(f"tuning file {path}: entry {number} must have exactly the keys {', '.join(_KEYS)}")
            if not all(isinstance(value, str) or (key == "of" and value is None) for key, value in entry.items()):
                raise ConfigError(f"tuning file {path}: entry {number} must hold texts ('of' may be null): {entry}")
            device, family, of, workload, name = (entry[key] for key in _KEYS)
            winners[device, family, of, workload] = name
        return cls(winners)

    def winner(self, device: DeviceInfo, workload: Workload) -> str | None:
        """The measured winner's name for ``workload`` on ``device``, or None where nothing was measured."""
        return self.winners.get((device.name, workload.family, workload.of, workload.key()))
