"""Settings of an engine on the MI300X of ``tests/rocm/conftest.py``."""

from __future__ import annotations

from typing import Any

from hardpoint.plugin_host import discover


def settings(**more: Any) -> dict[str, Any]:
    """Without Triton's kernels, which no host launches."""
    denied = [
        f"{family}.{one.of}={one.name}" if one.of else f"{family}={one.name}"
        for family in ("op", "linear", "attention", "experts")
        for offer in discover().offers(family)
        if (one := offer.contribution) and offer.plugin == "rocm" and one.target.startswith("hardpoint.kernels.")
    ]
    plugins = {"platform": "rocm", "plugins": ("rocm",), "plugin_config": {}, "enforce_eager": True}
    return {**plugins, "deny": tuple(denied), "dtype": "float16", **more}
