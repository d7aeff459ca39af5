"""An engine's logits for given tokens, prompt and decode steps apart, against another engine's by the error model.

Two engines that round differently need not continue a prompt alike. So each continuation is one token again and again,
which alone is allowed; log-probabilities are the model's own all the same.
"""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from hardpoint import LLM, SamplingParams
from hardpoint.ops.comparison import Comparison
from hardpoint.ops.error_model import ErrorModel, compare
from tests.support.checkpoints import random_prompts

PROMPTS = random_prompts(13, 60, seed=5, shortest=2)
"""Decodes of so many are padded where sizes are prepared ahead."""

NUM_DECODED = 6


def forced(number: int) -> int:
    """The token that prompt ``number`` is continued with."""
    return 17 * number % 256


def scores(llm: LLM) -> list[torch.Tensor]:
    """Of each prompt, log-probabilities float64 [T - 1 + NUM_DECODED, vocab] of the tokens behind each position."""
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=NUM_DECODED,
            allowed_token_ids=[forced(number)],
            logprobs=-1,
            prompt_logprobs=-1,
            ignore_eos=True,
        )
        for number, _ in enumerate(PROMPTS)
    ]
    found = []
    for number, output in enumerate(llm.generate(PROMPTS, params, use_tqdm=False)):
        (completion,) = output.outputs
        assert completion.token_ids == [forced(number)] * NUM_DECODED
        rows = [*(output.prompt_logprobs or ())[1:], *(completion.logprobs or ())]
        found.append(torch.stack([torch.tensor([row[t].logprob for t in range(len(row))]) for row in rows if row]))
    return found


@torch.inference_mode()
def true_scores(model: PreTrainedModel, dtype: torch.dtype) -> list[torch.Tensor]:
    """The same by Transformers in float64, with weights rounded to ``dtype``."""
    exact: PreTrainedModel = copy.deepcopy(model)
    for parameter in exact.parameters():
        parameter.copy_(parameter.to(dtype))
    exact.double()
    if exact._can_set_experts_implementation():
        exact.set_experts_implementation("eager")  # the grouped product knows no float64
    found = []
    for number, prompt in enumerate(PROMPTS):
        ids = prompt + [forced(number)] * (NUM_DECODED - 1)
        found.append(exact(torch.tensor([ids])).logits[0].log_softmax(-1))
    return found


def check_alike(
    several: list[torch.Tensor], one: list[torch.Tensor], truth: list[torch.Tensor], dtype: torch.dtype
) -> None:
    """Hold what several ranks made to what one did: no further from the truth than the error model lets kernels be.

    Errors are counted in units of ``dtype``, in which the engines computed.
    """
    found = Comparison()
    for number, (mine, own, true) in enumerate(zip(several, one, truth, strict=True)):
        found.add(compare(f"prompt {number}", mine.to(dtype), own.to(dtype), true, ErrorModel(), torch.device("cpu")))
    assert not found.faults, "\n".join(map(str, found.faults))
