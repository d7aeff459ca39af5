"""The hardware that the installed PyTorch was built for, read without importing it."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from hardpoint_plugin_api import Reason

TorchBuild = Mapping[str, str | None]
"""The constants of ``torch/version.py``: ``__version__``, and one per kind of device, None where built without it."""


def torch_build() -> TorchBuild | None:
    """Return the constants of the installed PyTorch's ``version.py``; None where PyTorch is not installed.

    The file is truer than the version's local tag, which packages from the public index and builds from source lack.
    """
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    places = spec.submodule_search_locations if spec else None
    if not places:
        return None
    try:
        tree = ast.parse((Path(places[0]) / "version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    constants: dict[str, str | None] = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Constant):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        if isinstance(target, ast.Name) and isinstance(node.value.value, str | None):
            constants[target.id] = node.value.value
    return constants


def torch_reason(build: TorchBuild | None, key: str, support: str, fix: str) -> Reason | None:
    """Say why ``build`` cannot drive the devices that constant ``key`` stands for, or None where it can.

    ``support`` names that kind of device for people; ``fix`` is how to get a PyTorch that has it.
    """
    if build is None:
        return Reason("torch-missing", "PyTorch is not installed", fix=fix)
    if build.get(key):
        return None
    version = build.get("__version__") or "of unknown version"
    return Reason("torch-build", f"the installed PyTorch {version} was built without {support}", fix=fix)
