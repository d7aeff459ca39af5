"""DeepSeek-V2 configs that leave parts of the mixture out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV2Config

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.models.deepseek_v2 import deepseek_v2
from hardpoint_plugin_api import MLPArgs, MoEArgs
from tests.support.checkpoints import DEEPSEEK_V2


def config(**changes: Any) -> HFConfig:
    return HFConfig(Path("config.json"), DeepseekV2Config(**DEEPSEEK_V2).to_dict() | changes)


@pytest.mark.parametrize("count", [None, 0])
def test_no_shared_experts(count: int | None) -> None:
    args = deepseek_v2(config(n_shared_experts=count))
    mixture = args.blocks[-1].feed_forward
    assert isinstance(mixture, MoEArgs)
    assert mixture.shared_size == 0
    assert not [name for name in args.weight_names if "shared" in name]


def test_no_routed_experts() -> None:
    args = deepseek_v2(config(n_routed_experts=None, moe_intermediate_size=None))
    assert all(isinstance(block.feed_forward, MLPArgs) for block in args.blocks)


@pytest.mark.parametrize(("top_k", "renormalize", "scaling"), [(1, False, 2.0), (2, True, 1.0)])
def test_one_expert_is_scaled_and_not_renormalized(top_k: int, renormalize: bool, scaling: float) -> None:
    changes = {"num_experts_per_tok": top_k, "norm_topk_prob": True, "routed_scaling_factor": 2.0}
    mixture = deepseek_v2(config(**changes)).blocks[-1].feed_forward
    assert isinstance(mixture, MoEArgs)
    assert (mixture.router.renormalize, mixture.router.scaling) == (renormalize, scaling)
