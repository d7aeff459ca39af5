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
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from pathlib import Path
from typing import Any

import torch

from hardpoint.compilation import direct
from hardpoint.compilation.division import PieceGraph
from hardpoint.compilation.program import PieceFunction
from hardpoint.compilation.tracing import quiet
from hardpoint_plugin_api import ConfigError

logger = logging.getLogger(__name__)

_NOTE, _PIECE, _ENTRY = "hashes.json", "piece", "aotautograd"
_DIRECT = "direct"
"""The folder of a piece that runs without Inductor, in place of ``_PIECE``."""

_MOST_LOADERS = 8
"""Threads that load pieces."""

_cache_variable = threading.Lock()
"""Held while Inductor's variable of the process names a folder of ours."""


def default_folder() -> Path:
    """Where compiled pieces are kept unless the user names another folder."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "hardpoint" / "compiled"


class Artefacts:
    """The compiled pieces of one ``environment``: versions, device, threads, all that compiling depends on.

    ``num_compiled`` and ``num_loaded`` count pieces.
    """

    def __init__(self, folder: Path, environment: str, device: int | None = None) -> None:
        """``device``: the number of the accelerator that pieces run on.

        Raises ConfigError for a folder that others can write to, or that cannot be made.
        """
        try:
            for place in reversed((folder, *folder.parents)):  # the mode of mkdir is not that of the parents it makes
                place.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"--compile-cache {folder}: {error.strerror}; name another folder") from error
        self._device, self._settings = device, _header_settings()
        environment += json.dumps(self._settings)
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

    def load(self, keys: Iterable[str]) -> dict[str, PieceFunction]:
        """The pieces of these keys; without those that are not there as they were written."""
        with ThreadPoolExecutor(_MOST_LOADERS) as pool:
            wanted = list(dict.fromkeys(keys))
            notes = dict(zip(wanted, pool.map(lambda key: _checked_note(self._folder / key), wanted), strict=True))
        whole = {key: note for key, note in notes.items() if note is not None}
        found = self._load_directly(key for key in whole if (self._folder / key / _DIRECT).is_dir())
        found |= self._load_by_inductor({k: note for k, note in whole.items() if (self._folder / k / _PIECE).is_dir()})
        self.num_loaded += len(found)
        return {key: found[key] for key in wanted if key in found}

    def _load_directly(self, keys: Iterable[str]) -> dict[str, PieceFunction]:
        """The pieces of these keys, which need no Inductor; without those that cannot be loaded."""
        found = {}
        for key in keys:
            try:
                found[key] = direct.load(self._folder / key / _DIRECT)
            except Exception as error:  # of code that is run
                logger.info("compiled piece %s cannot be loaded: %s: %s", key, type(error).__name__, error)
        return found

    def _load_by_inductor(self, whole: Mapping[str, Mapping[str, str]]) -> dict[str, PieceFunction]:
        """The pieces of these keys, whose notes were checked, loaded side by side; without those that cannot be."""
        if not whole:
            return {}
        try:
            with quiet():
                entries = [_entry(note) for note in whole.values()]
                futures = self._loaded(self._together(whole), entries)
        except Exception as error:  # a disk's, or a compiler's
            logger.info("compiled pieces cannot be loaded together: %s: %s", type(error).__name__, error)
            return {}
        found = {}
        for key, future in zip(whole, futures, strict=True):
            if (failure := future.exception()) is None:
                found[key] = future.result()
            else:  # torch's own check of its version among them
                logger.info("compiled piece %s cannot be loaded: %s: %s", key, type(failure).__name__, failure)
        return found

    def get(self, piece: PieceGraph) -> PieceFunction:
        """Load ``piece``, or compile and keep it. Other processes that need it wait meanwhile."""
        with self._locked(piece.key):
            if found := self.load([piece.key]):
                return found[piece.key]
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
            with _cache_in(fresh / _PIECE, self._settings), tracing(context):
                standalone_compile(
                    piece.graph,
                    piece.examples,
                    dynamic_shapes="from_tracing_context",
                    options={"config_patches": {"compile_threads": 1}},
                )
            is_direct = direct.keep(fresh / _PIECE, fresh / _DIRECT, len(piece.examples), piece.num_outputs)
            if is_direct:
                shutil.rmtree(fresh / _PIECE)
            shutil.rmtree(target, ignore_errors=True)
            fresh.rename(target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        function = direct.load(target / _DIRECT) if is_direct else self._loaded_first(target / _PIECE)
        _note_hashes(target)
        self.num_compiled += 1
        logger.info("compiled piece %s in %.1f s", piece.key, time.perf_counter() - began)
        return function

    def _loaded_first(self, folder: Path) -> PieceFunction:
        """The piece in ``folder``, from where it will be loaded later, so that all that loading makes is there."""
        (made,) = self._loaded(folder, [_entry(_hashes(folder))])
        return made.result()

    def _together(self, notes: Mapping[str, Mapping[str, str]]) -> Path:
        """A folder that has the files of all these pieces, whose ``notes`` were checked.

        Inductor's variable of the process names one folder, in which threads can look for their pieces side by side.
        Names of files are hashes of their contents' source, so equal names serve equally.
        """
        if len(notes) == 1:
            return self._folder / next(iter(notes)) / _PIECE
        keys: dict[str, str] = {}
        for key, note in notes.items():
            for name in note:
                keys.setdefault(name, key)
        files = {name: notes[key][name] for name, key in keys.items()}
        digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
        place = self._folder / f"together-{digest}"
        with self._locked(place.name):
            if files.items() <= _hashes(place).items():
                return place
            fresh = Path(tempfile.mkdtemp(dir=self._folder))
            try:
                for name, key in keys.items():
                    (fresh / name).parent.mkdir(parents=True, exist_ok=True)
                    _link(self._folder / key / _PIECE / name, fresh / name)
                shutil.rmtree(place, ignore_errors=True)
                fresh.rename(place)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
        return place

    def _loaded(self, folder: Path, entries: Sequence[str]) -> list[Future[PieceFunction]]:
        """Load these entries of Inductor's cache in ``folder``, in as many threads; all have ended.

        Each thread has this thread's settings of torch's compiler. Loading changes two of them for a while, and sets
        back what it found; where settings are the process's (torch 2.11), threads must find them changed already.
        """
        from torch._functorch import config as functorch
        from torch._inductor import config as inductor

        skips, fails = {"unsafe_skip_cache_dynamic_shape_guards": True}, {"strict_autograd_cache": True}
        with (
            _cache_in(folder, self._settings),
            inductor.patch(skips),
            functorch.patch(fails),
            ThreadPoolExecutor(min(len(entries), _MOST_LOADERS)) as pool,
        ):
            return [pool.submit(copy_context().run, _load, entry, self._device) for entry in entries]

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


def _checked_note(folder: Path) -> dict[str, str] | None:
    """The hash of each file of a piece, noted when it was compiled; None where a file has another one."""
    try:
        noted: dict[str, str] = json.loads((folder / _NOTE).read_text())
        return noted if noted.items() <= _hashes(_place(folder)).items() else None
    except (OSError, ValueError):
        return None


def _place(folder: Path) -> Path:
    """The files of the piece in ``folder``."""
    return folder / _DIRECT if (folder / _DIRECT).is_dir() else folder / _PIECE


def _entry(files: Iterable[str]) -> str:
    """Inductor's name of the piece that has these files."""
    (name,) = {Path(file).parts[1] for file in files if file.startswith(f"{_ENTRY}/")}
    return name


