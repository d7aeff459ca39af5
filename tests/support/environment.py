"""A Python environment of its own, beside the one that runs the tests: what it installs is gone with its folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support import programs

_OFFLINE = "--quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation"
_SCRIPTS = {
    "pip": f'command=$1; shift\nexec "$PYTHON" -m pip "$command" {_OFFLINE} "$@"',
    "hardpoint": 'exec "$PYTHON" -m hardpoint.cli "$@"',
    "pytest": 'exec "$PYTHON" -m pytest "$@"',
}
"""``pip install`` and ``pip wheel`` need no network here: what a plugin depends on is in the environment already."""
_FORKED = {"hardpoint": "hardpoint.cli", "pytest": "pytest"}
"""The modules of scripts whose processes may begin with torch imported."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment on top of this process's own, with ``pip``, ``hardpoint`` and ``pytest``."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> Environment:
        """Make it in ``folder``; takes a fraction of a second."""
        venv.create(folder, with_pip=False, symlinks=True)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        parents = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
        lines = [f"import site; site.addsitedir({parent!r})\n" for parent in parents]
        (site / "parents.pth").write_text("".join(lines), encoding="utf-8")
        environment = cls(folder)
        for name, body in _SCRIPTS.items():
            environment._write_script(name, body)
        return environment

    def _write_script(self, name: str, body: str) -> None:
        script = self.folder / "bin" / name
        script.write_text(f"#!/bin/sh\nPYTHON={self.folder / 'bin/python'}\n{body}\n", encoding="utf-8")
        script.chmod(0o755)

    @contextmanager
    def forking(self) -> Iterator[Environment]:
        """Have ``hardpoint`` and ``pytest`` begin with torch imported meanwhile, see ``programs.py``."""
        address, client = self.folder / "programs", self.folder / "client.py"
        client.write_text(programs.CLIENT, encoding="utf-8")
        for name, module in _FORKED.items():
            self._write_script(name, f'exec "$PYTHON" -IS {client} {address} {module} "$@"')
        code = f"import sys; sys.path.append({programs.ROOT!r})\n"
        code += f"from tests.support import programs; programs.serve({str(address)!r})"
        command, pipe = [str(self.folder / "bin/python"), "-c", code], subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=self.folder, env=self.variables()) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield self

    def variables(self) -> dict[str, str]:
        """The variables of a process in it: nothing of the caller's that could matter."""
        return {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }

    def run(self, command: str, folder: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run ``command`` by bash in ``folder``, stopping at its first failure; stdout and stderr are one text."""
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=folder,
            env=self.variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
