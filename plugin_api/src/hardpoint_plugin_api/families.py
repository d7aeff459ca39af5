"""The kinds of thing that can be plugged. More may come; none gets a mechanism of its own."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Literal

from hardpoint_plugin_api import requests

Stability = Literal["stable", "provisional"]

ANY = "*"
"""The ``of`` of a contribution that implements whatever its family has names for."""


@dataclass(frozen=True)
class Family:
    """One kind of pluggable part.

    ``has_of``: its contributions name what they implement (which op, layer, architecture). ``kinds``: where core
    defines all that can be implemented, the workload of each, with its ``of`` as default of that field; a contribution
    without ``of`` is of the first kind, ``workload``. ``flag``: the command-line flag that chooses in this family.
    ``stepwise``: what winners may differ by from step to step: nothing, the step's size, or size and phase.
    ``numeric``: its contributions compute the model's numbers, so that numeric features of the engine (BATCH_INVARIANT)
    are asked of them.
    """

    name: str
    workload: type[requests.Workload]
    stability: Stability
    summary: str
    has_of: bool = False
    flag: str | None = None
    stepwise: Literal["no", "size", "size and phase"] = "no"
    numeric: bool = False
    kinds: tuple[type[requests.Workload], ...] = ()

    @property
    def default_of(self) -> str | None:
        """The ``of`` of a contribution that leaves it out; None where it must not, or has none."""
        return self.workload.of

    def workload_of(self, of: str | None) -> type[requests.Workload]:
        """Return the workload class of what a contribution implements."""
        return next((kind for kind in self.kinds if kind.of == of), self.workload)

    def takes(self, key: str, of: str | None = None) -> bool:
        """Return True where workloads of this family have the field that a requirement named ``key`` looks at.

        In a family with ``kinds``: workloads of ``of``, or of any kind for None.
        """
        kinds = self.kinds if self.kinds and of is None else (self.workload_of(of),)
        return any(key in _field_names(kind) for kind in kinds)  # type: ignore[arg-type]  # classes are hashable


@cache
def _field_names(workload: type[requests.Workload]) -> frozenset[str]:
    """The fields of ``workload``, which each requirement of each manifest is held against."""
    return frozenset(field.name for field in fields(workload))


_ALL = (
    Family("platform", requests.PlatformWorkload, "provisional", "a kind of device", flag="--platform"),
    Family(
        "op", requests.OpWorkload, "provisional", "an implementation of a named op", True, stepwise="size", numeric=True
    ),
    Family("layer", requests.LayerWorkload, "provisional", "a replacement for a whole layer class", True, numeric=True),
    Family(
        "attention",
        requests.AttentionWorkload,
        "provisional",
        "cache layout, store, plan and forward of attention",
        True,
        flag="--attention-backend",
        stepwise="size and phase",
        numeric=True,
        kinds=(requests.AttentionWorkload, requests.LatentWorkload),
    ),
    Family(
        "linear",
        requests.LinearWorkload,
        "provisional",
        "matmul behind a quantization scheme",
        flag="--linear-backend",
        stepwise="size",
        numeric=True,
    ),
    Family(
        "quantization",
        requests.QuantizationWorkload,
        "provisional",
        "a reader of quantized checkpoints, or a quantizer of others",
        True,
    ),
    Family("element", requests.ElementWorkload, "provisional", "a number format of quantized matrices, by its name"),
    Family(
        "experts",
        requests.ExpertsWorkload,
        "provisional",
        "kernels of a mixture of experts",
        flag="--experts-backend",
        stepwise="size",
        numeric=True,
    ),
    Family(
        "all2all",
        requests.All2AllWorkload,
        "provisional",
        "dispatch and combine between expert ranks",
        flag="--all2all-backend",
        numeric=True,
    ),
    Family(
        "communicator",
        requests.CommunicatorWorkload,
        "provisional",
        "collectives of a group of ranks",
        flag="--communicator",
        stepwise="size",
        numeric=True,
    ),
    Family(
        "model",
        requests.ModelWorkload,
        "provisional",
        "a model architecture",
        True,
        flag="--model-impl",
        numeric=True,
    ),
    Family(
        "drafter",
        requests.DrafterWorkload,
        "provisional",
        "tokens that may follow, for the next step to verify",
        flag="--speculative-method",
    ),
    Family(
        "tool_parser",
        requests.ToolParserWorkload,
        "provisional",
        "a syntax of tool calls in a model's output",
        flag="--tool-parser",
    ),
    Family(
        "reasoning_parser",
        requests.ReasoningParserWorkload,
        "provisional",
        "how a model's output marks its reasoning",
        flag="--reasoning-parser",
    ),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
"""Every family by name."""
