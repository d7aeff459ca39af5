"""AITER's kernels of sparse attention's indexer through a stand-in, on tensors of the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import SamplingParams
from hardpoint.conformance.families.ops import verdicts
from hardpoint.conformance.site import op_of
from hardpoint.context import Context
from hardpoint.layers.sparse_indexer import SparseIndexer
from hardpoint.ops.draw import Draw
from hardpoint.ops.index_scores import index_scores
from hardpoint.ops.quantize_rows import quantize_rows
from hardpoint.plugin_host import discover
from hardpoint_plugin_api import ConfigError, LayerWorkload, QuantSpec, RopeArgs, Scale, SparseIndexerArgs
from hardpoint_rocm.aiter_sparse_index import AiterSparseIndexer, index_logits, topk_positions
from hardpoint_rocm.platform import describe_arch
from tests.support import aiter_triton_stand_in as stand_in
from tests.support.aiter_calls import CALLS
from tests.support.checkpoints import DEEPSEEK_V32, random_prompts, write_checkpoint
from tests.support.engines import small_llm
from tests.support.on_host_settings import without_triton

ASKED = {"use": {"layer.sparse_indexer": "aiter_indexer"}, "kv_cache_dtype": "fp8"}
TOP_K = "op.topk_positions=aiter"


def test_the_positions_of_the_highest_scores(aiter: None) -> None:
    """Also of zeros of both signs and of NaN, which AITER orders by their bits."""
    found = verdicts(op_of(discover(), "topk_positions"), topk_positions, torch.float32)
    assert len(found) > 10
    assert not [fault for verdict in found for fault in verdict.faults]


@pytest.mark.parametrize("heads", [32, 5, 64])
@pytest.mark.parametrize("element", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_scores(aiter: None, monkeypatch: pytest.MonkeyPatch, heads: int, element: torch.dtype) -> None:
    """Scores of core's op for the same 8-bit queries, in parts, with an unused row of the table."""
    monkeypatch.setattr("hardpoint_rocm.aiter_sparse_index._MOST_LOGITS", 3 * 128)
    draw = Draw(torch.Generator().manual_seed(heads), torch.float32, torch.device("cpu"))
    cache = {"index_key": draw.normal(9, 16, 1, 128).to(element), "index_key_scale": draw.floats(9, 16, 1) + 0.5}
    table = torch.tensor([[3, 1], [2, 8], [7, 5], [0, 0]], dtype=torch.int32)
    starts = torch.tensor([0, 1, 6, 8, 8], dtype=torch.int32)
    positions = torch.tensor([30, 0, 1, 2, 3, 4, 16, 17])
    q, weights = draw.normal(8, heads, 128).to(element), draw.normal(8, heads)
    found = index_logits(q, weights, cache, table, starts, positions)
    expected = index_scores.reference(q, weights, cache, table, starts, positions)
    assert CALLS["fp8_mqa_logits"] == 3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def engine(folder: Path, **more: Any) -> tuple[list[list[int]], dict[str, str]]:
    """Tokens of prompts that are read in several steps, and what was chosen of the indexer."""
    with small_llm(folder, **without_triton("rocm", max_num_batched_tokens=24, max_num_seqs=4, **more)) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in random_prompts(3, 40, shortest=20)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
        names = ("sparse_indexer", "topk_positions", "index_scores")
        chosen = {str(row.of): row.chosen for row in llm.table.rows if row.of in names}
        return [list(o.outputs[0].token_ids) for o in outputs], chosen


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3.2 whose index heads are as large as AITER's kernel wants, with lists shorter than prompts."""
    folder = tmp_path_factory.mktemp("deepseek_v32")
    write_checkpoint(folder, "deepseek_v32", **DEEPSEEK_V32 | {"index_head_dim": 128, "num_hidden_layers": 2})
    return folder


class Rounded(SparseIndexer):
    """Core's layer and ops, of queries that are rounded to the keys' dtype."""

    def scores(self, ctx: Context, layout: str) -> Callable[..., torch.Tensor]:
        spec = QuantSpec(ctx.kv_dtype, scales=(Scale("float32", (1, -1)),), static=False)

        def score(q: torch.Tensor, weights: torch.Tensor, *rest: Any) -> torch.Tensor:
            codes, scales = quantize_rows.reference(q.flatten(0, 1), spec=spec)
            scores: torch.Tensor = index_scores.reference(
                codes.view(q.shape), weights * scales.view(weights.shape), *rest
            )
            return scores

        return score


