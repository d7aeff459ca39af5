"""Qwen3-Next's projections, whose parts take turns, in the formats of formats.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.quantization.writing import Format
from tests.support.checkpoints import GATED_DELTA

TURNS: dict[str, Any] = GATED_DELTA | {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "intermediate_size": 128,
    "mlp_only_layers": [0, 1, 2, 3],
}
"""A Qwen3-Next without experts, in whose larger projection blocks of 32 rows end with each part."""


def turning(form: Format) -> Format:
    """The format; scales of blocks leave out the smaller projection, whose parts they do not fit, as in Qwen's own
    checkpoints."""
    if form.name != "fp8-block":
        return form
    left_out = [f"model.layers.{layer}.linear_attn.in_proj_ba" for layer in range(TURNS["num_hidden_layers"])]
    config = {**form.config, "modules_to_not_convert": [*left_out, "lm_head"]}
    return replace(form, config=config, skip=(*form.skip, "in_proj_ba"))
