"""Finished cases of a run of the kit, in a file: a run that was ended goes on with the others.

The file has a line of JSON for the run, and behind it one for each case, in the order in which cases finished:

    {"run": {"plugin": {...}, "level": "full", ...}}
    {"key": ["linear", null, "acme_gemm"], "case": "float32/odd", "date": "...", "device": {...}, "loaded": {...},
     "results": [...]}

A line is written at once when its case has ended. One that a crash cut short is dropped. A case in which the process
died or ran out of time is kept once the run has come to its end: one that was ended itself tries the case again.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any

from pydantic import BaseModel, ValidationError

from hardpoint.conformance.certificate import now
from hardpoint.conformance.certificate_file import Line
from hardpoint.conformance.content import FileStamps, Loaded
from hardpoint.conformance.proof import Key
from hardpoint.conformance.trials import Result
from hardpoint_plugin_api import ConfigError, PluginLoadError


class _LoadedLine(BaseModel):
    files: list[str]
    absent: list[str]


class _Case(BaseModel):
    """One line of the file behind the first."""

    key: tuple[str, str | None, str]
    case: str
    date: str
    device: dict[str, str | None]
    loaded: _LoadedLine
    results: list[Line]


class FinishedCases:
    """The finished cases of one run; several threads may read and add. To be closed."""

    def __init__(self, path: Path, run: Mapping[str, Any], stamps: FileStamps) -> None:
        """Read the file at ``path``, or make it. ``run`` is plain data that says which run it is, ``stamps`` are the
        stamps of the plugin's files as the run found them.

        Raises ConfigError where the file is of another run, is no file of finished cases, lies among the plugin's
        files, or cannot be read or written, and where another process has it open.
        """
        self._path, self._stamps, self._lock = path, stamps, Lock()
        self._results: dict[tuple[Key, str], list[Result]] = {}
        self._device: Mapping[str, Any] | None = None
        self._loaded: dict[Key, Loaded] = {}
        self.oldest: str | None = None
        """The date of the first case that an earlier run finished; None for no such case."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b")  # noqa: SIM115  # closed by ``close``
        except OSError as error:
            raise ConfigError(f"--resume {path}: cannot be opened: {error.strerror or error}") from error
        try:
            self._have()
            self._read(json.loads(json.dumps(run)))
            if stamps.changed():
                raise ConfigError(
                    f"--resume {path}: lies among the plugin's files, and would change them; name another"
                )
        except BaseException:
            self._file.close()
            raise

    def _have(self) -> None:
        """Keep other runs from the file."""
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            raise ConfigError(f"--resume {self._path}: is no regular file")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"--resume {self._path}: another run writes to it; wait for its end, or name another file"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"--resume {self._path}: cannot be locked: {error.strerror}; name another file"
            ) from error

    def _read(self, run: Mapping[str, Any]) -> None:
        self._file.seek(0)
        text = self._file.read()
        whole, _, cut = text.rpartition(b"\n")
        if not whole:
            if not _line({"run": run}).startswith(cut):
                raise self._is_something_else()
            self._file.truncate(0)
            self._append({"run": run})
            self._size = os.fstat(self._file.fileno()).st_size
            return
        first, *lines = whole.split(b"\n")
        self._compare(first, run)
        for number, line in enumerate(lines, 2):
            try:
                one = _Case.model_validate_json(line)
            except ValidationError as error:
                raise ConfigError(
                    f"--resume {self._path}: line {number} is no finished case; name another file"
                ) from error
            self._check(one.device)
            self.oldest = min(one.date, self.oldest or one.date)
            data = json.loads(line)
            self._keep(one.key, one.case, map(Result.from_json, data["results"]), Loaded.from_json(data["loaded"]))
        self._size = len(text) - len(cut)
        self._file.truncate(self._size)

    def _compare(self, first: bytes, run: Mapping[str, Any]) -> None:
        try:
            found = json.loads(first)["run"]
            theirs = {what: found.get(what) for what in run}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._is_something_else() from error
        for what, here in run.items():
            if theirs[what] != here:
                raise self._is_of_another_run(what, theirs[what], here)

    def _is_something_else(self) -> ConfigError:
        return ConfigError(f"--resume {self._path}: is no file of --resume, and was left as it is; name another")

    def _is_of_another_run(self, what: str, there: object, here: object) -> ConfigError:
        while isinstance(there, Mapping) and isinstance(here, Mapping):  # the first entry that differs
            key = next(key for key in sorted(there.keys() | here) if there.get(key) != here.get(key))
            what, there, here = f"{what}.{key}", there.get(key), here.get(key)
        remedy = "undo the change of the plugin's files, or name" if what == "plugin.content_hash" else "name"
        return ConfigError(
            f"--resume {self._path}: is of another run: {what} is {there!r} there and {here!r} here; {remedy} another "
            "file"
        )

    def results_of(self, key: Key, case: str, device: Mapping[str, Any]) -> Sequence[Result] | None:
        """The results of a case; None where it has not finished. Raises ConfigError where the file is of another
        device."""
        self._check(device)
        return self._results.get((key, case))

    def _check(self, device: Mapping[str, Any]) -> None:
        with self._lock:
            self._device = self._device or dict(device)
            if self._device != device:
                raise self._is_of_another_run("device", self._device, device)

    def loaded_by(self, key: Key) -> Loaded:
        """The content that the finished cases of a contribution loaded."""
        return self._loaded.get(key, Loaded())

    def add(self, key: Key, case: str, device: Mapping[str, Any], results: Sequence[Result], loaded: Loaded) -> None:
        """Keep a case that has ended, and the content that its process loaded.

        Raises ConfigError where it cannot be written, or the device is another one, and PluginLoadError where the
        plugin's files have changed: no certificate will come of the run.
        """
        if changed := self._stamps.changed():
            raise PluginLoadError(f"{changed} changed while it was tried: nothing is certified; run it again")
        self._check(device)
        self._keep(key, case, results, loaded)
        where = {"key": key, "case": case, "date": now(), "device": dict(device), "loaded": loaded.to_json()}
        self._append({**where, "results": [result.to_json() for result in results]})

    def _keep(self, key: Key, case: str, results: Iterable[Result], loaded: Loaded) -> None:
        with self._lock:
            self._results[key, case] = list(results)
            self._loaded[key] = self.loaded_by(key) | loaded

    def _append(self, data: Mapping[str, Any]) -> None:
        line = _line(data)
        with self._lock:
            if self._file.closed:  # the run was ended
                return
            size = os.fstat(self._file.fileno()).st_size
            try:
                written = os.write(self._file.fileno(), line)
            except OSError as error:
                raise ConfigError(f"--resume {self._path}: cannot be written: {error.strerror}") from error
            if written != len(line):
                os.ftruncate(self._file.fileno(), size)
                raise ConfigError(f"--resume {self._path}: cannot be written: the disk is full")

    def drop(self) -> None:
        """Take out the cases that this run has added: nothing may be certified by them."""
        os.ftruncate(self._file.fileno(), self._size)

    def close(self) -> None:
        """Let other runs have the file."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> FinishedCases:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _line(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data).encode() + b"\n"
