"""Whether the compiled kernels are here, and what to do where they are not. Imports no torch: detection asks."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from hardpoint_plugin_api import Reason

FEATURE = "native_kernels"
"""The device feature that says so."""

_SOURCE = Path(__file__).resolve().parents[2]
# Without --no-cache-dir pip would take the wheel that it built, and kept, without a compiler or on another machine.
_WHERE = (
    f"--editable {_SOURCE}" if (_SOURCE / "setup.py").exists() else "--no-cache-dir --force-reinstall hardpoint-cpu"
)
REBUILD = f"{sys.executable} -m pip install --no-deps {_WHERE}"
"""The command that compiles the kernels anew, from the clone that this package was installed from, if it was."""

FIX = f"install a C++ compiler (Debian: apt install g++), then: {REBUILD}"


def missing() -> Reason | None:
    """Why there are no compiled kernels; None where there are."""
    try:
        importlib.import_module("hardpoint_cpu._native")
    except ImportError as error:
        return Reason("not-compiled", f"hardpoint-cpu was installed without its compiled kernels ({error})", fix=FIX)
    return None


def slower_than_it_could_be() -> str | None:
    """How the levels that were built fall short of this CPU; None where its best level is among them."""
    from hardpoint_cpu import _native

    best, built = _native.cpu_levels()[0], _native.built_levels()
    if best in built:
        return None
    return f"kernels were built for {', '.join(built)}, and this CPU has {best}; to build them for it: {REBUILD}"
