"""A Python environment of its own, beside the one that runs the tests: what it installs is gone with its folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

_OFFLINE = "--quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation"
_SCRIPTS = {
    "pip": f'command=$1; shift\nexec "$PYTHON" -m pip "$command" {_OFFLINE} "$@"',
    "hardpoint": 'exec "$PYTHON" -m hardpoint.cli "$@"',
    "pytest": 'exec "$PYTHON" -m pytest "$@"',
}
"""``pip install`` and ``pip wheel`` need no network here: what a plugin depends on is in the environment already."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment on top of this process's own, with ``pip``, ``hardpoint`` and ``pytest``."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> Environment:
        """Make it in ``folder``; takes a fraction of a second."""
        venv.create(folder, with_pip=False, symlinks=True)
        python = folder / "bin/python"
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        parents = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
        lines = [f"import site; site.addsitedir({parent!r})\n" for parent in parents]
        (site / "parents.pth").write_text("".join(lines), encoding="utf-8")
        for name, body in _SCRIPTS.items():
            script = folder / "bin" / name
            script.write_text(f"#!/bin/sh\nPYTHON={python}\n{body}\n", encoding="utf-8")
            script.chmod(0o755)
        return cls(folder)

    def variables(self, home: Path) -> dict[str, str]:
        """The variables of a process in it: nothing of the caller's that could matter."""
        return {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
        }

    def run(self, command: str, folder: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run ``command`` by bash in ``folder``, stopping at its first failure; stdout and stderr are one text."""
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=folder,
            env=self.variables(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
