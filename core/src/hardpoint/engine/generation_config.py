"""A checkpoint's ``generation_config.json``: where outputs end, and how its makers would sample."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardpoint.engine.sampling_params import SamplingParams
from hardpoint_plugin_api import CheckpointError


@dataclass(frozen=True)
class GenerationConfig:
    """The file's settings as they stand; ends of output from it and from config.json."""

    eos_token_ids: frozenset[int] = frozenset()
    sampling: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> GenerationConfig:
        """Read the file of ``folder`` where there is one; raises CheckpointError if it is malformed."""
        data: dict[str, Any] = {}
        for name in ("config.json", "generation_config.json"):
            path = folder / name
            if path.is_file():
                try:
                    data |= json.loads(path.read_text(encoding="utf-8"))
                except (OSError, ValueError, TypeError) as error:
                    raise CheckpointError(f"{path}: cannot be read: {error}") from error
        eos = data.get("eos_token_id")
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(type(i) is int for i in ids):
            raise CheckpointError(f"{folder}: 'eos_token_id' must be a token id or a list of them, got {eos!r}")
        known = ("temperature", "top_p", "top_k", "min_p")
        sampling = {k: data[k] for k in known if data.get(k) is not None} if data.get("do_sample") else {}
        return cls(frozenset(ids), sampling)

    def sampling_params(self) -> SamplingParams:
        """The makers' sampling, or greedy where they ask for none."""
        return SamplingParams(**(self.sampling or {"temperature": 0.0}))
