"""Compiled pieces in a folder: each is compiled once, by whichever process needs it first, and loaded from then on.

Loading a piece runs code from the folder. So the folder must belong to this user, nobody else may be able to write to
it, and each file's hash must be the one that was noted when it was written.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hardpoint.compilation.division import PieceGraph
from hardpoint.compilation.program import PieceFunction
from hardpoint.compilation.tracing import quiet
from hardpoint_plugin_api import ConfigError

logger = logging.getLogger(__name__)

_NOTE, _PIECE = "hashes.json", "piece"


def default_folder() -> Path:
    """Where compiled pieces are kept unless the user names another folder."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "hardpoint" / "compiled"


class Artefacts:
    """The compiled pieces of one ``environment``: versions, device, threads, all that compiling depends on.

    ``num_compiled`` and ``num_loaded`` count pieces.
    """

    def __init__(self, folder: Path, environment: str) -> None:
        """Raises ConfigError for a folder that others can write to, or that cannot be made."""
        try:
            for place in reversed((folder, *folder.parents)):  # the mode of mkdir is not that of the parents it makes
                place.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"--compile-cache {folder}: {error.strerror}; name another folder") from error
        self._folder = folder.resolve() / hashlib.sha256(environment.encode()).hexdigest()[:16]
        check_private(folder.resolve())
        self._folder.mkdir(exist_ok=True, mode=0o700)
        self.num_compiled = self.num_loaded = 0

    def program(self, key: str) -> Any | None:
        """The JSON data stored as ``key``; None where there is none, or none that can be read."""
        try:
            return json.loads((self._folder / f"{key}.json").read_text())
        except (OSError, ValueError):
            return None

    def keep_program(self, key: str, data: Any) -> None:
        """Store ``data`` as ``key``, where the disk takes it."""
        try:
            _write(self._folder / f"{key}.json", json.dumps(data).encode())
        except OSError as error:
            logger.warning("%s: %s; the next start traces the model again", self._folder, error.strerror)

    def load(self, key: str) -> PieceFunction | None:
        """The piece of this key; None where it is not there, or not as it was written."""
        folder = self._folder / key
        if not _is_whole(folder):
            return None
        try:
            with quiet():
                loaded = _loaded(folder)
        except Exception as error:  # torch's own check of its version among them
            logger.info("compiled piece %s is compiled again: %s: %s", key, type(error).__name__, error)
            return None
        self.num_loaded += 1
        return loaded

    def get(self, piece: PieceGraph) -> PieceFunction:
        """Load ``piece``, or compile and keep it. Other processes that need it wait meanwhile."""
        with self._locked(piece.key):
            found = self.load(piece.key)
            if found is not None:
                return found
            with quiet():
                return self._compile(piece)

    def _compile(self, piece: PieceGraph) -> PieceFunction:
        from torch._guards import TracingContext, detect_fake_mode, tracing
        from torch._inductor import standalone_compile

        began = time.perf_counter()
        target = self._folder / piece.key
        fresh = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            context = TracingContext(detect_fake_mode(piece.examples))
            with _cache_in(fresh / _PIECE), tracing(context):
                standalone_compile(
                    piece.graph,
                    piece.examples,
                    dynamic_shapes="from_tracing_context",
                    options={"config_patches": {"compile_threads": 1}},
                )
            shutil.rmtree(target, ignore_errors=True)
            fresh.rename(target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        made = _loaded(target)  # from where it lies now, so that all that loading makes is there, too
        _note_hashes(target)
        self.num_compiled += 1
        logger.info("compiled piece %s in %.1f s", piece.key, time.perf_counter() - began)
        return made

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        with open(self._folder / f"{key}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def check_private(folder: Path) -> None:
    """Raise ConfigError where somebody else than this user, or root, can write to ``folder`` or replace it."""
    for place in (folder, *folder.parents):
        found = place.stat()
        others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        is_shared = others and (place == folder or not found.st_mode & stat.S_ISVTX)
        if is_shared or found.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"--compile-cache {folder}: others can write to {place}, and compiled code is run from there; "
                f"take that right away (chmod go-w {place}), or name another folder"
            )


def _is_whole(folder: Path) -> bool:
    """Whether every file of a piece has the hash that was noted when the piece was compiled."""
    try:
        noted: Mapping[str, str] = json.loads((folder / _NOTE).read_text())
        return noted.items() <= _hashes(folder / _PIECE).items()
    except (OSError, ValueError):
        return False


def _loaded(folder: Path) -> PieceFunction:
    from torch._inductor.standalone_compile import CompiledArtifact

    function: PieceFunction = CompiledArtifact.load(path=str(folder / _PIECE), format="unpacked")
    return function


def _note_hashes(folder: Path) -> None:
    _write(folder / _NOTE, json.dumps(_hashes(folder / _PIECE)).encode())


def _hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _write(path: Path, data: bytes) -> None:
    """Write a file at once, or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    Path(file.name).rename(path)


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    """Have Inductor keep its files in ``folder``: by default they lie where others may put theirs."""
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    folder.mkdir()
    with temporary_cache_dir(str(folder)):
        yield
