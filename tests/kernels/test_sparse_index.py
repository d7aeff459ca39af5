"""The indexer of sparse attention, in Triton."""

from __future__ import annotations

import pytest
import torch

from hardpoint.kernels import sparse_index
from hardpoint.ops.index_scores import index_scores
from hardpoint_plugin_api import ConfigError
from tests.kernels.compiling import PAIRS_OF_TARGETS, Job, compile_kernels
from tests.kernels.judged import failures, variants


@pytest.mark.parametrize(("name", "dtype", "device"), variants("store_index_keys", "index_scores", "topk_positions"))
def test_meets_the_error_model(name: str, dtype: torch.dtype, device: str) -> None:
    failed = failures(name, getattr(sparse_index, name), dtype, device, {"index_scores": ("long", "many_heads")})
    assert not failed, "\n".join(failed)


def test_says_how_many_heads_it_takes() -> None:
    cases = index_scores.cases(torch.Generator().manual_seed(0), torch.float32, torch.device("cpu"))
    q, weights, *rest = next(cases).args
    with pytest.raises(ConfigError, match="up to 128 index heads, got 132"):
        sparse_index.index_scores(q.repeat(1, 33, 1), weights.repeat(1, 33), *rest)


def jobs(target: str, element: str) -> list[Job]:
    """DeepSeek's index heads and lists, over a cache of elements ``element``."""
    scaled = element == "*fp8e4nv"
    sizes = {"GROUPS": 1, "SIZE": 128, "BLOCK_D": 128, "BLOCK_SIZE": 64}
    none = {} if scaled else {"scales_ptr": None}
    pointers = {"keys_ptr": element, **({"scales_ptr": "*fp32"} if scaled else {})}
    strides = dict.fromkeys(("key_page_stride", "scale_page_stride"), "i32:16")
    score = dict.fromkeys(("q_stride", "q_head_stride", "weight_stride"), "i32:16")
    score |= dict.fromkeys(("table_stride", "num_requests", "num_positions"), "i32")
    score |= {"q_ptr": "*bf16", "weights_ptr": "*fp32", "table_ptr": "*i32:1", "starts_ptr": "*i32:1"}
    score |= {"positions_ptr": "*i64:1", "out_ptr": "*fp32:1"}
    store = {"k_ptr": "*bf16", "slots_ptr": "*i32:1", "k_stride": "i32:16"}
    choose = {
        "scores_ptr": "*fp32:1",
        "positions_ptr": "*i64:1",
        "out_ptr": "*i32",
        "stride": "i32",
        "num_scores": "i32",
    }
    module = "hardpoint.kernels.sparse_index:"
    return [
        Job(
            f"{module}index_scores_kernel",
            {**score, **pointers, **strides},
            {**sizes, **none, "H": 64, "BLOCK_H": 64, "BLOCK_N": sparse_index._KEYS},
            target,
            4,
            1,
        ),
        Job(
            f"{module}store_index_keys_kernel",
            {**store, **pointers, **strides},
            {**sizes, **none, "LARGEST": 448.0 if scaled else 0.0, "BLOCK_G": 1},
            target,
            4,
            1,
        ),
        Job(
            f"{module}topk_positions_kernel",
            choose,
            {"TOP_K": 2048, "BLOCK_K": 2048, "BLOCK": sparse_index._SCORES},
            target,
            8,
            1,
        ),
    ]


@pytest.mark.parametrize("targets", PAIRS_OF_TARGETS)
def test_compiled_for_devices(targets: tuple[str, ...]) -> None:
    """Cards of both makers; the 8-bit floats of one are not those of all of the other's."""
    wanted = [job for target in targets for job in jobs(target, "*bf16")]
    wanted += jobs(targets[0], "*fp8e4nv")
    for one in compile_kernels(wanted, seconds=300):
        assert one.spilled == 0, one
