"""The meaning of sampling parameters, token by token: shares no code with the sampler."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hardpoint.engine.scheduling.step import SlotSampling


def changed_logits(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], sampling: SlotSampling
) -> list[float]:
    """The logits of the token behind ``prompt`` and ``output``, after everything but temperature and truncations."""
    changed, bias = [], dict(sampling.logit_bias)
    for token, x in enumerate(logits):
        if sampling.allowed_token_ids is not None and token not in sampling.allowed_token_ids:
            x = -math.inf
        x += bias.get(token, 0.0)
        if token in sampling.stop_token_ids and len(output) < sampling.min_tokens:
            x = -math.inf
        if any((*output, token)[-len(word) :] == tuple(word) for word in sampling.bad_words):
            x = -math.inf
        if token in prompt or token in output:
            x = x / sampling.repetition_penalty if x > 0 else x * sampling.repetition_penalty
        if token in output:
            x -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
        changed.append(x)
    return changed