def _load(entry: str, device: int | None) -> PieceFunction:
    """Load an entry of Inductor's cache. Threads have a current device each."""
    from torch._inductor.standalone_compile import CacheCompiledArtifact

    if device is not None:
        torch.accelerator.set_device_index(device)
    function: PieceFunction = CacheCompiledArtifact._load_impl(nullcontext(), entry)
    return function


def _link(source: Path, target: Path) -> None:
    """Have ``target`` be a link to ``source``, or a copy where the disk knows no links."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _note_hashes(folder: Path) -> None:
    _write(folder / _NOTE, json.dumps(_hashes(_place(folder))).encode())


def _hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _write(path: Path, data: bytes) -> None:
    """Write a file at once, or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    Path(file.name).rename(path)


@contextmanager
def _cache_in(folder: Path, settings: dict[str, bool]) -> Iterator[None]:
    """Have Inductor keep its files in ``folder``: by default they lie where others may put theirs."""
    from torch._inductor import config as inductor
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    folder.mkdir(exist_ok=True)
    with _cache_variable, temporary_cache_dir(str(folder)), inductor.patch(settings):
        yield


def _header_settings() -> dict[str, bool]:
    """Settings of Inductor for C++ headers, which it compiles into a folder of its own choice.

    Where others can write to that folder, code would be compiled from theirs, so headers are not compiled beforehand.
    """
    from torch._inductor.runtime import cache_dir_utils

    folder = Path(cache_dir_utils.default_cache_dir()) / "precompiled_headers"
    try:
        for place in (folder.parent, folder):
            place.mkdir(exist_ok=True, mode=0o700)
            if place.is_symlink():
                raise ConfigError(f"{place} is a link")
        check_private(folder.resolve())
    except (OSError, ConfigError) as error:
        logger.info("C++ headers are not compiled beforehand: %s", error)
        return {"cpp_cache_precompile_headers": False}
    return {}
