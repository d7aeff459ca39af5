"""Where the tensors of a checkpoint go whose model runs by Transformers' code, under each name that they may have."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.checkpoint.formats import open_files
from hardpoint_plugin_api import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Names = dict[str, str | None]


@dataclass(frozen=True)
class ExpertsPlace:
    """Addresses of one expert's matrices: ``parts`` are those of the stack ``slot``, in the order of its rows."""

    slot: str
    parts: tuple[str, ...]

    def of(self, number: int, place: int | None) -> str:
        """Of matrix ``place`` of expert ``number``; None: of all its matrices in one."""
        part = "" if place is None or not self.parts else f".{self.parts[place]}"
        return f"{self.slot}[{number}{part}]"


def stored_names(folder: Path) -> frozenset[str] | None:
    """The names of a checkpoint's tensors; None where it has no files, as one that is only explained."""
    try:
        return open_files(folder).tensors().names
    except CheckpointError:
        return None


class Conversion:
    """Transformers' own tables for the names of one model: from those in files to those in memory."""

    def __init__(self, model: PreTrainedModel, keys: Mapping[str, Any]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        table = get_model_conversion_mapping(model)
        self._renamings = [each for each in table if isinstance(each, WeightRenaming)]
        self._converters = [each for each in table if isinstance(each, WeightConverter)]
        self._prefix, self._keys = model.base_model_prefix, dict(keys)
        self._ignored = [re.compile(pattern) for pattern in (model._keys_to_ignore_on_load_unexpected or ())]

    def find(self, stored: str) -> tuple[str, Any, int]:
        """The name in memory of a stored tensor; the converter that makes it of several, and its place among these."""
        from transformers.core_model_loading import rename_source_key

        name, pattern = rename_source_key(stored, self._renamings, self._converters, self._prefix, self._keys)
        for converter in self._converters:
            if pattern is not None and pattern in converter.source_patterns:
                targets = converter.target_patterns
                if any(_ends(name, target, self._keys) for target in targets):
                    return name, converter, converter.source_patterns.index(pattern)
        return name, None, 0

    def is_ignored(self, stored: str) -> bool:
        """Whether Transformers drops the tensor without a word."""
        return any(pattern.search(stored) for pattern in self._ignored)


def _ends(name: str, target: str, keys: Collection[str]) -> bool:
    return name in keys or target in name


def checkpoint_names(
    own: Names,
    experts: Mapping[str, ExpertsPlace],
    conversion: Conversion,
    stored: frozenset[str] | None,
    unneeded: Collection[str],
) -> Names:
    """Addresses by every name that a tensor of this model may have: ``own``, in memory, and those that are ``stored``.

    ``experts``: the names in memory of stacks of experts. ``unneeded``: buffers that code computes itself. Raises
    CheckpointError for a tensor that Transformers converts in a way that is not supported here.
    """
    names = dict(own)
    for name in sorted(stored or ()):
        if name in own:
            continue
        found, converter, place = conversion.find(name)
        if converter is None and found in own:
            names[name] = own[found]
        elif converter is not None:
            names[name] = _converted(name, found, converter, place, own, experts)
        elif found in unneeded or conversion.is_ignored(name):
            names[name] = None
    return names


def _converted(
    name: str, found: str, converter: Any, place: int, own: Names, experts: Mapping[str, ExpertsPlace]
) -> str | None:
    """The address of a tensor that Transformers stacks or joins with others."""
    operations = [type(each).__name__ for each in converter.operations]
    if operations in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]) and found in experts:
        number = re.search(r"\.(\d+)\.(?!.*\.\d+\.)", f"{name}.")
        if number is not None:
            return experts[found].of(int(number[1]), place if operations[1:] else None)
    if found in own and len(converter.source_patterns) == 1 and not operations:
        return own[found]
    raise CheckpointError(
        f"tensor {name!r}: Transformers makes {found!r} of it by {', '.join(operations)}, which is not supported here"
    )
