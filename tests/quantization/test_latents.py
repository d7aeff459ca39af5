"""Latent attention over quantized matrices: keys' and values' is made plain again, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.ranks import ranks_in_threads
from tests.quantization.formats import FORMATS
from tests.quantization.test_divided import prompt_scores
from tests.quantization.test_formats import TOLERANCE
from tests.quantization.writing import Format, write_quantized
from tests.support.checkpoints import DEEPSEEK_V2, random_prompts, reference_logits
from tests.support.engines import prompt_logits, small_llm

# Dense layers alone: Transformers' experts are no linear modules, and these formats' writer leaves them out.
SIZES: dict[str, Any] = {"kv_lora_rank": 64, "q_lora_rank": 64, "v_head_dim": 16, "first_k_dense_replace": 3}


@pytest.mark.parametrize("form", [f for f in FORMATS if f.name in ("gptq-4", "awq", "ct-w8a16")], ids=str)
def test_logits_are_those_of_the_stored_numbers(tmp_path: Path, form: Format) -> None:
    model = write_quantized(tmp_path, form, "deepseek_v2", **DEEPSEEK_V2 | SIZES | {"intermediate_size": 128})
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, ids) - reference_logits(model, ids)).abs().max() < TOLERANCE
        alone = prompt_scores(llm)
    with ranks_in_threads(tmp_path, 2) as llm:
        assert (prompt_scores(llm) - alone).abs().max() < TOLERANCE
