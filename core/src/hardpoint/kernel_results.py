"""The first result of a plugin's kernel, compared with the outputs that its interface promises.

A kernel that returns nothing, or a tensor of another shape, would fail far from its own code, where a traceback names
the next layer. Only a kernel's first result is compared: later calls cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hardpoint.plugin_host import Offer
from hardpoint.plugin_host.blame import misbehaved
from hardpoint_plugin_api import AttentionMetadata

Promise = Callable[..., object]
"""Takes a call's arguments, and returns outputs of the promised shapes and dtypes. Their values do not matter."""


def check_result(offer: Offer, name: str, result: object, promised: object) -> None:
    """Raise PluginLoadError, which names the plugin, where ``result`` of ``name`` is no tensors like ``promised``."""
    found, wanted = _forms(result), _forms(promised)
    if found != wanted:
        raise misbehaved(
            offer, f"returned {_listed(found)} from {name}(), where the interface asks for {_listed(wanted)}"
        )


def check_first_plan(offer: Offer, backend: Any) -> None:
    """Have the first plan of ``backend``, an instance of AttentionBackend that ``offer`` made, checked for its type.

    That call raises PluginLoadError where ``plan`` returns no AttentionMetadata.
    """
    plan = backend.plan

    def first(*args: Any, **kwargs: Any) -> object:
        result = plan(*args, **kwargs)
        if not isinstance(result, AttentionMetadata):
            raise misbehaved(
                offer, f"returned {result!r:.80} from plan(), where the interface asks for AttentionMetadata"
            )
        del backend.plan
        return result

    backend.plan = first


def _forms(values: object) -> list[str]:
    """The dtype and shape of each tensor, the type of what is none."""
    return [
        f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        for x in tree_leaves(values, is_leaf=lambda x: x is None)
    ]


def _listed(forms: list[str]) -> str:
    return ", ".join(forms) or "nothing"