def test_an_engine(aiter: None, mi355x: None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are those of core's ops for the same queries. Where AITER is off, the next kernels serve."""
    tokens, chosen = engine(checkpoint, **ASKED)
    assert chosen == {"sparse_indexer": "aiter_indexer", "topk_positions": "aiter"}
    calls = dict(CALLS)
    off = {"kv_cache_dtype": "fp8", "deny": (*without_triton("rocm")["deny"], TOP_K)}
    _, chosen = engine(checkpoint, **off)
    assert chosen == {"sparse_indexer": "default", "topk_positions": "reference", "index_scores": "reference"}
    monkeypatch.setattr("hardpoint.layers.sparse_indexer.SparseIndexer.scores", Rounded.scores)
    expected, chosen = engine(checkpoint, **off)
    assert chosen == {"sparse_indexer": "default", "topk_positions": "reference"}
    assert all(calls[name] == CALLS[name] for name in ("fp8_mqa_logits", "top_k_per_row_prefill"))
    assert tokens == expected


def test_an_engine_with_the_top_k_alone(aiter: None, mi300x: None, checkpoint: Path) -> None:
    """It comes first without being asked for: its positions are core's."""
    tokens, chosen = engine(checkpoint)
    assert chosen == {"sparse_indexer": "default", "topk_positions": "aiter", "index_scores": "reference"}
    assert CALLS["top_k_per_row_prefill"]
    expected, _ = engine(checkpoint, deny=(*without_triton("rocm")["deny"], TOP_K))
    assert tokens == expected


def test_what_the_layer_does_not_take(aiter: None, mi300x: None, checkpoint: Path) -> None:
    args = SparseIndexerArgs(64, 20, 5, 128, 6, rope=RopeArgs(rotary_dim=8, theta=1e4))
    workload, device = LayerWorkload(of="sparse_indexer", args=args), describe_arch("MI300X", "gfx942")
    assert not AiterSparseIndexer.supports(workload, device)
    (reason,) = AiterSparseIndexer.supports(replace(workload, args=replace(args, head_size=96)), device)
    assert (reason.wanted, reason.supported) == ("96", "64 or 128")
    with pytest.raises(ConfigError, match=r"index keys of 8 bits, and the cache is float16; set --kv-cache-dtype fp8"):
        engine(checkpoint, use=ASKED["use"])


def test_the_stand_ins_refuse_what_the_real_ones_do() -> None:
    """So that a test above could have failed."""
    q, keys = torch.ones(2, 32, 64).to(torch.float8_e4m3fn), torch.ones(5, 64).to(torch.float8_e4m3fn)
    ends = torch.tensor([1, 5], dtype=torch.int32)
    good: dict[str, Any] = {"Q": q, "KV": keys, "kv_scales": torch.ones(5), "weights": torch.ones(2, 32)}
    good |= {"cu_starts": torch.zeros_like(ends), "cu_ends": ends}
    assert stand_in.fp8_mqa_logits(**good).isfinite().sum() == 6
    for change in (
        {"Q": q.half()},
        {"Q": q[:, :24], "weights": torch.ones(2, 24)},
        {"KV": keys.float()},
        {"kv_scales": torch.ones(5, 2)[:, 0]},
        {"cu_ends": ends.long()},
        {"weights": torch.ones(2, 32).half()},
    ):
        with pytest.raises(AssertionError):
            stand_in.fp8_mqa_logits(**{**good, **change})
    listed = torch.empty(1, 2, dtype=torch.int32)
    row: dict[str, Any] = {"logits": torch.tensor([[-0.0, 0.0, -1.0, -float("nan")]]), "indices": listed, "k": 2}
    row |= {
        "rowStarts": ends[:1] * 0,
        "rowEnds": ends[:1] + 3,
        "values": None,
        "numRows": 1,
        "stride0": 4,
        "stride1": 1,
    }
    stand_in.top_k_per_row_prefill(**row, stable=True)
    assert listed.tolist() == [[0, 1]]
    stand_in.top_k_per_row_prefill(**{**row, "k": 1, "indices": listed[:, :1].contiguous()}, stable=True)
    for wrong in ({"stable": False}, {"rowEnds": ends[:1].long()}, {"stride0": 5}, {"indices": listed.long()}):
        with pytest.raises(AssertionError):
            stand_in.top_k_per_row_prefill(**{**row, "stable": True, **wrong})
