"""Which format a checkpoint has: its location tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hardpoint.checkpoint.files import CheckpointFiles, Folder
from hardpoint.checkpoint.gguf.files import open_gguf
from hardpoint.checkpoint.mistral_files import PARAMS, MistralFiles, is_mistral_folder
from hardpoint.checkpoint.tekken import TEKKEN, TekkenFiles

_FORMATS: dict[str, Callable[[Path], CheckpointFiles]] = {".gguf": open_gguf}
"""Formats of a single file, by the ending of its name."""
_BY_NAME: dict[str, Callable[[Path], CheckpointFiles]] = {PARAMS: MistralFiles, TEKKEN: TekkenFiles}
"""Formats of a folder, by the file in it that stands for the format where the folder has several. Any other location is
a folder."""


def open_files(location: Path) -> CheckpointFiles:
    """The files of the checkpoint at ``location``. Raises CheckpointError for a damaged file."""
    if location.name in _BY_NAME and location.is_file():
        return _BY_NAME[location.name](location.parent)
    if is_mistral_folder(location):
        return MistralFiles(location)
    return _FORMATS.get(location.suffix.lower(), Folder)(location)


def is_checkpoint_file(path: Path) -> bool:
    """Whether a file of this name is a checkpoint by itself."""
    return path.suffix.lower() in _FORMATS or path.name in _BY_NAME
