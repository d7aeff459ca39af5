"""Whether Python keeps the bytecode of torch's modules: without it each start compiles some 2,000 of them anew."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def missing_bytecode(package: str = "torch") -> str | None:
    """The reason for which ``package`` has no bytecode after this start either, with the remedy; None where it has.

    ``package`` is not imported. Docker images often set PYTHONDONTWRITEBYTECODE, and ``pip install --no-compile``
    leaves bytecode out.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None or spec.cached is None or os.path.exists(spec.cached):
        return None
    folder = Path(spec.cached).parent
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if sys.dont_write_bytecode:
        reason, fix = "PYTHONDONTWRITEBYTECODE is set", "unset it"
    elif not os.access(place, os.W_OK):
        reason, fix = f"{folder} cannot be written", "set PYTHONPYCACHEPREFIX to a folder that can be"
    else:
        return None
    return (
        f"Python keeps no bytecode of {package}, since {reason}: each start compiles its modules, which takes seconds; "
        f"{fix}, or run once: {sys.executable} -m compileall -q {Path(spec.origin).parent}"
    )
