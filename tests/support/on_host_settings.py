"""Settings of an engine on a GPU whose tensors are on the host, as of ``tests/rocm`` and ``tests/xpu``."""

from __future__ import annotations

from typing import Any

from hardpoint.plugin_host import discover

WITHOUT_PEERS = tuple(f"op.allreduce_add_rms_norm=cuda_{name}_allreduce" for name in ("flashinfer", "peer"))
"""Entries of ``deny``: sums over ranks by the communicator alone."""


def without_triton(platform: str, **more: Any) -> dict[str, Any]:
    """Without Triton's kernels, which no host launches."""
    denied = [
        f"{family}.{one.of}={one.name}" if one.of else f"{family}={one.name}"
        for family in ("op", "linear", "attention", "experts")
        for offer in discover().offers(family)
        if (one := offer.contribution) and offer.plugin == platform and one.target.startswith("hardpoint.kernels.")
    ]
    plugins = {"platform": platform, "plugins": (platform,), "plugin_config": {}, "enforce_eager": True}
    return {**plugins, "deny": tuple(denied), "dtype": "float16", **more}
