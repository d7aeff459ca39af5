"""The JSON files of a checkpoint, each of which holds one object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hardpoint_plugin_api import CheckpointError


def read_json(file: Path) -> dict[str, Any]:
    """The object in ``file``, empty if there is no such file. Raises CheckpointError for anything else in it."""
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}; copy or download it again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file}: must hold a JSON object, got {type(data).__name__}")
    return data
