"""Experts over batches in an engine on a device: logits are those of the kernel for tokens as they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import LLM, SamplingParams
from tests.support.checkpoints import random_prompts, write_checkpoint
from tests.support.engines import prompt_logits

pytestmark = pytest.mark.accelerator
SIZES: dict[str, Any] = {"hidden_size": 256, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


@pytest.mark.parametrize("quantization", [None, "fp8", "int8"])
def test_an_engine(quantization: str | None, tmp_path: Path) -> None:
    """Decodes are captured."""
    write_checkpoint(tmp_path, "qwen3_moe", **SIZES)
    (prompt,) = random_prompts(1, 60, seed=3, shortest=60)

    def run(all2all: str) -> tuple[torch.Tensor, str, float]:
        settings: dict[str, Any] = {"kv_cache_memory": "64MiB", "max_num_seqs": 4, "dtype": "bfloat16"}
        with LLM(str(tmp_path), all2all_backend=all2all, quantization=quantization, **settings) as llm:
            (kernel,) = {row.chosen for row in llm.table.rows if row.family == "experts"}
            logits = prompt_logits(llm, prompt, 24)
            llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
            return logits, kernel, llm.metrics.value("hardpoint_graph_replays_total")

    found, kernel, replays = run("local_batches")
    assert kernel == ("triton_batched" if quantization is None else "triton_batched_quantized")
    assert replays > 0
    expected, _, _ = run("local")
    assert torch.nn.functional.cosine_similarity(found.float(), expected.float(), dim=-1).min() > 0.999
