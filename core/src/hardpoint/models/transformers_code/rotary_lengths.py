"""Rotary embeddings whose angles depend on the longest sequence of a step: fixed here for all that the engine serves.

Keys stay in the cache as they were rotated, and the longest sequence of a batch is no matter of the others.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_FIXED = "fixed"
"""No name of Transformers': its code then takes the angles as they are."""


def fix_rotary_lengths(model: nn.Module, max_positions: int) -> None:
    """Have the rotary modules of ``model`` use the angles for sequences of up to ``max_positions`` tokens.

    longrope has its long factors where that is beyond the original context, and its short ones elsewhere. Dynamic
    scaling begins beyond max_position_embeddings alone; a model that serves more keeps it, and is refused.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    modules: list[Any] = [module for module in model.modules() if isinstance(getattr(module, "rope_type", None), str)]
    for module in modules:
        if module.rope_type == "longrope":
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, "cpu", seq_len=max_positions)
            module.inv_freq = frequencies
            module.rope_type = _FIXED
        elif module.rope_type == "dynamic" and max_positions <= module.config.max_position_embeddings:
            module.rope_type = _FIXED
