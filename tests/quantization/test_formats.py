"""Each format through the engine: the logits of the same model with the numbers that were stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.quantization.formats import FORMATS, Format, write_quantized
from tests.support.checkpoints import check_tokens_equal, random_prompts, reference_logits
from tests.support.engines import prompt_logits, small_llm

TOLERANCE = 2e-4
"""Of logits of about 5: what the order of sums makes of them in float32."""


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_logits_are_those_of_the_stored_numbers(tmp_path: Path, form: Format) -> None:
    model = write_quantized(tmp_path, form)
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]
    with small_llm(tmp_path) as llm:
        got, expected = prompt_logits(llm, ids), reference_logits(model, ids)
        specs = {row.workload for row in llm.table.rows if row.family == "linear"}
        assert len(specs) > 1, "nothing but the head was quantized"
    if form.inputs is None:
        assert (got - expected).abs().max() < TOLERANCE
        return
    # An activation at the border of two elements may be rounded to either; the rest agrees.
    assert (got - expected).abs().median() < TOLERANCE
    assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).min() > 0.995


@pytest.mark.parametrize("form", [f for f in FORMATS if f.name in ("gptq-4", "awq", "ct-w4a16")], ids=str)
def test_greedy_tokens(tmp_path: Path, form: Format) -> None:
    model = write_quantized(tmp_path, form, "llama")
    prompts = random_prompts(4, 30, seed=1)
    with small_llm(tmp_path) as llm:
        from hardpoint import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
