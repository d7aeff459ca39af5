"""Which matrices in an OCP MX format are multiplied by core's emulated product, for want of a kernel.

Sizes are those of a rank's own matrices, as the engine selected kernels for them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from hardpoint_plugin_api import Choice, EngineInfo, ExpertsWorkload, LinearWorkload

logger = logging.getLogger(__name__)

_FP4, _MX_SCALE = "float4_e2m1", "float8_e8m0fnu"
_CORE = "core"


def warn_of_emulated(engine: EngineInfo) -> None:
    """Warn of the first such matrix, with AITER's reasons against it, and of how many others like it there are."""
    found = list(emulated(engine.choices))
    if not found:
        return
    first, others = found[0], f", and for {len(found) - 1} of other sizes" if len(found) > 1 else ""
    refused = {name: reasons for (plugin, name), reasons in first.refused.items() if plugin == "rocm"}
    reasons = "; ".join(f"{name}: {reason}" for name, each in refused.items() for reason in each if "aiter" in name)
    logger.warning(
        "%s: %s is in an OCP MX format, and core's emulated product serves for it%s, which makes numbers of the weight "
        "at every step: expect it to be slow on %s. %s",
        engine.model,
        first.workload.key(),
        others,
        engine.device.name,
        reasons or "No kernel for it is here",
    )


def emulated(choices: tuple[Choice, ...]) -> Iterator[Choice]:
    """The choices of linear and experts kernels with an operand in MXFP4 that core serves."""
    for choice in choices:
        workload = choice.workload
        if not isinstance(workload, LinearWorkload | ExpertsWorkload) or workload.spec is None:
            continue
        is_mx = any(spec.element == _FP4 and spec.scales[0].format == _MX_SCALE for spec in workload.spec)
        if is_mx and any(plugin == _CORE for plugin, _ in choice.chosen):
            yield choice
