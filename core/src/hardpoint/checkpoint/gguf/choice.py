"""Which GGUF file of a folder is meant: people keep several quantizations of a model side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hardpoint.checkpoint.gguf.container import split_name
from hardpoint_plugin_api import CheckpointError

_BESIDE = "mmproj"
"""Begins the names of files with an image encoder, which are no models by themselves."""


def gguf_files(folder: Path) -> list[Path]:
    """The models in ``folder``, sorted; of a split one its first part."""
    files = (file for file in folder.glob("*.gguf") if not file.name.startswith(_BESIDE) and file.is_file())
    return sorted(file for file in files if split_name(file)[1] == 1)


def file_patterns(quant: str) -> Sequence[str]:
    """Patterns of the files to download for ``REPOSITORY:QUANT``, whichever case the name has."""
    written = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in quant)
    return (f"*{written}*.gguf",)


def choose_file(folder: Path, quant: str | None) -> Path:
    """The model in ``folder``, or the one with ``quant`` in its name: between dots and dashes, whichever case.

    Raises CheckpointError, with the files that there are, for none and for several.
    """
    files = gguf_files(folder)
    names = ", ".join(file.name for file in files)
    if quant is None:
        if len(files) == 1:
            return files[0]
        raise CheckpointError(
            f"{folder} holds several GGUF files: {names}; give one of them, or {folder}:Q4_K_M with what is in its name"
        )
    word = re.compile(rf"(?:^|[-._]){re.escape(quant)}(?:[-._]|$)", re.IGNORECASE)
    found = [file for file in files if word.search(split_name(file)[0])]
    if len(found) == 1:
        return found[0]
    told = (
        f"several GGUF files with {quant!r} in their names: {', '.join(f.name for f in found)}; give more of the name"
        if found
        else (f"no GGUF file with {quant!r} in its name" + (f"; there are {names}" if files else ""))
    )
    raise CheckpointError(f"{folder} holds {told}")
