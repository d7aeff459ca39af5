"""A checkpoint's ``generation_config.json``: where outputs end, and how its makers would sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardpoint.checkpoint.formats import open_files
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint_plugin_api import CheckpointError, RequestError

_DRAWING = ("temperature", "top_p", "top_k", "min_p")
"""Settings that count only where ``do_sample`` is on, as in Transformers; ours have the same names."""
_ALWAYS = {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
"""Settings that greedy decoding has too, each with our name."""


@dataclass(frozen=True)
class GenerationConfig:
    """Ends of output, and fields of SamplingParams, from the file and from config.json, which it overrides."""

    eos_token_ids: frozenset[int] = frozenset()
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})

    @classmethod
    def read(cls, folder: Path) -> GenerationConfig:
        """Read the file of ``folder`` where there is one; CheckpointError, naming file and key, if it is malformed."""
        data: dict[str, Any] = {}
        files = open_files(folder)
        for name in ("config.json", "generation_config.json"):
            found = _with_inner_ends(files.read_json(name))
            _check(found, files.path(name))
            data |= found
        names = _ALWAYS | ({name: name for name in _DRAWING} if data.get("do_sample") else {})
        sampling = {ours: data[name] for name, ours in names.items() if data.get(name) is not None}
        return cls(frozenset(_eos_ids(data)), sampling if data.get("do_sample") else {"temperature": 0.0} | sampling)

    def sampling_params(self) -> SamplingParams:
        """The makers' sampling, or greedy where they ask for none."""
        return SamplingParams(**self.sampling)


def _with_inner_ends(data: dict[str, Any]) -> dict[str, Any]:
    """A config of several parts may say of the language model alone where outputs end."""
    inner = data.get("text_config")
    ends = inner.get("eos_token_id") if isinstance(inner, Mapping) else None
    return data if data.get("eos_token_id") is not None or ends is None else data | {"eos_token_id": ends}


def _eos_ids(data: Mapping[str, Any]) -> list[Any]:
    eos = data.get("eos_token_id")
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def _check(data: Mapping[str, Any], file: Path) -> None:
    if not all(type(i) is int and i >= 0 for i in _eos_ids(data)):
        raise CheckpointError(
            f"{file}: 'eos_token_id' must be a token id or a list of them, got {data['eos_token_id']!r:.80}"
        )
    if not isinstance(data.get("do_sample"), bool | None):
        raise CheckpointError(f"{file}: 'do_sample' must be true or false, got {data['do_sample']!r:.80}")
    for name, ours in ({name: name for name in _DRAWING} | _ALWAYS).items():
        if data.get(name) is not None:
            try:
                SamplingParams(**{ours: data[name]})
            except RequestError as error:
                raise CheckpointError(f"{file}: {str(error).replace(ours, repr(name), 1)}") from None
