"""How much memory the sampler takes within a step, found by trying it before the cache is sized."""

from __future__ import annotations

from dataclasses import replace

import torch

from hardpoint.engine.execution.sampling.sampler import Sampler
from hardpoint.engine.scheduling.step import NewRequest, ScheduledRequest, SlotSampling
from hardpoint_plugin_api import NO_DRAFT, Memory

MOST_LOGPROBS = 20
"""Log-probabilities that every request of the trial asks for: the most that OpenAI's protocol has."""

_PLAIN = SlotSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
_ALL_AT_ONCE = replace(
    _PLAIN,
    temperature=1.0,
    top_k=2,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
)


@torch.inference_mode()
def sampling_bytes(
    sampler: Sampler, memory: Memory, num_requests: int, num_drafts: int, vocab_size: int, dtype: torch.dtype
) -> int:
    """The most bytes of the device that a step's sampling holds at once, logits included.

    Draws for ``num_requests`` slots, and verifies ``num_drafts`` of each, where requests ask for everything that
    changes logits and for MOST_LOGPROBS. ``dtype`` is that of logits. Afterwards no slot asks for anything. Resets the
    peak of ``memory``.
    """
    settings = replace(
        _ALL_AT_ONCE,
        bad_words=((0, vocab_size - 1),),
        allowed_token_ids=tuple(range(min(3, vocab_size))),
        logprobs=min(MOST_LOGPROBS, vocab_size),
    )
    _set_slot(sampler, settings)
    memory.reset_peak()
    before = memory.snapshot().peak
    try:
        _sample(sampler, num_requests, num_drafts, vocab_size, dtype)
    finally:
        _set_slot(sampler, _PLAIN)
    return memory.snapshot().peak - before


def _set_slot(sampler: Sampler, settings: SlotSampling) -> None:
    """One request's settings suffice: what any request asks for, a step does to all."""
    arrays = sampler.take_new([NewRequest(0, (0,), settings, num_prompt_tokens=1)])
    device = sampler.last_token.device
    sampler.place_new({name: torch.from_numpy(x).to(device) for name, x in arrays.items()})


def _sample(sampler: Sampler, num_requests: int, num_drafts: int, vocab_size: int, dtype: torch.dtype) -> None:
    rows, device = 1 + num_drafts, sampler.last_token.device
    allowed = (bytes([255]) * -(-vocab_size // 8),) * rows
    # One request without a structure: then the others' logits are copied.
    shares = [
        ScheduledRequest(slot, 0, rows, (), True, allowed if slot or num_requests == 1 else (), (0,) * num_drafts)
        for slot in range(num_requests)
    ]
    slots = torch.arange(num_requests, device=device).repeat_interleave(rows)
    positions = torch.arange(1, rows + 1, device=device).repeat(num_requests)
    logits = torch.zeros(num_requests * rows, vocab_size, dtype=dtype, device=device)
    if num_drafts:
        drafts = torch.where(positions == rows, NO_DRAFT, 0)
        row_start = torch.arange(0, num_requests * rows + 1, rows, dtype=torch.int32, device=device)
        sampler.verify(logits, shares, slots, positions, drafts, row_start)
    else:
        sampler.sample(logits, shares, slots, positions)
